"""The frame cache: decoded frames at source size, kept in slots, so that later epochs decode nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import nvidia.dali
import torch

from dataio.decode import Device
from dataio.manifest import Camera, DataError, did_you_mean
from dataio.reader import ShardReader
from dataio.slots import SHARED_MEMORY, Slots, check_room, open_slots, slots_directory

LAYOUT = 1  # of a slot; raise it when that changes
SETTING = "data.frame_cache"
ADVICE = 'Set data.frame_cache_directory to a larger disk, or data.frame_cache = "off".'
MODES = ("disk", "memory")
Mode = Literal["disk", "memory"]


class FrameCache:
    """The frames of all `cameras` of one sample in one slot, camera after camera. Open it with `open_frame_cache`."""

    def __init__(self, slots: Slots, cameras: Sequence[Camera]) -> None:
        self.slots = slots
        self.cameras = {camera.name: (camera.height, camera.width, 3) for camera in cameras}
        self._columns: dict[str, slice] = {}
        used = 0
        for name, (height, width, channels) in self.cameras.items():
            self._columns[name] = slice(used, used + height * width * channels)
            used += height * width * channels

    def has(self, samples: np.ndarray) -> np.ndarray:
        """Which of `samples` int64 [B] are in the cache, bool [B]."""
        return self.slots.has(samples)

    def read(self, samples: np.ndarray, rows: np.ndarray, out: Mapping[str, torch.Tensor]) -> None:
        """Copy the frames of `samples` int64 [n] to `rows` of `out`: camera → uint8 [B, H, W, 3] on the host."""
        images = [out[name].numpy() for name in self.cameras]
        self.slots.scatter(samples.tolist(), [[image[row] for image in images] for row in rows.tolist()])

    def write(self, samples: np.ndarray, rows: np.ndarray, images: Mapping[str, torch.Tensor]) -> None:
        """Keep `rows` of `images` (as in `read`) as the frames of `samples`; a slot counts once all of it is there."""
        flat = {name: images[name].numpy().reshape(len(images[name]), -1) for name in self._columns}
        for row, sample in zip(rows.tolist(), samples.tolist(), strict=True):
            slot = self.slots.slots[sample]
            for name, columns in self._columns.items():
                slot[columns] = flat[name][row]
            self.slots.mark(sample)

    def describe(self) -> str:
        """One line: where, how full, how large."""
        total = len(self.slots.valid)
        return (
            f"frame cache {self.slots.directory}: {self.slots.filled()} of {total} samples filled, "
            f"{self.slots.slot_bytes / 1e6:.2f} MB each, {total * self.slots.slot_bytes / 1e9:.2f} GB when full"
        )

    def close(self) -> None:
        """Flush what was written; after this a crash of the machine loses none of it."""
        self.slots.close()


class Place(NamedTuple):
    """Where a frame cache belongs and what fills it."""

    root: Path
    key: dict[str, Any]
    cameras: list[Camera]
    samples: int
    slot_bytes: int

    def check_room(self) -> None:
        """Raise DataError with the numbers when what is missing of it does not fit; nothing is created."""
        directory = slots_directory(self.root, self.key)
        needed = self.samples * self.slot_bytes
        check_room(directory, needed, self.samples, f"{SETTING}: {self.samples} slots", ADVICE)

    def open(self) -> FrameCache:
        """Open or create it. One mapping serves all processes of a machine. Raises as `check_room` does."""
        shape = (self.slot_bytes,)
        slots = open_slots(self.root, self.key, self.samples, shape, torch.uint8, SETTING, ADVICE)
        return FrameCache(slots, self.cameras)


def frame_cache_place(
    reader: ShardReader,
    cameras: Sequence[str] | None,
    mode: Mode,
    directory: Path | str | None = None,
    device: Device = "cpu",
) -> Place:
    """The place of the cache of these shards, `cameras` (None: all) and decoder.

    "memory" keeps it in shared memory until the machine restarts or the files are removed, "disk" under `directory`.
    Raises DataError for an unknown mode and for no camera.
    """
    if mode not in MODES:
        raise DataError(f"{SETTING} = {mode!r}{did_you_mean(mode, MODES)}")
    if mode == "disk" and directory is None:
        raise DataError(f'{SETTING} = "disk" needs a directory.')
    root = SHARED_MEMORY / f"somaspeed-{os.getuid()}" if mode == "memory" else Path(str(directory))
    manifest = reader.manifest
    chosen = manifest.cameras if cameras is None else [manifest.camera(name) for name in cameras]
    slot_bytes = sum(camera.height * camera.width * 3 for camera in chosen)
    if not slot_bytes:
        raise DataError(f"{SETTING}: no camera is used, so there is nothing to cache.")
    key = {
        "frames": [shard.tar_sha256 for shard in manifest.shards],
        "cameras": [[camera.name, camera.height, camera.width] for camera in chosen],
        "decoder": [device, nvidia.dali.__version__],  # another one may give other pixels
        "layout": LAYOUT,
    }
    return Place(root, key, chosen, len(reader), slot_bytes)


def open_frame_cache(
    reader: ShardReader,
    cameras: Sequence[str] | None,
    mode: Mode,
    directory: Path | str | None = None,
    device: Device = "cpu",
) -> FrameCache:
    """Open or create the frame cache, see `frame_cache_place`. Raises DataError, with the numbers, where none fits."""
    return frame_cache_place(reader, cameras, mode, directory, device).open()
