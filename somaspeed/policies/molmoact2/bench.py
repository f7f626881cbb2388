"""MolmoAct2 for the benchmarks: LeRobot's own forward in each native variant, and FLOPs on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy


@contextlib.contextmanager
def checkpointed(module: MolmoAct2Policy, enabled: bool) -> Iterator[None]:
    """LeRobot's own activation checkpointing, while in the context.

    It also makes the embeddings require gradients, so that the frozen language model is run backward.
    """
    module.config.gradient_checkpointing = enabled
    if enabled:
        module._enable_gradient_checkpointing()
    try:
        yield
    finally:
        module.config.gradient_checkpointing = False
        if enabled:
            module.model.gradient_checkpointing_disable()
            module.model.disable_input_require_grads()
            module.model.model.transformer.gradient_checkpointing = False
            module.model.model.vision_backbone.gradient_checkpointing = False
