"""One shard: a USTAR archive of samples and, written from the same pass, the index that makes it
random-access.

The index is the proof that a shard is complete: it is written last, and carries the tar's size and sha256,
and which of the shard's episodes were left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from dataio.atomic import replacing, write_bytes
from dataio.manifest import Camera, Column, Quarantined, Shard
from dataio.reader import BLOCK_BYTES, FRAME, INDEX_FORMAT, file_sha256

if TYPE_CHECKING:
    from webdataset import TarWriter


class Sample(msgspec.Struct, frozen=True):
    """One frame of one episode; `index` is the frame's global number in the source dataset and gives the key.

    `task` indexes `Manifest.tasks`, `prompt` is its text; `columns` are [*shape] arrays by LeRobot key;
    `images` are encoded, by camera name.
    """

    index: int
    episode: int
    frame: int
    task: int
    prompt: str
    timestamp: np.float32
    columns: dict[str, np.ndarray]
    images: dict[str, bytes]


class Record(msgspec.Struct, frozen=True):
    """What a finished shard is: its files, and what happened while it was made.

    `squared_error` over `values` pixel values is the loss by encoding. With `samples` 0, all episodes are in
    `quarantined` and there is no tar; the index only says so.
    """

    tar: str
    index: str
    samples: int
    tar_bytes: int
    tar_sha256: str
    index_bytes: int
    index_sha256: str
    quarantined: list[Quarantined]
    squared_error: int
    values: int


def shard_names(number: int) -> tuple[str, str]:
    """File names of a shard's tar and index."""
    return f"{number:06d}.tar", f"{number:06d}.index.safetensors"


@contextlib.contextmanager
def writing_shard(
    directory: Path, number: int, cameras: Sequence[Camera], columns: Sequence[Column], extension: str
) -> Iterator[ShardWriter]:
    """Write shard `number` of `directory`; images are stored with `extension` (jpg or png).

    Both files appear under their names at the end and only without an error. A shard that got no sample has
    no tar.
    """
    with contextlib.ExitStack() as files:
        writer = ShardWriter(directory, number, cameras, columns, extension, files)
        try:
            yield writer
            writer.close_tar()
        except BaseException:
            writer.abandon_tar()
            raise
    writer.write_index()


class ShardWriter:
    """The shard that `writing_shard` writes; `record` is set at its end.

    The caller keeps `quarantined`, `squared_error` and `values`, see `Record`.
    """

    record: Record

    def __init__(
        self,
        directory: Path,
        number: int,
        cameras: Sequence[Camera],
        columns: Sequence[Column],
        extension: str,
        files: contextlib.ExitStack,
    ):
        self.samples = 0
        self.quarantined: list[Quarantined] = []
        self.squared_error = 0
        self.values = 0
        self._directory = directory
        self._names = shard_names(number)
        self._members = {camera.name: f"{camera.name}.{extension}" for camera in cameras} | {
            FRAME: "frame.msgpack"
        }
        self._columns = columns
        self._rows: dict[str, list] = {}
        self._files = files
        self._file: _HashingFile | None = None
        self._tar: TarWriter | None = None

    def add(self, sample: Sample) -> None:
        """Append a sample."""
        tar = self._tar or self._open_tar()
        payloads = sample.images | {FRAME: self._record(sample)}
        position = tar.tarstream.offset
        tar.write(
            {"__key__": f"{sample.index:08d}"}
            | {self._members[name]: data for name, data in payloads.items()}
        )
        # TarWriter writes the members of a sample sorted by name, each behind one header block.
        for name in sorted(payloads, key=self._members.__getitem__):
            payload = payloads[name]
            self._row(f"{name}.offset", position + BLOCK_BYTES)
            self._row(f"{name}.size", len(payload))
            self._row(f"{name}.crc32", zlib.crc32(payload))
            position += BLOCK_BYTES + -(-len(payload) // BLOCK_BYTES) * BLOCK_BYTES
        assert position == tar.tarstream.offset, "the index's offsets are not the tar's"
        for column in self._columns:
            self._row(f"column.{column.key}", sample.columns[column.key])
        for name in ("index", "episode", "frame", "task", "timestamp"):
            self._row(name, getattr(sample, name))
        self.samples += 1

    def close_tar(self) -> None:
        """End the archive, so that its size and hash are final."""
        if self._tar is not None:
            self._tar.close()

    def abandon_tar(self) -> None:
        """Let go of an archive that will not be finished."""
        if self._file is not None:
            self._file.abandoned = True

    def write_index(self) -> None:
        """Write the index of the closed archive; then `record` is set."""
        tar_bytes, tar_sha256 = (self._file.size, self._file.sha256.hexdigest()) if self._file else (0, "")
        metadata = {
            "format": INDEX_FORMAT,
            "tar": self._names[0] if self.samples else "",
            "tar_bytes": str(tar_bytes),
            "tar_sha256": tar_sha256,
            "samples": str(self.samples),
            "quarantined": msgspec.json.encode(self.quarantined).decode(),
            "squared_error": str(self.squared_error),
            "values": str(self.values),
        }
        raw = _to_safetensors(self._tensors(), metadata)
        write_bytes(self._directory / self._names[1], raw)
        self.record = _to_record(self._names[1], raw, metadata)

    def _open_tar(self) -> TarWriter:
        from webdataset import (
            TarWriter,
        )  # imports torch, seconds that a process which writes nothing need not wait

        path = self._files.enter_context(replacing(self._directory / self._names[0]))
        self._file = _HashingFile(self._files.enter_context(open(path, "wb")))
        self._tar = TarWriter(self._file, encoder=False, user="", group="", mode=0o644, mtime=0)
        return self._tar

    def _record(self, sample: Sample) -> bytes:
        """The sample's low-dimensional part for plain webdataset readers."""
        record = {
            "episode": sample.episode,
            "frame": sample.frame,
            "task": sample.prompt,
            "task_index": sample.task,
            "index": sample.index,
            "timestamp": float(sample.timestamp),
        }
        return msgspec.msgpack.encode(record | {c.key: sample.columns[c.key].tolist() for c in self._columns})

    def _row(self, name: str, value: object) -> None:
        self._rows.setdefault(name, []).append(value)

    def _tensors(self) -> dict[str, np.ndarray]:
        dtypes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in self._members:
            dtypes |= {
                f"{name}.offset": ("int64", ()),
                f"{name}.size": ("int32", ()),
                f"{name}.crc32": ("uint32", ()),
            }
        dtypes |= {f"column.{column.key}": (column.dtype, column.shape) for column in self._columns}
        dtypes |= {name: ("int64", ()) for name in ("index", "episode", "frame", "task")}
        dtypes["timestamp"] = ("float32", ())
        return {
            name: np.array(self._rows.get(name, []), dtype).reshape(self.samples, *shape)
            for name, (dtype, shape) in dtypes.items()
        }


def read_record(directory: Path, number: int) -> Record | None:
    """Shard `number`, if it is complete: its index is whole and the tar has the index's size and sha256."""
    tar, index = shard_names(number)
    try:
        with safe_open(directory / index, framework="np") as file:
            metadata = file.metadata() or {}
        record = _to_record(index, (directory / index).read_bytes(), metadata)
        if not record.samples:
            return record
        same_size = (directory / tar).stat().st_size == record.tar_bytes
        return record if same_size and file_sha256(directory / tar) == record.tar_sha256 else None
    except (FileNotFoundError, SafetensorError, KeyError, ValueError):
        return None


def to_shards(records: Sequence[Record]) -> list[Shard]:
    """The manifest's entries for finished shards, without those that hold no sample."""
    shards: list[Shard] = []
    first = 0
    for r in records:
        if r.samples:
            files = (r.tar_bytes, r.tar_sha256, r.index_bytes, r.index_sha256)
            shards.append(Shard(r.tar, r.index, first, r.samples, *files))
            first += r.samples
    return shards


def _to_record(index: str, raw: bytes, metadata: dict[str, str]) -> Record:
    return Record(
        tar=metadata["tar"],
        index=index,
        samples=int(metadata["samples"]),
        tar_bytes=int(metadata["tar_bytes"]),
        tar_sha256=metadata["tar_sha256"],
        index_bytes=len(raw),
        index_sha256=hashlib.sha256(raw).hexdigest(),
        quarantined=msgspec.json.decode(metadata["quarantined"], type=list[Quarantined]),
        squared_error=int(metadata["squared_error"]),
        values=int(metadata["values"]),
    )


class _HashingFile:
    """A file for writing that knows its size and sha256."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.abandoned = False  # then it takes no more: tarfile writes what it buffers when it is collected

    def write(self, data: bytes) -> int:
        if self.abandoned:
            return len(data)
        self.sha256.update(data)
        self.size += len(data)
        return self._file.write(data)


def _to_safetensors(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """The file's bytes, the same for the same content: the library writes metadata in a random order."""
    raw = safetensors.numpy.save(tensors, metadata)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] = metadata
    sorted_header = json.dumps(header, separators=(",", ":")).encode()
    sorted_header += b" " * (-len(sorted_header) % 8)
    return len(sorted_header).to_bytes(8, "little") + sorted_header + raw[8 + length :]
