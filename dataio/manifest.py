"""The manifest of a shard set: what the shards hold, exact statistics, and the hash of every file.

A shard set is one directory (or URL prefix):

    manifest.json               this file's `Manifest`
    000000.tar …                USTAR archives, one sample per frame, keys of eight digits
    000000.index.safetensors …  where each component lies in the tar, and the low-dimensional columns
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from dataio.atomic import write_bytes

FORMAT = "somaspeed-shards"
VERSION = 1
MANIFEST_NAME = "manifest.json"


class DataError(ValueError):
    """Bad input data. The message says what is wrong, where, and what to do."""


class Camera(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One camera: `name` is the component's extension stem in the tar, `key` LeRobot's feature key."""

    name: str
    key: str
    height: int
    width: int


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One low-dimensional feature (`observation.state`, `action`, …) with its LeRobot metadata."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: list[str] | dict[str, list[str]] | None = None


class Statistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exact per-dimension statistics of a column over all kept frames, computed in float64."""

    mean: list[float]
    std: list[float]
    min: list[float]
    max: list[float]
    q01: list[float]
    q99: list[float]
    count: int


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tar and its index: names, byte sizes, hashes and the range of samples [first, first + samples)."""

    tar: str
    index: str
    first: int
    samples: int
    tar_bytes: int
    tar_sha256: str
    index_bytes: int
    index_sha256: str


class Episode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kept episode: its number in the source dataset and its length in frames."""

    episode: int
    length: int


class Quarantined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode that was left out of the shards, and why."""

    episode: int
    reason: str


class Codec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How frames are stored. `quality` and `subsampling` (`"4:4:4"` or `"4:2:0"`) are for JPEG only."""

    name: Literal["jpeg", "png"]
    quality: int | None = None
    subsampling: str | None = None

    @property
    def extension(self) -> str:
        return "jpg" if self.name == "jpeg" else "png"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the frames came from: dataset name or hub id, revision, LeRobot format version, metadata hash."""

    dataset: str
    revision: str
    codebase_version: str
    fingerprint: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a shard set holds. `rotation` is the angle in degrees already applied to every frame while sharding."""

    format: str
    version: int
    name: str
    source: Source
    fps: float
    robot_type: str | None
    samples: int
    cameras: list[Camera]
    columns: list[Column]
    tasks: list[str]
    statistics: dict[str, Statistics]
    codec: Codec
    rotation: int
    order: Literal["episode", "shuffled"]
    episodes: list[Episode]
    shards: list[Shard]
    quarantined: list[Quarantined] = []

    def camera(self, name: str) -> Camera:
        """The camera called `name`. Raises DataError with the closest match when there is none."""
        for camera in self.cameras:
            if camera.name == name:
                return camera
        raise DataError(f"camera {name!r} is not in the shards{did_you_mean(name, [c.name for c in self.cameras])}")

    def column(self, key: str) -> Column:
        """The column called `key`. Raises DataError with the closest match when there is none."""
        for column in self.columns:
            if column.key == key:
                return column
        raise DataError(f"column {key!r} is not in the shards{did_you_mean(key, [c.key for c in self.columns])}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown `word`: the closest known one, and all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(known) or 'none'}"


def load_manifest(directory: Path | str) -> Manifest:
    """Read and check `directory/manifest.json`.

    Raises DataError when it is missing, is not a manifest of this version, names a file outside the directory,
    or its sample ranges do not tile [0, samples).
    """
    directory = Path(directory)
    path = directory / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{directory}: no {MANIFEST_NAME} here. Give the directory that scripts/shard_dataset.py wrote "
            "(an interrupted run has none yet: run the same command again, it resumes)."
        ) from None
    return parse_manifest(raw, str(path))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Decode a manifest and check its invariants; `where` names it in errors. Raises DataError."""
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise DataError(f"{where}: not a valid manifest: {error}") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise DataError(
            f"{where}: format {manifest.format!r} version {manifest.version}, this program reads "
            f"{FORMAT!r} version {VERSION}. Shard the dataset again."
        )
    first = 0
    for shard in manifest.shards:
        for name in (shard.tar, shard.index):
            if PurePosixPath(name).name != name or name in {"", ".", ".."}:
                raise DataError(f"{where}: file name {name!r} leaves the directory; refusing to read it.")
        if shard.first != first or shard.samples < 1:
            raise DataError(f"{where}: shard {shard.tar} starts at sample {shard.first}, expected {first}.")
        first += shard.samples
    total = sum(episode.length for episode in manifest.episodes)
    if first != manifest.samples or total != manifest.samples:
        raise DataError(
            f"{where}: says {manifest.samples} samples, its shards hold {first} and its episodes {total}."
        )
    return manifest


def save_manifest(directory: Path | str, manifest: Manifest) -> None:
    """Write `manifest` atomically: a manifest on disk always describes a complete shard set."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_bytes(Path(directory) / MANIFEST_NAME, encoded + b"\n")
