"""What the training loop asks of a policy: prepare, prefix, expert loss, and which parameters are live.

The frozen prefix is a function of the sample alone, so it is computed without autograd and may be cached; the
expert is what trains. The loop and the prefix stage know policies only through this interface.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dataio.batch import Batch
from dataio.manifest import Manifest
from somaspeed.config import Config, TrainingConfig
from somaspeed.optim import Group


class CacheSlot(NamedTuple):
    """What the prefix cache keeps of one sample: a tensor of `shape`, whose `axis` is padded to the slot's length."""

    shape: tuple[int, ...]
    axis: int
    compute_dtype: torch.dtype  # of `frozen`; the cache may store a narrower one


class PolicyError(ValueError):
    """A policy cannot be built or trained as configured. The message says what to change."""


class Policy[InputsT, PrefixT](abc.ABC):
    """One vision-language-action policy with a frozen prefix and a trainable action expert.

    Attributes:
        name: the policy's LeRobot type, e.g. `pi05`.
        device: where the module and the inputs are.
        cameras: the shards' cameras in the order of the model's image slots.
        windows: per column the frame offsets that one sample needs, e.g. `{"action": range(50)}`.
        lerobot_config: the LeRobot configuration that the policy is built from.
        module: LeRobot's policy, once `load` has run; its parameters are trained in place.

    Building one from (config, manifest, device) checks everything that needs no weights.
    """

    name: ClassVar[str]
    device: torch.device
    cameras: list[str]
    windows: dict[str, list[int]]
    lerobot_config: Any
    module: nn.Module

    @abc.abstractmethod
    def __init__(self, config: Config, manifest: Manifest, device: torch.device) -> None: ...

    @abc.abstractmethod
    def load(self) -> None:
        """Build `module` on the device: the checkpoint's weights, or random ones of the configured size."""

    @abc.abstractmethod
    def host(self, batch: Batch) -> dict[str, Tensor]:
        """CPU side of `prepare`, run in the loader's thread: normalised columns and text tokens, as CPU tensors.

        A policy with a prefix cache adds `cacheable`, bool [B]: whose frozen part fits a slot.
        """

    @abc.abstractmethod
    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Noise and flow time of one sample, float32, from its own generator."""

    @abc.abstractmethod
    def prepare(self, batch: Batch) -> InputsT:
        """The model's inputs on its device, from a batch whose `extra` holds what `host` returned.

        The batch may have images for some rows only (`image_rows`), or none: then `frozen` is not called on it.
        """

    @abc.abstractmethod
    def frozen(self, inputs: InputsT) -> Tensor:
        """What the frozen part computes of each sample, [B, …]: a function of the sample alone, without autograd.

        This is what the prefix cache stores, so it is the cheapest point from which `prefix` can go on.
        """

    def cache_slot(self) -> CacheSlot:
        """The shape of one sample's `frozen`. Raises PolicyError when the recipe rules a cache out."""
        raise PolicyError(f'{self.name} has no prefix cache; set prefix.cache = "off".')

    def cache_key(self) -> dict[str, Any]:
        """All that `frozen` depends on beside weights and frames, as plain values: the cache is keyed by it."""
        raise PolicyError(f'{self.name} has no prefix cache; set prefix.cache = "off".')

    def frozen_length(self, inputs: InputsT) -> int:
        """The length of `frozen` along the slot's axis for these inputs."""
        raise PolicyError(f'{self.name} has no prefix cache; set prefix.cache = "off".')

    @abc.abstractmethod
    def prefix(self, inputs: InputsT, frozen: Tensor) -> PrefixT:
        """All that the expert reads of the prefix, without autograd, from what `frozen` gave or the cache held."""

    @abc.abstractmethod
    def expert_loss(self, prefix: PrefixT, inputs: InputsT, noise: Tensor, time: Tensor) -> Tensor:
        """The scalar training loss, differentiable in the live parameters."""

    @abc.abstractmethod
    def live_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters that receive gradients, by their LeRobot names, in the module's order."""

    def left_out(self) -> dict[str, int]:
        """What LeRobot marks as trainable and no gradient ever reaches: name → number of elements, e.g. unused heads.

        A table of which some rows train counts with the others.
        """
        live = self.live_parameters()
        rest = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parts = (part.numel() for key, part in live.items() if key == name or key.startswith(f"{name}["))
                rest[name] = parameter.numel() - sum(parts)
        return {name: elements for name, elements in rest.items() if elements}

    def group_of(self, name: str, parameter: nn.Parameter) -> Group:
        """How a live parameter is updated; by default all alike, with weight decay."""
        return Group()

    @abc.abstractmethod
    def learning_rate(self, steps: int, settings: TrainingConfig) -> Callable[[int], float]:
        """The policy's native schedule over `steps` updates: a function from update number to learning rate."""

    @abc.abstractmethod
    def save(self, directory: Path, final: Path) -> None:
        """Write a complete LeRobot policy directory into `directory`, which will be renamed to `final`."""

    @abc.abstractmethod
    def preview(self, inputs: InputsT) -> tuple[np.ndarray, list[str]]:
        """What the policy sees: uint8 images [B, slots, H, W, 3] and one line of text per sample."""
