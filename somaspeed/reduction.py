"""The reduction of the flat gradients: started after backward, finished before the update, hidden in between.

Ranks form a grid of replicas × shards. Unsharded, one all-reduce per arena and global batch sums the gradients. With
shards, a reduce-scatter gives each rank the sum of its own range, replicas add theirs, and after the update the ranks
of a shard group gather the compute parameters. Gradients travel in fp32 or bf16; they are always summed in fp32: in
bf16 every rank receives the others' ranges as they are and sums them itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from somaspeed.config import ConfigError, ParallelConfig
from somaspeed.optim import ArenaAdamW
from somaspeed.parallel import Ranks


class Layout:
    """This rank's place in the grid: consecutive ranks form a shard group, equal places in the groups a replica group.

    Raises ConfigError when replicas × shards is not the number of ranks.
    """

    def __init__(self, ranks: Ranks, settings: ParallelConfig) -> None:
        self.shards = settings.shard
        self.replicas = settings.replicate or max(ranks.world // self.shards, 1)
        if self.replicas * self.shards != ranks.world:
            raise ConfigError(
                f"parallel.replicate × parallel.shard = {self.replicas} × {self.shards}, but {ranks.world} rank(s) are "
                "running. Leave replicate out, and let shard divide the ranks."
            )
        self.ranks = ranks
        self.shard = ranks.rank % self.shards
        self.shard_group = self.replica_group = None
        if self.shards > 1:
            for first in range(0, ranks.world, self.shards):
                members = list(range(first, first + self.shards))
                group = dist.new_group(members)
                if ranks.rank in members:
                    self.shard_group = group
            for place in range(self.shards):
                members = list(range(place, ranks.world, self.shards))
                group = dist.new_group(members)
                if ranks.rank in members:
                    self.replica_group = group

    def total(self, scalar: Tensor) -> None:
        """Sum `scalar` in place over the ranks that hold the other ranges."""
        if self.shards > 1:
            dist.all_reduce(scalar, group=self.shard_group)


class Reduction:
    """Sums the gradients of all arenas over ranks. `bytes_per_step` counts what one rank hands to the network."""

    def __init__(self, layout: Layout, optimizer: ArenaAdamW, wire: str) -> None:
        self.layout, self.optimizer = layout, optimizer
        self.wire = torch.bfloat16 if wire == "bfloat16" else torch.float32
        self.world = layout.ranks.world
        self.pending: list[Any] = []
        self.received: list[Tensor] = []
        # A bf16 sum over replicas is scattered over all of them, so it needs ranges of its own.
        self.parts = layout.shards if layout.shards > 1 else self.world
        self.group = layout.shard_group
        self.bytes_per_step = 0

    def start(self) -> None:
        """Start summing; the gradients must not change until `finish`."""
        self.bytes_per_step = 0
        if self.world == 1:
            return
        for part in self.optimizer.shards:
            grad = part.arena.grad
            self.bytes_per_step += grad.numel() * self.wire.itemsize
            if self.wire == torch.bfloat16:
                received = torch.empty(self.padded(grad), dtype=self.wire, device=grad.device)
                sent = torch.zeros_like(received)
                sent[: len(grad)] = grad
                self.received.append(received)
                self.pending.append(dist.all_to_all_single(received, sent, group=self.group, async_op=True))
            elif self.layout.shards > 1:
                self.pending.append(dist.reduce_scatter_tensor(part.grad, grad, group=self.group, async_op=True))
            else:
                self.pending.append(dist.all_reduce(grad, async_op=True))

    def finish(self) -> None:
        """Wait for the sums: afterwards every shard's `grad` is the sum over all ranks."""
        for work in self.pending:
            work.wait()
        self.pending.clear()
        for part, received in zip(self.optimizer.shards, self.received, strict=False):
            total = received.view(self.parts, -1).float().sum(dim=0)
            if self.layout.shards > 1:
                part.grad.copy_(total)
            else:
                whole = torch.empty(self.padded(part.grad), dtype=self.wire, device=total.device)
                dist.all_gather_into_tensor(whole, total.to(self.wire))
                part.grad.copy_(whole[: len(part.grad)])
        self.received.clear()
        if self.layout.shards > 1 and self.layout.replicas > 1:
            for part in self.optimizer.shards:
                dist.all_reduce(part.grad, group=self.layout.replica_group)

    def padded(self, flat: Tensor) -> int:
        """The length of `flat` rounded up to equal parts."""
        return -(-len(flat) // self.parts) * self.parts

    def gather(self) -> None:
        """After the update: every rank gets the compute parameters that the others updated."""
        if self.layout.shards == 1:
            return
        for part in self.optimizer.shards:
            mine = part.arena.compute[part.start : part.stop].clone()
            dist.all_gather_into_tensor(part.arena.compute, mine, group=self.group)
