"""π0.5 (LeRobot `pi05`): frozen PaliGemma prefix, trainable Gemma action expert."""

from somaspeed.policies.pi05.policy import PI05
from somaspeed.policies.pi05.sizes import SIZES, sized

__all__ = ["PI05", "SIZES", "sized"]
