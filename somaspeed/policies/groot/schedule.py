"""GR00T's learning rate, from LeRobot's own scheduler configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lerobot.optim import DiffuserSchedulerConfig

from somaspeed.config import TrainingConfig


def cosine_to_zero(steps: int, settings: TrainingConfig) -> Callable[[int], float]:
    """Linear warm-up over `warmup_steps` from zero, then half a cosine to zero at `steps`."""
    carrier = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=settings.lr)
    preset = DiffuserSchedulerConfig(name="cosine", num_warmup_steps=settings.warmup_steps)
    factor: Any = preset.build(carrier, steps).lr_lambdas[0]
    return lambda step: settings.lr * factor(step)
