"""The prefix cache: what the frozen part computed of a frame, kept in slots (dataio/slots.py), one per sample."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dataio.manifest import DataError
from dataio.slots import DURABLE, SHARED_MEMORY, WRITTEN, open_slots
from dataio.slots import Slots as PrefixCache
from somaspeed.config import ConfigError

__all__ = ["DURABLE", "SHARED_MEMORY", "WRITTEN", "PrefixCache", "open_cache", "read_bandwidth", "weights_digest"]
CHUNK = 1 << 24  # elements hashed at a time
PROBE_BYTES = 256 << 20
ADVICE = 'Set prefix.directory to a larger disk, or prefix.cache = "off".'


def open_cache(
    root: Path, key: dict[str, Any], samples: int, shape: tuple[int, ...], dtype: torch.dtype
) -> PrefixCache:
    """Open or create the cache of `key` under `root`.

    Raises ConfigError, with the numbers, when a cache that is yet to be filled does not fit.
    """
    try:
        return open_slots(root, key, samples, shape, dtype, "prefix.cache", ADVICE)
    except DataError as error:
        raise ConfigError(str(error)) from None


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
