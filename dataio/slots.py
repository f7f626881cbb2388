"""Slots: one fixed-size record per sample in a memory-mapped file, filled as training goes, found again by key.

    <root>/<key>/header.json   what the slots hold, and of what
    <root>/<key>/slots.bin     one slot per sample of the shard set
    <root>/<key>/valid.bin     one byte per slot: 0 empty, 1 written, 2 known to be on stable storage

A slot's byte is set after its bytes, so a killed run leaves no half slot; after a crash of the machine only slots
marked 2 are believed. The key is a hash of everything the slots depend on, so a stale file is never opened. All
processes of a machine map the same files; two that write one slot write the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from dataio.atomic import alone, write_bytes
from dataio.manifest import DataError

WRITTEN, DURABLE = 1, 2
SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CGROUP = Path("/sys/fs/cgroup")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the files hold. `boot` tells whether the machine has restarted since."""

    samples: int
    shape: tuple[int, ...]
    dtype: str
    boot: str
    key: dict[str, Any]


class Slots:
    """Slots [samples, *shape] of `dtype`, read and written by sample id. Open them with `open_slots`.

    Attributes: slots, uint8 [samples, slot_bytes], and valid, uint8 [samples], both the mapped files.
    """

    def __init__(self, directory: Path, samples: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.directory, self.shape, self.dtype = directory, shape, dtype
        self.slot_bytes = math.prod(shape) * dtype.itemsize
        self._slots_file = os.open(directory / "slots.bin", os.O_RDWR | os.O_CREAT, 0o644)
        self._valid_file = os.open(directory / "valid.bin", os.O_RDWR | os.O_CREAT, 0o644)
        for descriptor, size in ((self._slots_file, samples * self.slot_bytes), (self._valid_file, samples)):
            # Reserved, not sparse: a disk that fills up later would kill the process at a write to the mapping.
            os.posix_fallocate(descriptor, 0, size)
            os.ftruncate(descriptor, size)
        mapping = mmap.mmap(self._slots_file, 0)
        mapping.madvise(mmap.MADV_RANDOM)  # whole slots are announced instead
        self.slots = np.frombuffer(mapping, np.uint8).reshape(samples, self.slot_bytes)
        self.valid = np.frombuffer(mmap.mmap(self._valid_file, 0), np.uint8)

    def has(self, samples: np.ndarray) -> np.ndarray:
        """Which of `samples` int64 [B] are filled, bool [B]."""
        return self.valid[samples] != 0

    def read(self, sample: int, out: Tensor) -> None:
        """Copy one slot into `out`, uint8 [slot_bytes] on the host. Raises DataError when the file has been cut."""
        self.scatter([sample], [[out.numpy()]])

    def scatter(self, samples: list[int], parts: list[list[np.ndarray]]) -> None:
        """Copy the slot of each of `samples` into its consecutive `parts`, contiguous arrays of slot_bytes together.

        Through the file and not the mapping, whose first touch in every process costs half as much again in page
        faults, and where a disk's error would kill the process. What is not in memory is asked for all at once before
        the first of it is waited for. Raises DataError when the file has been cut.
        """
        cold = [place for place, sample in enumerate(samples) if not self._copy(sample, parts[place], os.RWF_NOWAIT)]
        for place in cold:
            start = samples[place] * self.slot_bytes
            os.posix_fadvise(self._slots_file, start, self.slot_bytes, os.POSIX_FADV_WILLNEED)
        for place in cold:
            if not self._copy(samples[place], parts[place], 0):
                raise DataError(
                    f"{self.directory}: slot {samples[place]} cannot be read; remove this directory and start again."
                )

    def _copy(self, sample: int, parts: list[np.ndarray], flags: int) -> bool:
        """Whether the whole slot was copied. With RWF_NOWAIT, not when the disk would have to be waited for."""
        try:
            return os.preadv(self._slots_file, parts, sample * self.slot_bytes, flags) == self.slot_bytes
        except OSError:
            if flags:  # not in memory, or the file system does not know the flag
                return False
            raise

    def write(self, samples: np.ndarray, values: Tensor) -> None:
        """Store `values` [B, *shape] of `dtype`, on the host, for `samples`; those that are there already are kept."""
        raw = values.contiguous().view(torch.uint8).reshape(len(samples), self.slot_bytes).numpy()
        for row in np.flatnonzero(~self.has(samples)):
            self.slots[samples[row]] = raw[row]
            self.mark(samples[row])

    def mark(self, sample: int) -> None:
        """Say that all bytes of a slot are there."""
        if not self.valid[sample]:
            self.valid[sample] = WRITTEN

    def make_durable(self) -> None:
        """Flush the slots written so far to stable storage, then mark them so."""
        written = np.flatnonzero(self.valid == WRITTEN)
        if not written.size:
            return
        os.fsync(self._slots_file)
        self.valid[written] = DURABLE
        os.fsync(self._valid_file)

    def filled(self) -> int:
        """How many slots hold something."""
        return int(np.count_nonzero(self.valid))

    def close(self) -> None:
        """Flush and let go of the files; what is mapped stays readable."""
        self.make_durable()
        os.close(self._slots_file)
        os.close(self._valid_file)


def slots_directory(root: Path, key: dict[str, Any]) -> Path:
    """Where the slots of `key` are."""
    return root / hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:20]


def open_slots(
    root: Path, key: dict[str, Any], samples: int, shape: tuple[int, ...], dtype: torch.dtype, setting: str, advice: str
) -> Slots:
    """Open or create the slots of `key` under `root`; any number of processes may do so at once.

    `setting` is the configuration key that asked for them and `advice` what to change. Raises DataError with the
    numbers when slots that are yet to be created do not fit, nothing being left behind.
    """
    directory = slots_directory(root, key)
    needed = samples * math.prod(shape) * dtype.itemsize
    check_room(directory, needed, samples, f"{setting}: {samples} slots", advice)
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    directory.mkdir(parents=True, exist_ok=True)
    with alone(directory):
        known = None
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            known = msgspec.json.decode((directory / "header.json").read_bytes(), type=Header)
        try:
            slots = Slots(directory, samples, shape, dtype)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.rmtree(directory)
            raise DataError(f"{setting}: {needed / 1e9:.2f} GB do not fit in {root}: {error}. {advice}") from None
        if known is None:
            slots.valid[:] = 0
        elif known.boot != boot:
            slots.valid[slots.valid == WRITTEN] = 0
        if known is None or known.boot != boot:
            header = Header(samples, shape, str(dtype), boot, key)
            write_bytes(directory / "header.json", msgspec.json.format(msgspec.json.encode(header), indent=1))
    return slots


def check_room(directory: Path, needed: int, samples: int, what: str, advice: str) -> None:
    """Raise DataError with the numbers when `needed` bytes for `samples` slots do not fit in `directory`."""
    present = 0
    with contextlib.suppress(FileNotFoundError):
        present = (directory / "slots.bin").stat().st_blocks * 512
    free = free_bytes(directory)
    if needed - present > free:
        raise DataError(
            f"{what} of {needed / samples / 1e6:.2f} MB need {needed / 1e9:.1f} GB in {directory.parent}, "
            f"{present / 1e9:.1f} GB are there and {free / 1e9:.1f} GB are free. {advice}"
        )


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written under `directory`, which need not exist; in memory, what memory there is."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not existing.is_relative_to(SHARED_MEMORY):
        return free
    free = min(free, psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # a container's own limit, where it has one
        limit = int((CGROUP / "memory.max").read_text())
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return max(free, 0)
