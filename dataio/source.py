"""What a LeRobot dataset holds: its cameras, columns, tasks and episodes, checked before anything is read.

`open_source` reads `meta/`, refuses what cannot be converted, and says for every episode which rows of which
data file and which frames of which video files are its own. Data and video files are split independently of
each other, so nothing is derived from the position of an episode in one of them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet as parquet

from dataio.features import Feature, rename, sort_features
from dataio.legacy import LEGACY_VERSION, converted, is_legacy
from dataio.manifest import Camera, Column, DataError

INFO = "meta/info.json"
TASKS = "meta/tasks.parquet"
MAX_FRAMES = 10**8
UNREADABLE = (OSError, ValueError, KeyError, pyarrow.ArrowException)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class VideoSpan(msgspec.Struct, frozen=True):
    """Where an episode lies in a video: `file` relative to the dataset, frames [start, start + frames)."""

    file: str
    start: int
    frames: int


class Span(msgspec.Struct, frozen=True):
    """One episode: global frame indices [first, first + length), its data file, its part of each video."""

    episode: int
    first: int
    length: int
    data: str
    videos: dict[str, VideoSpan]

    def files(self) -> list[str]:
        """Every file the episode needs, relative to the dataset's directory."""
        return [self.data, *(video.file for video in self.videos.values())]


class Source(msgspec.Struct, frozen=True):
    """A LeRobot dataset that passed its checks, and the episodes selected from it.

    `fingerprint` is the sha256 of the metadata and the selection. `skipped` lists features that have no place
    in a shard, each with the reason. `root` is where the files are on this machine and goes into no output.
    """

    root: str
    dataset: str
    revision: str
    codebase_version: str
    fingerprint: str
    fps: float
    robot_type: str | None
    cameras: list[Camera]
    columns: list[Column]
    tasks: list[str]
    spans: list[Span]
    skipped: list[str]
    renamed: dict[str, str] = {}  # key of a camera or column → its key in the dataset, where that is another

    def key_in_dataset(self, key: str) -> str:
        """The dataset's own key of a camera or column."""
        return self.renamed.get(key, key)

    @property
    def frames(self) -> int:
        """Frames in the selected episodes."""
        return sum(span.length for span in self.spans)


class Info(msgspec.Struct):
    """The part of `meta/info.json` that is used."""

    codebase_version: str
    fps: float
    total_episodes: int
    total_frames: int
    features: dict[str, Feature]
    data_path: str
    video_path: str | None = None
    robot_type: str | None = None


def open_source(
    dataset: str, episodes: str | None = None, names: dict[str, str] | None = None, cache: Path | None = None
) -> Source:
    """Open a LeRobot dataset, a local directory or one of the Hugging Face hub, and check what it says.

    `episodes` selects some, as in "0:10,12" (default: all). `names` renames features, see `features.rename`. A
    dataset of version 2.1 is converted into `cache` first. Only files that the selection needs are downloaded and
    required. Raises DataError: not a dataset, neither version 3 nor 2.1, episodes that do not tile
    [0, total), overlapping video ranges, a missing file, rows that disagree with the metadata, a camera name
    that cannot be part of a tar key.
    """
    root, name, revision = _locate(dataset)
    if is_legacy(root):
        root = converted(root, name, cache)
    info = _read_info(root)
    tables = sorted((root / "meta/episodes").glob("*/*.parquet"))
    all_spans = list(_read_spans(root, info, tables))
    _check_tiling(all_spans, info)
    _check_videos(all_spans)
    selected = select(episodes, len(all_spans))
    spans = [all_spans[episode] for episode in selected]
    features, renamed = rename(info.features, names or {})
    cameras, columns, skipped = sort_features(features)
    digest = hashlib.sha256()
    for path in [root / INFO, root / TASKS, *tables]:
        digest.update(path.read_bytes())
    digest.update(msgspec.json.encode(selected))
    source = Source(
        root=str(root),
        dataset=name,
        revision=revision,
        codebase_version=info.codebase_version,
        fingerprint=digest.hexdigest(),
        fps=info.fps,
        robot_type=info.robot_type,
        cameras=cameras,
        columns=columns,
        tasks=_read_tasks(root),
        spans=spans,
        skipped=skipped,
        renamed=renamed,
    )
    if revision != "local" and root.name == revision:
        _download(name, revision, sorted({file for span in spans for file in span.files()}))
    _check_files(source)
    _check_rows(source)
    return source


def select(text: str | None, total: int) -> list[int]:
    """Episode numbers, ascending: "0:10,12" is 0…9 and 12, "8:" all from 8 on, None all. Raises DataError."""
    if text is None:
        return list(range(total))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d*)(:?)(\d*)\s*", part)
        if match is None or not part.strip():
            raise DataError(f"--episodes {text!r}: {part!r} is neither a number nor a range like 0:10.")
        first = int(match[1] or 0)
        stop = int(match[3] or total) if match[2] else first + 1
        if not first < stop <= total:
            raise DataError(f"--episodes {text!r}: {part!r} is outside the dataset's episodes 0:{total}.")
        chosen.update(range(first, stop))
    return sorted(chosen)


def _locate(dataset: str) -> tuple[Path, str, str]:
    """(directory, name, revision) of a local path or hub id; of a hub id, meta/ is downloaded."""
    path = Path(dataset).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name, "local"
    if path.exists():
        raise DataError(f"{dataset}: a file. Give the directory of a LeRobot dataset (it holds {INFO}).")
    if not HUB_ID.fullmatch(dataset):
        raise DataError(
            f"{dataset}: no such directory. Give a LeRobot dataset's directory or a hub id, owner/name."
        )
    from lerobot.datasets.dataset_metadata import CODEBASE_VERSION
    from lerobot.datasets.utils import BackwardCompatibilityError, get_safe_version

    try:
        revision = get_safe_version(dataset, CODEBASE_VERSION)
    except BackwardCompatibilityError:  # there is only an older version; of that one, the conversion needs everything
        root = _download(dataset, LEGACY_VERSION, ["*"])
        return root, dataset, root.name
    except (
        Exception
    ) as error:  # the hub client has no common base for "offline", "not found" and "not version 3"
        raise _hub_error(dataset, error) from error
    root = _download(dataset, revision, ["meta/*"])
    return root, dataset, root.name


def _download(dataset: str, revision: str, patterns: list[str]) -> Path:
    """Fetch a hub dataset's files that match `patterns`; the snapshot's directory, named by its commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(dataset, repo_type="dataset", revision=revision, allow_patterns=patterns)
        )
    except Exception as error:
        raise _hub_error(dataset, error) from error


def _hub_error(dataset: str, error: Exception) -> DataError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return DataError(
        f"{dataset}: no such directory, and the Hugging Face hub did not deliver it: {reason[0]} "
        "Check the spelling, the network and `hf auth login`, or give a local LeRobot dataset's directory."
    )


def _read_info(root: Path) -> Info:
    path = root / INFO
    try:
        raw = path.read_bytes()
        version = msgspec.json.decode(raw)["codebase_version"]
    except FileNotFoundError:
        raise DataError(f"{root}: no {INFO}: not a LeRobot dataset's directory.") from None
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a LeRobot dataset's info.json: {error!r}") from None
    if not str(version).startswith("v3."):
        raise DataError(f"{root}: LeRobot format {version!r} is unknown; this program reads v3 and {LEGACY_VERSION}.")
    try:
        return msgspec.json.decode(raw, type=Info)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: {error}") from None


def _read_tasks(root: Path) -> list[str]:
    """Task texts, by task_index."""
    path = root / TASKS
    try:
        table = pandas.read_parquet(path).sort_values("task_index")
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if table["task_index"].tolist() != list(range(len(table))):
        raise DataError(f"{path}: task_index must number the tasks 0…{len(table) - 1} without gaps.")
    return [str(task) for task in table.index]


def _read_spans(root: Path, info: Info, tables: list[Path]) -> Iterator[Span]:
    video_keys = [key for key, feature in info.features.items() if feature.dtype == "video"]
    if video_keys and info.video_path is None:
        raise DataError(f"{root / INFO}: {video_keys[0]} is a video, but there is no video_path.")
    names = ["episode_index", "length", "dataset_from_index", "dataset_to_index"]
    names += ["data/chunk_index", "data/file_index"]
    fields = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    names += [f"videos/{key}/{field}" for key in video_keys for field in fields]
    if not tables:
        raise DataError(f"{root}/meta/episodes: no parquet file, so no episode is known.")
    for path in tables:
        try:
            rows = parquet.read_table(path, columns=names).to_pylist()
        except UNREADABLE as error:
            raise DataError(f"{path}: cannot be read: {error}") from None
        for row in rows:
            if lacking := [name for name in names if row.get(name) is None]:
                raise DataError(f"{path}: episode {row.get('episode_index')} has no {lacking[0]}.")
            yield _read_span(row, info, video_keys)


def _read_span(row: dict[str, Any], info: Info, video_keys: list[str]) -> Span:
    episode, first, stop = row["episode_index"], row["dataset_from_index"], row["dataset_to_index"]
    if stop - first != row["length"] or row["length"] < 1:
        raise DataError(
            f"episode {episode}: length {row['length']}, but frames [{first}, {stop}) in meta/episodes. "
            "The ranges are scrambled; convert or download the dataset again."
        )
    videos = {}
    for key in video_keys:
        begin, end = (row[f"videos/{key}/{which}_timestamp"] * info.fps for which in ("from", "to"))
        if abs(begin - round(begin)) > 0.25:
            raise DataError(
                f"episode {episode}: {key} starts at frame {begin:.2f} of its video file, which is no frame "
                f"at {info.fps:g} fps. meta/episodes or fps in {INFO} is wrong."
            )
        place = {
            "chunk_index": row[f"videos/{key}/chunk_index"],
            "file_index": row[f"videos/{key}/file_index"],
        }
        file = str(info.video_path).format(video_key=key, **place)
        videos[key] = VideoSpan(file, round(begin), round(end) - round(begin))
    data = info.data_path.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
    return Span(episode, first, row["length"], data, videos)


def _check_tiling(spans: list[Span], info: Info) -> None:
    first = 0
    for number, span in enumerate(spans):
        if span.episode != number or span.first != first:
            raise DataError(
                f"episode {span.episode}: meta/episodes gives it frames [{span.first}, "
                f"{span.first + span.length}), but episode {number} with frames from {first} on is next. "
                "The episodes' ranges must tile [0, total); they are scrambled here. Convert or download "
                "the dataset again."
            )
        first += span.length
    if (len(spans), first) != (info.total_episodes, info.total_frames):
        raise DataError(
            f"meta/episodes has {len(spans)} episodes with {first} frames, {INFO} says "
            f"{info.total_episodes} with {info.total_frames}. The metadata is incomplete; download the "
            "dataset again."
        )
    if first > MAX_FRAMES:
        raise DataError(
            f"{first} frames: sample keys have eight digits. Shard the dataset in parts (--episodes)."
        )


def _check_videos(spans: list[Span]) -> None:
    places = sorted((v.file, v.start, v.frames, span.episode) for span in spans for v in span.videos.values())
    for (file, start, frames, episode), (next_file, next_start, _, next_episode) in itertools.pairwise(
        places
    ):
        if file == next_file and start + frames > next_start:
            raise DataError(
                f"{file}: episode {episode} has its frames [{start}, {start + frames}), episode "
                f"{next_episode} starts at {next_start}: they overlap. The timestamps in meta/episodes are "
                "scrambled."
            )


def _check_files(source: Source) -> None:
    needed: dict[str, list[int]] = {}
    for span in source.spans:
        for file in span.files():
            needed.setdefault(file, []).append(span.episode)
    for file, episodes in needed.items():
        if not (Path(source.root) / file).is_file():
            raise DataError(
                f"{source.dataset}: {file} is missing; episodes {ranges(episodes)} need it. Download it "
                "again, or leave these episodes out with --episodes."
            )


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: "0:3, 7" for 0, 1, 2, 7, as --episodes takes them."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number:
            parts[-1][1] += 1
        else:
            parts.append([number, number + 1])
    return ", ".join(f"{a}:{b}" if b - a > 1 else f"{a}" for a, b in parts)


def _check_rows(source: Source) -> None:
    """Compare the row numbers in the data files (three integer columns) with the metadata."""
    by_file: dict[str, list[Span]] = {}
    for span in source.spans:
        by_file.setdefault(span.data, []).append(span)
    for file, spans in by_file.items():
        try:
            table = parquet.read_table(
                Path(source.root) / file, columns=["episode_index", "index", "frame_index"]
            )
        except UNREADABLE as error:
            raise DataError(
                f"{source.dataset}: {file} cannot be read ({error}); episodes "
                f"{ranges(span.episode for span in spans)} need it. Download it again, or leave these "
                "episodes out with --episodes."
            ) from None
        episode, index, frame = (table[name].to_numpy() for name in table.column_names)
        for span in spans:
            rows = np.flatnonzero(episode == span.episode)
            expected = np.arange(span.length)
            if not (
                np.array_equal(index[rows], span.first + expected) and np.array_equal(frame[rows], expected)
            ):
                found = f"{len(rows)} rows, index from {index[rows[0]]}" if len(rows) else "no rows"
                raise DataError(
                    f"{source.dataset}: {file} has {found} for episode {span.episode}; meta/episodes says "
                    f"{span.length} rows, index from {span.first}. The dataset is scrambled; convert it "
                    "again."
                )
