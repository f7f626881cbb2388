"""The prefix stage: batches in, frozen prefixes out. It belongs to the data pipeline, not to training.

With a prefix cache, samples that are in it come without images: the loader's thread copies their slots into a buffer,
and only the others go through the frozen model, whose results a background thread stores.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from dataio.batch import Batch
from dataio.loader import Loader
from dataio.reader import ShardReader
from dataio.ring import Ring
from somaspeed.cache import SHARED_MEMORY, PrefixCache, open_cache, read_bandwidth, weights_digest
from somaspeed.config import Config, ConfigError
from somaspeed.metrics import PhaseTimer
from somaspeed.parallel import Ranks
from somaspeed.policies.base import CacheSlot, Policy

LAYOUT = 1  # of the slots and of what computes them; raise it when the frozen forward changes


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

    def __init__(
        self, loader: Loader, policy: Policy, device: torch.device, timer: PhaseTimer, cached: CachedPrefix | None
    ) -> None:
        self.loader, self.policy, self.device, self.timer, self.cached = loader, policy, device, timer, cached
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
            frozen = self.cached.complete(batch, moved, inputs) if self.cached else self.policy.frozen(inputs)
            prefix = self.policy.prefix(inputs, frozen)
        return Ready(batch, inputs, prefix, moved.extra["noise"], moved.extra["time"], state)


class CachedPrefix:
    """The prefix cache between loader and policy.

    Args:
        bandwidth: measured bytes per second of reading slots back, `None` for a cache in memory. When recomputing a
            sample turns out faster than reading its slot, `complete` raises ConfigError.
        microbatch, spare, pinned: size, number and kind of the host buffers that slots are read into.
    """

    def __init__(
        self, cache: PrefixCache, policy: Policy, bandwidth: float | None, microbatch: int, spare: int, pinned: bool
    ) -> None:
        self.cache, self.policy, self.bandwidth = cache, policy, bandwidth
        self.slot = policy.cache_slot()
        self.ring = Ring(microbatch * cache.slot_bytes, spare, pinned)
        self.computed = 0  # batches that went through the frozen model as a whole
        self.pending: queue.Queue[tuple[np.ndarray, Tensor, Any] | None] = queue.Queue(maxsize=4)
        self.failure: Exception | None = None
        self.writer = threading.Thread(target=self.store_forever, name="prefix cache", daemon=True)
        self.writer.start()

    def skip(self, samples: np.ndarray) -> np.ndarray:
        """Which samples need no image: the loader's `skip`."""
        return self.cache.has(samples)

    def host(self, batch: Batch) -> dict[str, Any]:
        """In the loader's thread: the slots of the rows without images, `frozen` [B, *slot], other rows unset."""
        size = len(batch)
        if len(batch.image_rows) == size:
            return {}
        lease = self.ring.lease()
        rows = lease.memory[: size * self.cache.slot_bytes].view(size, -1)
        computed = set(batch.image_rows.tolist())
        stored = [row for row in range(size) if row not in computed]
        self.cache.scatter(batch.sample[stored].tolist(), [[rows[row].numpy()] for row in stored])
        return {"frozen": rows.view(self.cache.dtype).view(size, *self.cache.shape), "frozen_lease": lease}

    def complete(self, batch: Batch, moved: Batch, inputs: Any) -> Tensor:
        """What `policy.frozen` gives for the whole batch: read for some rows, computed and stored for the others."""
        if self.failure:
            raise self.failure
        computed = len(batch.image_rows)
        if computed == len(batch):
            frozen = self.compute(inputs, computed)
            self.store(batch, batch.sample, frozen)
            return frozen
        lease = batch.extra["frozen_lease"]
        if moved.sample.is_cuda:
            event = torch.cuda.Event()
            event.record()
            lease.fence(event)
        stored = moved.extra["frozen"].to(self.slot.compute_dtype)
        if computed == 0:
            return self.fit(stored, self.policy.frozen_length(inputs))
        sub = moved.with_images()
        fresh = self.policy.frozen(self.policy.prepare(sub))
        self.store(batch.with_images(), batch.sample[batch.image_rows], fresh)
        length = self.policy.frozen_length(inputs)
        frozen = self.fit(stored, length)
        frozen[moved.image_rows] = self.fit(fresh, length)
        return frozen

    def compute(self, inputs: Any, samples: int) -> Tensor:
        """Run the frozen part, and once, when it has warmed up, compare its time with reading."""
        self.computed += 1
        if self.computed != 2 or self.bandwidth is None:
            return self.policy.frozen(inputs)
        wait_for(self.policy.device)
        started = time.perf_counter()
        frozen = self.policy.frozen(inputs)
        wait_for(self.policy.device)
        compute = (time.perf_counter() - started) / samples
        read = self.cache.slot_bytes / self.bandwidth
        if read > compute:
            raise ConfigError(
                f"prefix.cache: reading a slot of {self.cache.slot_bytes / 1e6:.2f} MB takes {read * 1e3:.1f} ms at "
                f"the measured {self.bandwidth / 1e9:.2f} GB/s of {self.cache.directory}, computing it "
                f"{compute * 1e3:.1f} ms. "
                'Set prefix.cache = "off", or prefix.directory to a faster disk.'
            )
        return frozen

    def fit(self, frozen: Tensor, length: int) -> Tensor:
        """`frozen` [B, …] with its variable axis padded with zeros, or cut, to `length`."""
        axis = self.slot.axis + 1
        missing = length - frozen.shape[axis]
        if missing > 0:
            return F.pad(frozen, (0, 0) * (frozen.ndim - 1 - axis) + (0, missing))
        return frozen.narrow(axis, 0, length)

    def store(self, batch: Batch, samples: Tensor, frozen: Tensor) -> None:
        """Hand the rows that fit a slot to the writer. On a device the copy to the host is not waited for here."""
        rows = batch.extra["cacheable"].nonzero().flatten()
        if not len(rows):
            return
        chosen = frozen if len(rows) == len(samples) else frozen[rows.to(frozen.device)]
        values = self.fit(chosen, self.cache.shape[self.slot.axis]).to(self.cache.dtype)
        event = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.put((samples[rows].numpy(), values, event))

    def store_forever(self) -> None:
        """The writer thread: wait for each copy, then write its slots."""
        while (item := self.pending.get()) is not None:
            try:
                samples, values, event = item
                if event is not None:
                    event.synchronize()
                self.cache.write(samples, values)
            except Exception as error:  # raised where the next batch is completed
                self.failure = error
            finally:
                self.pending.task_done()
        self.pending.task_done()

    def make_durable(self) -> None:
        """Wait for the writer and flush: after this a crash of the machine loses no slot written so far."""
        self.pending.join()
        self.cache.make_durable()

    def close(self) -> None:
        """End the writer and close the files."""
        self.pending.put(None)
        self.writer.join()
        self.cache.close()


def cache_place(config: Config, policy: Policy) -> tuple[Path, CacheSlot, torch.dtype]:
    """Where the prefix cache of a run lies, the shape of its slots, and the dtype they are stored in.

    Raises PolicyError when the recipe rules a cache out.
    """
    default = Path(config.output).parent / "prefix_cache"
    if config.prefix.cache == "memory":
        root = SHARED_MEMORY / f"somaspeed-{os.getuid()}"
    else:
        root = Path(config.prefix.directory or default)
    slot = policy.cache_slot()
    return root, slot, torch.bfloat16 if config.prefix.dtype == "bfloat16" else slot.compute_dtype


def open_cached_prefix(config: Config, ranks: Ranks, reader: ShardReader, policy: Policy) -> CachedPrefix:
    """Open the cache that belongs to this policy, its frozen weights and these shards; say what it holds.

    Raises PolicyError when the recipe rules a cache out and ConfigError, with the numbers, when it does not fit.
    """
    root, slot, dtype = cache_place(config, policy)
    key = {
        "policy": policy.name,
        "of": policy.cache_key(),
        "weights": weights_digest(policy.module, set(policy.live_parameters())),
        "frames": [shard.tar_sha256 for shard in reader.manifest.shards],
        "computed": [ranks.device.type, str(torch.__version__), transformers.__version__],
        "layout": LAYOUT,
    }
    # The first rank creates the files, the others find them.
    if not ranks.main:
        ranks.barrier()
    cache = open_cache(root, key, len(reader), slot.shape, dtype)
    if ranks.main:
        size = len(reader) * cache.slot_bytes
        print(
            f"prefix cache {cache.directory}: {cache.filled()} of {len(reader)} slots filled, "
            f"{cache.slot_bytes / 1e6:.2f} MB each, {size / 1e9:.2f} GB when full",
            flush=True,
        )
        ranks.barrier()
    bandwidth = None if config.prefix.cache == "memory" else read_bandwidth(cache.directory)
    spare = config.data.prefetch + 2
    return CachedPrefix(cache, policy, bandwidth, config.training.microbatch, spare, pinned=ranks.device.type == "cuda")


def wait_for(device: torch.device) -> None:
    """Wait for the work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
