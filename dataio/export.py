"""Shards back to a LeRobot v3 dataset, written by LeRobot's own writer: nobody is locked in.

Images become LeRobot's image kind: PNG of the stored image's pixels, so nothing is lost beyond what the shards' own
codec lost. Columns, tasks, timestamps and the columns' statistics are equal to the shards': LeRobot's writer averages
the episodes' quantiles, and a trainer would normalise by others than we do. LeRobot numbers the episodes from 0 in the
dataset; `meta/somaspeed_export.json` keeps their numbers in the source.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dataio.atomic import PARTIAL, write_bytes
from dataio.frames import CorruptEpisode, decode_image
from dataio.manifest import MANIFEST_NAME, DataError, Manifest
from dataio.reader import ShardReader

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

RECORD = Path("meta/somaspeed_export.json")
IMAGE_THREADS = 4  # of LeRobot's image writer; PNG compression releases the interpreter
Progress = Callable[[int, int], None]  # episodes done, episodes in all


class Record(msgspec.Struct, frozen=True):
    """What a dataset was exported from: the manifest's hash, and the source's number of each episode."""

    manifest_sha256: str
    name: str
    episodes: list[int]


class Exported(msgspec.Struct, frozen=True):
    """What `export_dataset` did."""

    episodes: int
    frames: int
    was_complete: bool


def export_dataset(shards: Path, out: Path, progress: Progress | None = None) -> Exported:
    """Write the shard set `shards` as a LeRobot dataset to `out`; where that is done already, do nothing.

    The dataset appears under its name when it is complete; an interrupted export leaves `out` absent and is begun
    anew by the next call. Raises DataError when `out` holds something else, when another process is exporting to it,
    and what `ShardReader` raises.
    """
    reader = ShardReader(shards)
    identity = hashlib.sha256((reader.directory / MANIFEST_NAME).read_bytes()).hexdigest()
    episodes = list(dict.fromkeys(reader.episode[np.argsort(reader.index, kind="stable")].tolist()))
    complete = Exported(len(episodes), len(reader), was_complete=True)
    with exclusive(out):
        if out.exists():
            check_existing(out, identity, reader.directory)
            return complete
        temporary = out.with_name(out.name + PARTIAL)
        shutil.rmtree(temporary, ignore_errors=True)
        write_dataset(reader, temporary, episodes, progress)
        record = Record(identity, reader.manifest.name, episodes)
        write_bytes(temporary / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        temporary.rename(out)
    return msgspec.structs.replace(complete, was_complete=False)


@contextlib.contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Hold the lock of `out`, so that two exports (or two ranks) never write the same dataset."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f".{out.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{out}: another process is exporting to it. Wait for that one to end.") from None
        yield


def check_existing(out: Path, identity: str, shards: Path) -> None:
    """Raise DataError unless `out` is a complete export of the same shards."""
    try:
        record = msgspec.json.decode((out / RECORD).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        raise DataError(
            f"{out}: exists and was not written by this program; nothing is overwritten. Give another --out."
        ) from None
    if record.manifest_sha256 != identity:
        raise DataError(
            f"{out}: holds an export of other shards ({record.name!r}), not of {shards}. Remove it, or give "
            "another --out."
        )


def lerobot_features(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The manifest's cameras and columns as LeRobot declares features."""
    images = {
        camera.key: {
            "dtype": "image",
            "shape": (camera.height, camera.width, 3),
            "names": ["height", "width", "channels"],
        }
        for camera in manifest.cameras
    }
    columns = {
        column.key: {"dtype": column.dtype, "shape": tuple(column.shape), "names": column.names}
        for column in manifest.columns
    }
    return images | columns


def lerobot_dataset() -> type[LeRobotDataset]:
    """LeRobot's dataset class, made quiet: no bar for every episode, no word of a video decoder that we do not use."""
    logging.getLogger("lerobot.utils.import_utils").setLevel(logging.ERROR)
    import datasets
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    datasets.disable_progress_bars()
    return LeRobotDataset


def write_dataset(reader: ShardReader, root: Path, episodes: list[int], progress: Progress | None) -> None:
    """Write every episode in turn through LeRobot's writer to `root`, which must not exist."""
    manifest = reader.manifest
    fps: Any = int(manifest.fps) if manifest.fps == int(manifest.fps) else manifest.fps
    dataset = lerobot_dataset().create(
        f"export/{manifest.name}",
        fps,
        lerobot_features(manifest),
        root=root,
        robot_type=manifest.robot_type,
        use_videos=False,
        image_writer_threads=IMAGE_THREADS,
    )
    by_frame = np.lexsort((reader.frame, reader.episode))
    starts = np.searchsorted(reader.episode[by_frame], episodes, side="left")
    ends = np.searchsorted(reader.episode[by_frame], episodes, side="right")
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        rows = by_frame[start:end]
        for row in rows:
            dataset.add_frame(frame_of(reader, int(row)))
        # The writer computes frame / fps; the source's own timestamps may differ from that.
        dataset.writer.episode_buffer["timestamp"] = reader.timestamp[rows].tolist()
        dataset.save_episode()
        if progress:
            progress(number + 1, len(episodes))
    dataset.finalize()
    keep_statistics(manifest, root)


def keep_statistics(manifest: Manifest, root: Path) -> None:
    """Put the manifest's exact statistics over those that LeRobot's writer merged from the episodes'."""
    from lerobot.datasets.io_utils import load_stats, write_stats

    merged = load_stats(root) or {}
    for key, exact in msgspec.to_builtins(manifest.statistics).items():
        merged[key] |= {name: np.atleast_1d(values) for name, values in exact.items()}
    write_stats(merged, root)


def frame_of(reader: ShardReader, row: int) -> dict[str, Any]:
    """One sample as LeRobot's `add_frame` takes it. Raises DataError naming the sample when its image is corrupt."""
    manifest = reader.manifest
    frame: dict[str, Any] = {"task": manifest.tasks[reader.task[row]]}
    for column in manifest.columns:
        frame[column.key] = reader.columns[column.key][row]
    for camera in manifest.cameras:
        try:
            frame[camera.key] = decode_image(reader.encoded(row, camera.name).tobytes())
        except CorruptEpisode as error:
            raise DataError(f"{reader.locate(row)}: {camera.name!r}: {error}") from None
    return frame
