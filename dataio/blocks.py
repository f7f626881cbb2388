"""The block-shuffled order: whole shards in flight, samples shuffled across them, for shards that must be streamed.

Every epoch permutes the shards, cuts the permutation into blocks of so many shards, and permutes the samples of each
block. Like the global permutation it is a function of (seed, epoch, position), the same for any ranks and workers,
and resumed in O(shards).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from dataio.order import Order, Stream
from dataio.reader import ShardReader

WITHIN = 5  # frames: closer ones of an episode are near duplicates
PROBES = 16  # batches looked at to judge an order


@dataclass(frozen=True)
class Epoch:
    """One epoch's blocks: the shards in their order, and where every block starts among them and in the epoch."""

    shards: np.ndarray
    first_shard: np.ndarray
    first_position: np.ndarray


class BlockStream:
    """Stands in for `dataio.order.Stream`: epoch after epoch without end, in block-shuffled order.

    shard: int64 [n], the shard of every sample of the order; `block`: how many shards are in flight.
    """

    def __init__(self, shard: np.ndarray, block: int, seed: int):
        self.block, self.seed = block, seed
        self.samples = len(shard)
        self._by_shard = np.argsort(shard, kind="stable")
        self._shards, self._starts, self._sizes = np.unique(
            shard[self._by_shard], return_index=True, return_counts=True
        )
        self._order = Order(len(self._shards), seed)
        self._epoch = functools.lru_cache(maxsize=4)(self._lay_out)

    @property
    def blocks(self) -> int:
        """Blocks in an epoch."""
        return -(-len(self._shards) // self.block)

    def at(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stream positions [start, start + count) as (epoch, position in it, sample), each int64 [count]."""
        epoch, position = np.divmod(np.arange(start, start + count), self.samples)
        sample = np.empty(count, np.int64)
        for value in range(int(epoch[0]), int(epoch[-1]) + 1):
            here = np.flatnonzero(epoch == value)
            block = self._blocks_at(value, position[here])
            for number in np.unique(block).tolist():
                rows = here[block == number]
                sample[rows] = self._in_block(value, number, position[rows])
        return epoch, position, sample

    def around(self, epoch: int, position: int) -> list[list[int]]:
        """The shards of the block at a position, of the block after it, and of the one before it."""
        number = epoch * self.blocks + int(self._blocks_at(epoch, np.array([position]))[0])
        return [self._shards_of(each) if each >= 0 else [] for each in (number, number + 1, number - 1)]

    def _lay_out(self, epoch: int) -> Epoch:
        shards = self._order.at(epoch, np.arange(len(self._shards)))
        ends = np.concatenate([[0], np.cumsum(self._sizes[shards])])
        first = np.arange(0, len(shards), self.block)
        return Epoch(shards, first, ends[first])

    def _blocks_at(self, epoch: int, position: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._epoch(epoch).first_position, position, side="right") - 1

    def _shards_of(self, number: int) -> list[int]:
        """Shards of block `number`, counted on over the epochs."""
        epoch, block = divmod(number, self.blocks)
        layout = self._epoch(epoch)
        first = layout.first_shard[block]
        return self._shards[layout.shards[first : first + self.block]].tolist()

    def _in_block(self, epoch: int, number: int, position: np.ndarray) -> np.ndarray:
        """The samples at `position` int64 [m] of `epoch`, all in block `number`."""
        layout = self._epoch(epoch)
        first = layout.first_shard[number]
        shards = layout.shards[first : first + self.block]
        ends = np.cumsum(self._sizes[shards])
        order = Order(int(ends[-1]), f"{self.seed} block {number}")
        place = order.at(epoch, position - layout.first_position[number])
        which = np.searchsorted(ends, place, side="right")
        offset = place - (ends - self._sizes[shards])[which]
        return self._by_shard[self._starts[shards[which]] + offset]


def neighbours(reader: ShardReader, samples: np.ndarray, stream: Stream | BlockStream, batch: int) -> float:
    """The fraction of samples that share their batch with another frame of their episode at most 5 frames away.

    Judged on batches spread over the first epoch: the lower, the better shuffled.
    """
    starts = np.linspace(0, max(len(samples) - batch, 0), PROBES).astype(int)
    close = 0
    for start in starts.tolist():
        ids = samples[stream.at(start, batch)[2]]
        places = np.unique(reader.episode[ids] * (int(reader.frame.max()) + WITHIN + 1) + reader.frame[ids])
        gaps = np.diff(places) <= WITHIN
        close += np.count_nonzero(np.concatenate([gaps, [False]]) | np.concatenate([[False], gaps]))
    return close / (len(starts) * batch)


def describe(reader: ShardReader, samples: np.ndarray, block: int, seed: int, batch: int) -> str:
    """One line on the block-shuffled order and its shuffle quality beside that of the global permutation."""
    stream = BlockStream(reader.shard_of(samples), block, seed)
    mean = len(samples) / stream.blocks
    here, best = (neighbours(reader, samples, each, batch) for each in (stream, Stream(len(samples), seed)))
    return (
        f"block-shuffled, {stream.blocks} block(s) of {block} shards ({mean:,.0f} samples); {here:.1%} of samples "
        f"share a batch of {batch} with a frame at most {WITHIN} away, {best:.1%} under one permutation of all"
    )
