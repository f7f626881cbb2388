"""What every policy does with LeRobot in the same way: configuration keys, schedule, saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lerobot.optim import CosineDecayWithWarmupSchedulerConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor, nn

from dataio.manifest import did_you_mean
from somaspeed.config import ModelConfig, TrainingConfig
from somaspeed.policies.base import PolicyError


def check_supported(model: ModelConfig, sizes: Iterable[str], native_backend: str) -> None:
    """Raise PolicyError for what the frozen prefix rules out, naming the backend that does it, or an unknown size."""
    if model.lora or not model.train_expert_only:
        what = "LoRA" if model.lora else "training the vision-language model"
        raise PolicyError(
            f"{what} is not supported here: the frozen prefix is what makes this trainer fast. "
            f'Use backend = "{native_backend}".'
        )
    if model.size not in sizes:
        raise PolicyError(f"model.size = {model.size!r} is not known{did_you_mean(model.size, sizes)}")


def checked_options(model: ModelConfig, config_class: type) -> dict[str, Any]:
    """The policy's own keys of `[model]`. Raises PolicyError for one that `config_class` does not have."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    for key in model.options:
        if key not in fields:
            known = sorted(fields | set(ModelConfig.__struct_fields__) - {"options"})
            raise PolicyError(
                f"model.{key} is neither a key of [model] nor of {config_class.__name__}{did_you_mean(key, known)}"
            )
    return model.options


def cosine_decay(steps: int, settings: TrainingConfig) -> Callable[[int], float]:
    """LeRobot's cosine decay with warm-up; it scales itself down when `steps` is below `decay_steps`."""
    preset = CosineDecayWithWarmupSchedulerConfig(
        num_warmup_steps=settings.warmup_steps,
        num_decay_steps=settings.decay_steps,
        peak_lr=settings.lr,
        decay_lr=settings.decay_lr,
    )
    carrier = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=settings.lr)
    factor: Any = preset.build(carrier, steps).lr_lambdas[0]
    return lambda step: settings.lr * factor(step)


def narrow_frozen(module: nn.Module) -> dict[str, Tensor]:
    """Store the frozen fp32 weights of linear and convolution layers in bf16; returns the originals, on the host.

    Under autocast these layers round their weights to bf16 in every call, so results stay bit-identical. Norms and
    embeddings compute in fp32 and keep their dtype.
    """
    originals = {}
    for prefix, layer in module.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            if not parameter.requires_grad and parameter.dtype == torch.float32:
                originals[f"{prefix}.{name}"] = parameter.detach().cpu()
                parameter.data = parameter.data.to(torch.bfloat16)
    return originals


def save_module(
    module: PreTrainedPolicy, live: Iterable[nn.Parameter], originals: dict[str, Tensor], directory: Path
) -> None:
    """Write LeRobot's `config.json` and `model.safetensors` with the full state dict.

    Live parameters are views of one buffer, and safetensors refuses shared storage, so they are copied to the host.
    `originals` replace weights that `narrow_frozen` stored in bf16.
    """
    views = {id(parameter) for parameter in live}
    state = module.state_dict(keep_vars=True)
    copies = {
        name: tensor.detach().to("cpu", copy=True) if id(tensor) in views else tensor.detach()
        for name, tensor in state.items()
    }
    module.save_pretrained(directory, state_dict=copies | originals)
