"""The global order of samples: a function of (seed, epoch, position), the same for any ranks and workers.

Every epoch is one permutation of all samples. It is computed, not stored: a Feistel network keyed by
(seed, epoch) permutes [0, 2^bits), and cycle walking restricts it to [0, samples). So the sample at any
position of any epoch costs a few vectorised operations and no memory, and resuming is O(1) for any set.
"""

from __future__ import annotations

import hashlib

import numpy as np

from dataio.manifest import DataError

# Fewer rounds leave the permutations of the smallest sets (five samples) visibly uneven over the epochs.
ROUNDS = 12


class Order:
    """The permutations of `samples` samples under one `seed`."""

    def __init__(self, samples: int, seed: int | str):
        if samples < 1:
            raise DataError(f"an order needs at least one sample, got {samples}")
        self.samples = samples
        self.seed = seed
        # An unbalanced network keeps the domain below 2·samples: cycle walking takes two passes on average.
        bits = max(2, (samples - 1).bit_length())
        self._low_bits = np.uint64(bits - bits // 2)
        self._low_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits // 2)) - 1)

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The samples at `positions` (integers in [0, samples)) of `epoch`: int64, in [0, samples)."""
        keys = round_keys(self.seed, epoch)
        values = self._permute(np.asarray(positions).astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.samples)
        while outside.size:
            values[outside] = self._permute(values[outside], keys)
            outside = outside[values[outside] >= self.samples]
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        high, low = values >> self._low_bits, values & self._low_mask
        for even, odd in zip(keys[0::2], keys[1::2], strict=True):
            high ^= mix(low + even) & self._high_mask
            low ^= mix(high + odd) & self._low_mask
        return (high << self._low_bits) | low


class Stream:
    """Epoch after epoch without end: stream position p is position p mod n of epoch p div n."""

    def __init__(self, samples: int, seed: int):
        self.order = Order(samples, seed)

    def at(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stream positions [start, start + count) as (epoch, position in it, sample), each int64 [count].

        A batch may straddle the end of an epoch, or hold several epochs of a small set; nothing is dropped.
        """
        epoch, position = np.divmod(np.arange(start, start + count), self.order.samples)
        sample = np.empty(count, np.int64)
        for value in range(int(epoch[0]), int(epoch[-1]) + 1):
            here = epoch == value
            sample[here] = self.order.at(value, position[here])
        return epoch, position, sample


def round_keys(seed: int | str, epoch: int) -> np.ndarray:
    """The keys of the network's rounds, uint64 [ROUNDS]."""
    digest = hashlib.shake_128(f"somaspeed order {seed} {epoch}".encode()).digest(8 * ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every input bit moves every output bit (splitmix64's finalizer:
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
