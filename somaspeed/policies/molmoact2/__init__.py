"""MolmoAct2 (LeRobot `molmoact2`): frozen vision-language model, trainable flow-matching action expert."""

from somaspeed.policies.molmoact2.policy import MolmoAct2
from somaspeed.policies.molmoact2.sizes import SIZES

__all__ = ["SIZES", "MolmoAct2"]
