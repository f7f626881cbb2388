"""The order of our loader for an upstream trainer, so that both trainers see the same batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dataio.order import Stream

BLOCK = 1024  # positions computed at a time


class OurOrder:
    """A sampler without end, over `samples` frames under `seed`; it says that it is `length` long.

    Frame i of a dataset exported from shards in episode order is sample i of those shards.
    """

    def __init__(self, samples: int, seed: int, length: int | None = None) -> None:
        self.stream, self.length = Stream(samples, seed), length or samples

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for start in itertools.count(step=BLOCK):
            yield from self.stream.at(start, BLOCK)[2].tolist()
