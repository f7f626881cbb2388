"""Our configuration as the upstream policies' own: optimizer and schedule keys, and `[model]`'s own keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from lerobot.configs import PreTrainedConfig

from dataio.manifest import did_you_mean
from somaspeed.config import ModelConfig, TrainingConfig
from somaspeed.policies.base import PolicyError
from somaspeed.policies.lerobot import checked_options


def optimizer_options(settings: TrainingConfig, config_class: type) -> dict[str, Any]:
    """`[training]`'s optimizer and schedule under the names that `config_class` has for them."""
    ours = {
        "optimizer_lr": settings.lr,
        "optimizer_action_expert_lr": settings.lr,
        "optimizer_betas": settings.betas,
        "optimizer_eps": settings.eps,
        "optimizer_weight_decay": settings.weight_decay,
        "optimizer_grad_clip_norm": settings.clip_grad,
        "scheduler_warmup_steps": settings.warmup_steps,
        "scheduler_decay_steps": settings.decay_steps,
        "scheduler_decay_lr": settings.decay_lr,
    }
    known = {field.name for field in dataclasses.fields(config_class)}
    return {key: value for key, value in ours.items() if key in known}


def check_size(size: str, known: Iterable[str]) -> None:
    """Raise PolicyError for an unknown `model.size`."""
    if size not in known:
        raise PolicyError(f"model.size = {size!r} is not known{did_you_mean(size, known)}")


def upstream_config[C: PreTrainedConfig](
    model: ModelConfig, config_class: type[C], recipe: dict[str, Any], device: str
) -> C:
    """LeRobot's configuration of `config_class`: `recipe`, and over it the policy's own keys of `[model]`.

    Raises PolicyError for a key that the policy does not have, or a checkpoint of another policy.
    """
    values = {"device": device, "push_to_hub": False, **recipe, **checked_options(model, config_class)}
    if not model.path:
        return config_class(**values)
    base = PreTrainedConfig.from_pretrained(model.path)
    if not isinstance(base, config_class):
        raise PolicyError(f"model.path = {model.path} holds a {base.type!r} policy, not {model.name}")
    loaded = dataclasses.replace(base, **values)
    loaded.pretrained_path = Path(model.path)
    return loaded


def without_options(model: ModelConfig, *names: str) -> ModelConfig:
    """`model` without the policy's own keys of these names."""
    options = {key: value for key, value in model.options.items() if key not in names}
    return msgspec.structs.replace(model, options=options)
