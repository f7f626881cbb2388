"""The prefix stage: batches in, frozen prefixes out. It belongs to the data pipeline, not to training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataio.batch import Batch
from dataio.loader import Loader
from somaspeed.metrics import PhaseTimer
from somaspeed.policies.base import Policy


class Ready(NamedTuple):
    """A micro-batch whose prefix is computed: all that the expert step needs, and where the loader stood after it."""

    batch: Batch
    inputs: Any
    prefix: Any
    noise: Tensor
    time: Tensor
    loader_state: dict[str, Any]


class PrefixStage:
    """Takes micro-batches from the loader and runs the policy's frozen part on them.

    It needs no expert weights, so the loop calls it while the gradients of the step before are being reduced.
    """

    def __init__(self, loader: Loader, policy: Policy, device: torch.device, timer: PhaseTimer) -> None:
        self.loader, self.policy, self.device, self.timer = loader, policy, device, timer
        self.batches: Iterator[Batch] = iter(loader)

    def next(self) -> Ready:
        """The next micro-batch of this rank, with its prefix."""
        with self.timer.phase("data_wait"):
            batch = next(self.batches)
            state = self.loader.state_dict()
        return self.run(batch, state)

    def run(self, batch: Batch, state: dict[str, Any]) -> Ready:
        """Prepare `batch` and compute its prefix."""
        with self.timer.phase("prepare"):
            moved = batch.to(self.device)
            inputs = self.policy.prepare(moved)
        with self.timer.phase("prefix"):
            prefix = self.policy.prefix(inputs, self.policy.frozen(inputs))
        return Ready(batch, inputs, prefix, moved.extra["noise"], moved.extra["time"], state)
