"""Ranks under torchrun: who we are, and the few collectives the step needs."""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from somaspeed.config import ParallelConfig


class Ranks:
    """This process among all ranks. Alone, every collective is free and returns its input.

    Attributes:
        rank, world: this process's number and how many there are.
        device: the accelerator of this rank, or the CPU.
        stop_requested: whether SIGTERM has come; the loop then ends with a checkpoint.
    """

    def __init__(self, settings: ParallelConfig) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.stop_requested = False
        # From here to `close`, also while the ranks that are left find out which one died.
        self.previous_handler = signal.signal(signal.SIGTERM, self.request_stop)
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if self.world > 1:
            timeout = datetime.timedelta(seconds=settings.timeout_seconds)
            self.store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=self.store,
                rank=self.rank,
                world_size=self.world,
                timeout=timeout,
            )

    def request_stop(self, _signal: int, _frame: Any) -> None:
        self.stop_requested = True

    @property
    def main(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

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

    def missing(self, patience: float = 5.0) -> list[int]:
        """After a collective failed: the ranks that did not fail in one too, because they died or gave up before.

        Every rank that is left says so in the store and waits `patience` seconds for each of the others.
        """
        self.store.set(f"failed/{self.rank}", "1")
        silent = []
        for other in range(self.world):
            try:
                self.store.wait([f"failed/{other}"], datetime.timedelta(seconds=patience))
            except (RuntimeError, dist.DistError):
                silent.append(other)
        return silent

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self.previous_handler)
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
