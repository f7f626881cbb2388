"""GR00T N1.7 (LeRobot `groot`): frozen Qwen3-VL features, trainable flow-matching action head."""

from somaspeed.policies.groot.policy import Groot
from somaspeed.policies.groot.sizes import SIZES, sized

__all__ = ["SIZES", "Groot", "sized"]
