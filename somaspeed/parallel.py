"""Ranks under torchrun: who we are, and the few collectives the step needs."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from somaspeed.config import ConfigError, ParallelConfig


class Ranks:
    """This process among all ranks. Alone, every collective is free and returns its input.

    Attributes:
        rank, world: this process's number and how many there are.
        device: the accelerator of this rank, or the CPU.
    """

    def __init__(self, settings: ParallelConfig) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if settings.replicate not in (None, self.world):
            raise ConfigError(
                f"parallel.replicate = {settings.replicate}, but {self.world} rank(s) are running. "
                "Leave it out, or start that many with torchrun --nproc-per-node."
            )
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if self.world > 1:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                timeout=datetime.timedelta(seconds=settings.timeout_seconds),
            )

    @property
    def main(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    def start_sum(self, tensors: list[Tensor]) -> list[Any]:
        """Start summing `tensors` over all ranks in place; hand the result to `finish`."""
        if self.world == 1:
            return []
        return [dist.all_reduce(tensor, async_op=True) for tensor in tensors]

    @staticmethod
    def finish(pending: list[Any]) -> None:
        """Wait until the sums that `start_sum` began are complete on this rank's stream."""
        for work in pending:
            work.wait()

    def maximum(self, values: list[float]) -> list[float]:
        """The element-wise maximum of `values` over ranks. Synchronises; for logging steps."""
        return self.combine(values, dist.ReduceOp.MAX)

    def mean(self, values: list[float]) -> list[float]:
        """The element-wise mean of `values` over ranks. Synchronises; for logging steps."""
        return [value / self.world for value in self.combine(values, dist.ReduceOp.SUM)]

    def combine(self, values: list[float], operation: Any) -> list[float]:
        if self.world == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=operation)
        return tensor.tolist()

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
