"""Noise and flow time from a counter-based generator keyed by the sample's place in the run.

The key is (seed, epoch, position, draw), so ranks never share draws, the world size does not change them, and
resuming repeats them. Philox is counter-based: making a generator for one sample costs microseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dataio.batch import Batch

DrawSample = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
HELD_OUT = 2**62  # the epoch that keys held-out draws: no training epoch reaches it


def sample_generator(seed: int, epoch: int, position: int, draw: int = 0) -> np.random.Generator:
    """The generator of draw number `draw` of the sample at `position` in `epoch`."""
    key = np.array([seed & (2**64 - 1), draw], dtype=np.uint64)
    counter = np.array([0, 0, position, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_batch(seed: int, batch: Batch, draw_sample: DrawSample, fixed: bool = False) -> dict[str, Tensor]:
    """Noise [B, …] and time [B, …] float32 of every sample of `batch`; with `fixed` they depend on the sample alone."""
    drawn = [
        draw_sample(sample_generator(seed, HELD_OUT, sample) if fixed else sample_generator(seed, epoch, position))
        for sample, epoch, position in zip(
            batch.sample.tolist(), batch.epoch.tolist(), batch.position.tolist(), strict=True
        )
    ]
    noise, time = (torch.from_numpy(np.stack(parts)) for parts in zip(*drawn, strict=True))
    return {"noise": noise, "time": time}
