"""The prefix cache: what the frozen part computed of a frame, kept in one memory-mapped file per key.

    <directory>/<key>/header.json   what the slots hold, and of what
    <directory>/<key>/slots.bin     one slot per sample of the shard set, sparse until written
    <directory>/<key>/valid.bin     one byte per slot: 0 empty, 1 written, 2 known to be on stable storage

A slot's byte is set after its bytes, so a killed run leaves no half slot; after a crash of the machine only slots
marked 2 are believed. The key is a hash of everything the slots depend on, so a stale cache is never opened.
Several ranks of a node map the same files; two that write one slot write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from dataio.atomic import write_bytes
from somaspeed.config import ConfigError

WRITTEN, DURABLE = 1, 2
SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CHUNK = 1 << 24  # elements hashed at a time
PROBE_BYTES = 256 << 20


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the files hold. `boot` tells whether the machine has restarted since."""

    samples: int
    shape: tuple[int, ...]
    dtype: str
    boot: str
    key: dict[str, Any]


class PrefixCache:
    """Slots [samples, *shape] of `dtype`, read and written by sample id. Open it with `open_cache`."""

    def __init__(self, directory: Path, samples: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.directory, self.shape, self.dtype = directory, shape, dtype
        self.slot_bytes = math.prod(shape) * dtype.itemsize
        self.slots_file = os.open(directory / "slots.bin", os.O_RDWR | os.O_CREAT, 0o644)
        self.valid_file = os.open(directory / "valid.bin", os.O_RDWR | os.O_CREAT, 0o644)
        for descriptor, size in ((self.slots_file, samples * self.slot_bytes), (self.valid_file, samples)):
            os.ftruncate(descriptor, size)
        self.slots = np.frombuffer(mmap.mmap(self.slots_file, 0), np.uint8).reshape(samples, self.slot_bytes)
        self.valid = np.frombuffer(mmap.mmap(self.valid_file, 0), np.uint8)

    def has(self, samples: np.ndarray) -> np.ndarray:
        """Which of `samples` int64 [B] are in the cache, bool [B]."""
        return self.valid[samples] != 0

    def read(self, sample: int, out: Tensor) -> None:
        """Copy one slot into `out`, uint8 [slot_bytes] on the host."""
        out.numpy()[:] = self.slots[sample]

    def write(self, samples: np.ndarray, values: Tensor) -> None:
        """Store `values` [B, *shape] of `dtype`, on the host, for `samples`; those that are there already are kept."""
        raw = values.contiguous().view(torch.uint8).reshape(len(samples), self.slot_bytes).numpy()
        for row in np.flatnonzero(~self.has(samples)):
            self.slots[samples[row]] = raw[row]
            self.valid[samples[row]] = WRITTEN

    def make_durable(self) -> None:
        """Flush the slots written so far to stable storage, then mark them so."""
        written = np.flatnonzero(self.valid == WRITTEN)
        os.fsync(self.slots_file)
        self.valid[written] = DURABLE
        os.fsync(self.valid_file)

    def filled(self) -> int:
        """How many slots hold something."""
        return int(np.count_nonzero(self.valid))

    def close(self) -> None:
        """Flush and let go of the files."""
        self.make_durable()
        os.close(self.slots_file)
        os.close(self.valid_file)


def open_cache(
    root: Path, key: dict[str, Any], samples: int, shape: tuple[int, ...], dtype: torch.dtype
) -> PrefixCache:
    """Open or create the cache of `key` under `root`.

    Raises ConfigError, with the numbers, when a cache that is yet to be filled does not fit.
    """
    digest = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:20]
    directory = root / digest
    header_file = directory / "header.json"
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    header = Header(samples, shape, str(dtype), boot, key)
    known = None
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        known = msgspec.json.decode(header_file.read_bytes(), type=Header)
    needed = samples * math.prod(shape) * dtype.itemsize
    present = 0
    with contextlib.suppress(FileNotFoundError):
        present = (directory / "slots.bin").stat().st_blocks * 512
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed - present > free:
        raise ConfigError(
            f"prefix.cache: {samples} slots of {needed / samples / 1e6:.2f} MB need {needed / 1e9:.1f} GB in {root}, "
            f"{present / 1e9:.1f} GB are there and {free / 1e9:.1f} GB are free. "
            'Set prefix.directory to a larger disk, or prefix.cache = "off".'
        )
    directory.mkdir(parents=True, exist_ok=True)
    cache = PrefixCache(directory, samples, shape, dtype)
    if known is None:
        cache.valid[:] = 0
    elif known.boot != boot:
        cache.valid[cache.valid == WRITTEN] = 0
    write_bytes(header_file, msgspec.json.format(msgspec.json.encode(header), indent=1))
    return cache


@torch.no_grad()
def weights_digest(module: nn.Module, live: set[str]) -> str:
    """A hash of every parameter and buffer of `module` but the `live` ones: their names, shapes and bits.

    The sum runs on the tensor's device in wrapping 64-bit integers, each element weighted by its place.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()]):
        if name in live:
            continue
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.detach().contiguous().view(-1).view(width)
        total = 0
        for start in range(0, bits.numel(), CHUNK):
            part = bits[start : start + CHUNK].to(torch.int64)
            place = torch.arange(start, start + part.numel(), device=part.device) * 0x9E3779B1 + 0x7F4A7C15
            total += int((part * (place | 1)).sum())
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}\n".encode())
    return digest.hexdigest()


def read_bandwidth(directory: Path, size: int = PROBE_BYTES) -> float:
    """Bytes per second at which a file just written to `directory` is read back, past the page cache where possible."""
    path = directory / f"bandwidth.{os.getpid()}.partial"
    block = np.random.default_rng(0).bytes(1 << 20)
    try:
        with path.open("wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            buffer = bytearray(1 << 20)
            while file.readinto(buffer):
                pass
            return size / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
