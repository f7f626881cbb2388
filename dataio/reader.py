"""Random access to a local shard set: memory-mapped tars, and the low-dimensional columns in memory.

Every file is checked against the manifest when the set is opened, and every encoded image against its CRC32
when it is read: decoders let flipped bits pass silently.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
import mmap
import os
import resource
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from safetensors import SafetensorError, safe_open

from dataio.manifest import DataError, Shard, did_you_mean, load_manifest

INDEX_FORMAT = "somaspeed-index"
FRAME = "frame"  # the component beside the cameras: the sample's msgpack record
AUTO_FULL_BYTES = 4 << 30
OTHER_OPEN_FILES = 512  # left for everything else in the process
BLOCK_BYTES = 512  # a tar member's payload lies behind a header block

Verify = Literal["auto", "full", "size"]
logger = logging.getLogger(__name__)


class ShardReader:
    """The samples of a shard set, by sample id: 0 … len − 1, in the order in which the shards hold them.

    Attributes, n = len(reader):
        manifest: the set's Manifest.
        columns: LeRobot key → [n, *shape] in the column's own dtype.
        episode, frame, task, index: int64 [n]; the episode's number in the source dataset, the frame in the
            episode, the index into `manifest.tasks`, the frame's index in the source dataset.
        timestamp: float32 [n], seconds since the episode's start.
    """

    def __init__(self, directory: Path | str, verify: Verify = "auto"):
        """Open the set and check its files against the manifest.

        `verify`: "size" compares byte sizes and what each index says of its tar; "full" hashes every file as
        well; "auto" is "full" up to 4 GiB, else "size". Raises DataError naming the shard that differs.
        """
        if verify not in get_args(Verify):
            raise DataError(f"verify={verify!r}{did_you_mean(str(verify), get_args(Verify))}")
        self.directory = Path(directory)
        self.manifest = load_manifest(self.directory)
        if not self.manifest.shards:
            raise DataError(f"{self.directory}: the manifest lists no shards; shard the dataset again.")
        shards = self.manifest.shards
        total = sum(shard.tar_bytes + shard.index_bytes for shard in shards)
        full = verify == "full" or (verify == "auto" and total <= AUTO_FULL_BYTES)
        self._check_sizes()
        if full:
            self._check_hashes()
        self._first = np.array([shard.first for shard in shards], np.int64)
        self._tars: list[tuple[mmap.mmap, np.ndarray] | None] = [None] * len(shards)
        self._ahead: set[int] = set()
        self._components = [camera.name for camera in self.manifest.cameras] + [FRAME]
        self._load_indexes()
        allow_open_files(len(shards) + OTHER_OPEN_FILES)
        logger.info(
            "%s: %d samples in %d shards, %.1f MB; checked against the manifest: sizes%s",
            self.directory, len(self), len(shards), total / 1e6, " and sha256" if full else "",
        )  # fmt: skip

    def __len__(self) -> int:
        return self.manifest.samples

    def encoded(self, sample: int, camera: str) -> np.ndarray:
        """The encoded image (or with camera "frame" the msgpack record) of one sample, checked by its CRC32.

        uint8 [bytes], a read-only view of the tar. Raises DataError naming shard, sample and component.
        """
        return self.read(np.array([sample]), [camera])[camera][0]

    def read(self, samples: np.ndarray, cameras: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """The encoded images of `samples` (ids, int [B]) for each of `cameras`, as `encoded` returns them.

        The whole batch is announced to the kernel before its first byte is touched, so that a cold disk works
        on all of it at once.
        """
        samples = self._checked(samples)
        if not cameras:
            return {}
        for camera in cameras:
            if camera not in self._components:
                raise DataError(
                    f"{self.directory}: no component {camera!r}{did_you_mean(camera, self._components)}"
                )
        shards = self.shard_of(samples)
        places = {camera: (self._offset[camera][samples], self._size[camera][samples]) for camera in cameras}
        self._announce(shards, places)
        return {
            camera: [
                self._payload(int(shard), int(sample), camera, int(offset), int(size), int(crc))
                for shard, sample, offset, size, crc in zip(
                    shards, samples, *places[camera], self._crc32[camera][samples], strict=True
                )
            ]
            for camera in cameras
        }

    def shard_of(self, samples: np.ndarray) -> np.ndarray:
        """The shard of each of `samples`, int64 [B]."""
        return np.searchsorted(self._first, samples, side="right") - 1

    def keep(self, now: Sequence[int], ahead: Sequence[int], behind: Sequence[int]) -> None:
        """Says which shards are being read, which come next and which came before: the next are read ahead."""
        for shard in set(ahead) - self._ahead:
            self._tar(shard)[0].madvise(mmap.MADV_WILLNEED)
        self._ahead = {*now, *ahead}

    def locate(self, sample: int) -> str:
        """Where a sample lies, for messages: tar, key, episode and frame."""
        shard = self.manifest.shards[int(np.searchsorted(self._first, sample, side="right")) - 1]
        return (
            f"{self.directory / shard.tar}, sample {self.index[sample]:08d} "
            f"(episode {self.episode[sample]}, frame {self.frame[sample]})"
        )

    def _checked(self, samples: np.ndarray) -> np.ndarray:
        samples = np.asarray(samples, np.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < len(self):
            raise DataError(f"{self.directory}: sample ids must lie in [0, {len(self)}), got {samples}")
        return samples

    def _payload(
        self, shard: int, sample: int, component: str, offset: int, size: int, crc: int
    ) -> np.ndarray:
        payload = self._tar(shard)[1][offset : offset + size]
        if zlib.crc32(payload) != crc:
            raise DataError(
                f"{self.locate(sample)}: {component!r} does not match its CRC32, the tar's bytes have "
                "changed. Copy this shard again, or shard the dataset again."
            )
        return payload

    def _announce(self, shards: np.ndarray, places: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Ask for the bytes of every sample, from its first component to the end of its last one."""
        starts = np.min([offset for offset, _ in places.values()], axis=0)
        ends = np.max([offset + size for offset, size in places.values()], axis=0)
        starts -= starts % mmap.PAGESIZE
        for shard, start, end in zip(shards.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self._tar(shard)[0].madvise(mmap.MADV_WILLNEED, start, end - start)

    def _tar(self, shard: int) -> tuple[mmap.mmap, np.ndarray]:
        """A tar's mapping and bytes, made on first use (two threads may make it twice; one is dropped)."""
        tar = self._tars[shard]
        if tar is None:
            with open(self._tar_path(shard), "rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Samples are read at random: without this the kernel reads far around every fault. `_announce`
            # does the reading ahead instead; measured alone, this advice would be eight times slower.
            mapping.madvise(mmap.MADV_RANDOM)
            tar = self._tars[shard] = mapping, np.frombuffer(mapping, np.uint8)
        return tar

    def _tar_path(self, shard: int) -> Path:
        """The tar's local path."""
        return self.directory / self.manifest.shards[shard].tar

    def close(self) -> None:
        """Let go of what reads ahead; what was read stays valid."""

    def _check_sizes(self) -> None:
        for shard in self.manifest.shards:
            for name, size in ((shard.tar, shard.tar_bytes), (shard.index, shard.index_bytes)):
                path = self.directory / name
                try:
                    found = path.stat().st_size
                except FileNotFoundError:
                    raise DataError(
                        f"{path}: missing, the manifest lists it with {size} bytes. Copy it from where the "
                        "shards were written, or shard the dataset again."
                    ) from None
                if found != size:
                    raise DataError(
                        f"{path}: {found} bytes, the manifest says {size}; an interrupted copy, or another "
                        "shard's file. Copy it again, or shard the dataset again."
                    )

    def _check_hashes(self) -> None:
        files = [
            (self.directory / name, sha256)
            for shard in self.manifest.shards
            for name, sha256 in ((shard.tar, shard.tar_sha256), (shard.index, shard.index_sha256))
        ]
        with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for (path, expected), found in zip(
                files, pool.map(lambda file: file_sha256(file[0]), files), strict=True
            ):
                if found != expected:
                    raise DataError(
                        f"{path}: sha256 {found[:12]}…, the manifest says {expected[:12]}…; the file's bytes "
                        "have changed. Copy it again, or shard the dataset again."
                    )

    def _load_indexes(self) -> None:
        """Fill the whole-set arrays, shard by shard; never more than one shard's copy beside them."""
        total = len(self)
        whole: dict[str, np.ndarray] = {}
        for component in self._components:
            whole[f"{component}.offset"] = np.empty(total, np.int64)
            whole[f"{component}.size"] = np.empty(total, np.int32)
            whole[f"{component}.crc32"] = np.empty(total, np.uint32)
        for column in self.manifest.columns:
            whole[f"column.{column.key}"] = np.empty((total, *column.shape), column.dtype)
        for name in ("episode", "frame", "task", "index"):
            whole[name] = np.empty(total, np.int64)
        whole["timestamp"] = np.empty(total, np.float32)

        for shard in self.manifest.shards:
            self._load_index(shard, whole)
        self._offset = {name: whole[f"{name}.offset"] for name in self._components}
        self._size = {name: whole[f"{name}.size"] for name in self._components}
        self._crc32 = {name: whole[f"{name}.crc32"] for name in self._components}
        self.columns = {column.key: whole[f"column.{column.key}"] for column in self.manifest.columns}
        self.episode, self.frame, self.task, self.index = (
            whole[name] for name in ("episode", "frame", "task", "index")
        )
        self.timestamp = whole["timestamp"]
        if self.task.min() < 0 or self.task.max() >= len(self.manifest.tasks):
            raise DataError(
                f"{self.directory}: the indexes name task {self.task.max()}, the manifest has "
                f"{len(self.manifest.tasks)} tasks; they are not of one set. Shard the dataset again."
            )

    def _load_index(self, shard: Shard, whole: dict[str, np.ndarray]) -> None:
        path = self.directory / shard.index
        rows = slice(shard.first, shard.first + shard.samples)
        try:
            with safe_open(path, framework="np") as file:
                check_metadata(path, shard, file.metadata() or {})
                present = set(file.keys())
                absent = sorted(whole.keys() - present)
                if absent:
                    raise DataError(
                        f"{path}: lacks {', '.join(absent)}, which the manifest lists; it has "
                        f"{', '.join(sorted(present))}. Shard again."
                    )
                for name, array in whole.items():
                    part = file.get_tensor(name)
                    if part.dtype != array.dtype or part.shape != array[rows].shape:
                        raise DataError(
                            f"{path}: {name} is {part.dtype} {list(part.shape)}, the manifest says "
                            f"{array.dtype} {list(array[rows].shape)}. Shard the dataset again."
                        )
                    array[rows] = part
        except SafetensorError as error:
            raise DataError(
                f"{path}: not a readable index ({error}). Copy it again, or shard again."
            ) from None
        for component in self._components:
            offset, size = whole[f"{component}.offset"][rows], whole[f"{component}.size"][rows]
            if offset.min() < BLOCK_BYTES or size.min() < 1 or (offset + size).max() > shard.tar_bytes:
                raise DataError(f"{path}: {component!r} lies outside {shard.tar}. Shard the dataset again.")


def check_metadata(path: Path, shard: Shard, metadata: dict[str, str]) -> None:
    """Raise DataError when the index at `path` does not describe the tar that the manifest pairs it with."""
    if metadata.get("format") != INDEX_FORMAT:
        raise DataError(
            f"{path}: not a shard index (format {metadata.get('format')!r}). Shard the dataset again."
        )
    expected = {
        "tar": shard.tar,
        "tar_bytes": str(shard.tar_bytes),
        "tar_sha256": shard.tar_sha256,
        "samples": str(shard.samples),
    }
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise DataError(
                f"{path}: index of another tar: its {key} is {metadata.get(key)}, the manifest says {value} "
                f"for {shard.tar}. Copy both files of this shard again, or shard the dataset again."
            )


def file_sha256(path: Path) -> str:
    """The file's sha256 as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def allow_open_files(count: int) -> None:
    """Let this process open `count` files (a mapped tar is one). Raises DataError if that is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise DataError(
            f"the shard set needs {count} open files and this system allows {hard}: raise the hard limit "
            "(ulimit -Hn), or shard with a larger --samples-per-shard."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def sample_ids(reader: ShardReader, samples: Iterable[int] | None) -> np.ndarray:
    """`samples` as int64 [n], all of the set when None. Raises DataError for unknown or repeated ids."""
    if samples is None:
        return np.arange(len(reader))
    ids = np.asarray(samples)
    if not ids.size:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"samples must be a list of sample ids, got {ids.dtype} {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= len(reader):
        raise DataError(
            f"{reader.directory}: sample ids must lie in [0, {len(reader)}), got {ids.min()} … {ids.max()}"
        )
    if np.unique(ids).size != ids.size:
        raise DataError("samples holds an id twice; give each sample once.")
    return ids.astype(np.int64)
