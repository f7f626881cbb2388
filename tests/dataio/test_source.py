"""Reading LeRobot datasets: what is refused, and that every frame read is the one asked for."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tiny_lerobot import CAMERA_STRIDE, TASKS, draw_number, read_number

from dataio.features import Feature, sort_features
from dataio.frames import EpisodeReader
from dataio.manifest import DataError
from dataio.source import open_source, ranges, select


def edit_parquet(root: Path, folder: str, edit: Callable[[dict[str, list]], None]) -> None:
    """Rewrite the only parquet file below `folder` after `edit` changed its columns, lists by name."""
    (path,) = (root / folder).glob("*/*.parquet")
    table = parquet.read_table(path)
    columns = table.to_pydict()
    edit(columns)
    parquet.write_table(pa.table(columns, schema=table.schema), path)


def copied(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


@pytest.mark.parametrize("kind", ["image_dataset", "video_dataset"])
def test_every_frame_and_row_is_its_own(kind: str, request: pytest.FixtureRequest) -> None:
    source = open_source(str(request.getfixturevalue(kind)))
    reader = EpisodeReader(source)
    assert [camera.name for camera in source.cameras] == ["image", "image2"]
    assert source.tasks == list(TASKS)
    for span in [source.spans[i] for i in (2, 0, 1)]:
        rows = reader.rows(span)
        numbers = np.arange(span.first, span.first + span.length)
        assert (rows.index == numbers).all() and (rows.frame == np.arange(span.length)).all()
        assert (rows.task == span.episode % 2).all()
        assert rows.columns["observation.state"].dtype == np.float32
        assert (rows.columns["observation.state"] == np.stack([numbers, 2 * numbers, -numbers], 1)).all()
        for c, camera in enumerate(source.cameras):
            frames = list(reader.frames(span, camera))
            assert [read_number(frame) for frame in frames] == (numbers + CAMERA_STRIDE * c).tolist()
            if kind == "image_dataset":
                assert all(
                    np.array_equal(frame, draw_number(number + CAMERA_STRIDE * c, 32))
                    for number, frame in zip(numbers, frames, strict=True)
                )


def test_columns_keep_their_type_and_shape(make_dataset: Callable[..., Path]) -> None:
    root = make_dataset(
        (2, 3),
        cameras=("image",),
        extra={
            "next.done": ({"dtype": "bool", "shape": (1,), "names": None}, lambda i: np.array([i % 2 == 1])),
            "force": ({"dtype": "float64", "shape": (2,), "names": None}, lambda i: np.array([i / 3, i])),
            "grid": (
                {"dtype": "float32", "shape": (2, 2), "names": None},
                lambda i: np.eye(2, dtype=np.float32),
            ),
        },
    )
    source = open_source(str(root))
    assert source.skipped == ["grid: has 2 dimensions (shape [2, 2])"]
    columns = EpisodeReader(source).rows(source.spans[1]).columns
    assert columns["next.done"].dtype == bool and columns["next.done"].tolist() == [[False], [True], [False]]
    assert columns["force"].dtype == np.float64 and columns["force"].tolist() == [[i / 3, i] for i in (2, 3, 4)]


def test_files_split_differently_per_camera(make_dataset: Callable[..., Path]) -> None:
    def picture(index: int, camera: int) -> np.ndarray:
        frame = draw_number(index + CAMERA_STRIDE * camera, 64)
        noise = np.random.default_rng(index).integers(-20, 20, frame.shape) if camera == 0 else 0
        return (frame + noise).astype(np.uint8)

    root = make_dataset((6, 5, 7, 6, 4, 5), video=True, picture=picture, video_mb=0.006, cameras=("a", "b"))
    files = [len(list((root / "videos" / f"observation.images.{name}").glob("*/*.mp4"))) for name in "ab"]
    data_files = len(list((root / "data").glob("*/*.parquet")))
    assert (*files, data_files) == (6, 2, 1)
    source = open_source(str(root))
    reader = EpisodeReader(source)
    for span in source.spans:
        for c, camera in enumerate(source.cameras):
            numbers = [read_number(frame) - CAMERA_STRIDE * c for frame in reader.frames(span, camera)]
            assert numbers == list(range(span.first, span.first + span.length))


def test_scrambled_episode_ranges_are_refused_by_name(image_dataset: Path, tmp_path: Path) -> None:
    root = copied(image_dataset, tmp_path)

    def swap(columns: dict[str, list]) -> None:
        for name in ("dataset_from_index", "dataset_to_index", "length"):
            columns[name][1], columns[name][2] = columns[name][2], columns[name][1]

    edit_parquet(root, "meta/episodes", swap)
    with pytest.raises(DataError, match=r"episode 1: .*\[9, 15\).*must tile"):
        open_source(str(root))


def test_rows_that_disagree_with_the_metadata_are_refused_by_name(image_dataset: Path, tmp_path: Path) -> None:
    root = copied(image_dataset, tmp_path)

    def move_a_frame(columns: dict[str, list]) -> None:
        columns["episode_index"][5] = 0

    edit_parquet(root, "data", move_a_frame)
    with pytest.raises(DataError, match=r"data/chunk-000/file-000.parquet has 6 rows, .* for episode 0"):
        open_source(str(root))
    assert open_source(str(root), "2").frames == 6


def test_overlapping_video_ranges_are_refused(video_dataset: Path, tmp_path: Path) -> None:
    root = copied(video_dataset, tmp_path)

    def shift(columns: dict[str, list]) -> None:
        columns["videos/observation.images.image/from_timestamp"][2] -= 0.2

    edit_parquet(root, "meta/episodes", shift)
    with pytest.raises(DataError, match=r"episode 1 has its frames \[5, 9\), episode 2 starts at 7: they overlap"):
        open_source(str(root))


def test_missing_files_are_named_with_the_episodes_that_need_them(make_dataset: Callable[..., Path]) -> None:
    root = make_dataset((4, 4, 4), data_mb=0.001, cameras=("image",))
    files = sorted((root / "data").glob("*/*.parquet"))
    assert len(files) == 3
    files[1].unlink()
    with pytest.raises(DataError, match="data/chunk-000/file-001.parquet is missing; episodes 1 need it"):
        open_source(str(root))
    assert [span.episode for span in open_source(str(root), "0,2").spans] == [0, 2]


def test_what_is_no_dataset_is_refused(image_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory. Give a LeRobot dataset's directory or a hub id"):
        open_source(str(tmp_path / "absent"))
    with pytest.raises(DataError, match="no meta/info.json"):
        open_source(str(tmp_path))
    with pytest.raises(DataError, match="a file"):
        open_source(str(image_dataset / "meta/info.json"))
    root = copied(image_dataset, tmp_path)
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v2.1"}))
    with pytest.raises(DataError, match="LeRobot format v2.1; scripts/shard_dataset.py converts it"):
        open_source(str(root))


def test_hub_dataset_downloads_only_what_is_needed(
    video_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / "0123abc"
    asked: list[tuple[str, list[str]]] = []

    def download(repo: str, repo_type: str, revision: str, allow_patterns: list[str]) -> str:
        assert (repo, repo_type) == ("owner/name", "dataset")
        asked.append((revision, list(allow_patterns)))
        for path in video_dataset.rglob("*"):
            relative = path.relative_to(video_dataset)
            if path.is_file() and any(fnmatch.fnmatch(str(relative), pattern) for pattern in allow_patterns):
                (snapshot / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, snapshot / relative)
        return str(snapshot)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lerobot.datasets.utils.get_safe_version", lambda repo, version: version)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = open_source("owner/name", "0")
    assert (source.dataset, source.revision) == ("owner/name", "0123abc")
    assert asked[0] == ("v3.0", ["meta/*"]) and asked[1] == ("0123abc", sorted(source.spans[0].files()))

    def refuse(repo: str, version: str) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr("lerobot.datasets.utils.get_safe_version", refuse)
    with pytest.raises(DataError, match="owner/name: no such directory, and the Hugging Face hub did not deliver"):
        open_source("owner/name")


def test_episode_lists() -> None:
    assert select("0:3,12, 5:", 7 + 6) == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12]
    assert select(None, 3) == [0, 1, 2]
    assert ranges([0, 1, 2, 7]) == "0:3, 7"
    for text, reason in [
        ("3", "outside"),
        ("2:2", "outside"),
        ("", "neither"),
        ("a", "neither"),
        ("1-2", "neither"),
    ]:
        with pytest.raises(DataError, match=reason):
            select(text, 3)


def test_features_without_a_place_are_named() -> None:
    camera = {"observation.images.top": Feature("video", (3, 48, 64), ["channels", "height", "width"])}
    cameras, columns, skipped = sort_features(
        camera
        | {
            "index": Feature("int64", (1,)),
            "next.done": Feature("bool", (1,), ["done"]),
            "action": Feature("float32", (2,), {"axes": ["x", "y"]}),
            "grid": Feature("float32", (4, 4)),
            "note": Feature("string", (1,)),
            "observation.images.depth": Feature("image", (48, 64, 1), ["height", "width", "channel"]),
        }
    )
    assert [(c.name, c.height, c.width) for c in cameras] == [("top", 48, 64)]
    assert [(c.key, c.shape, c.names) for c in columns] == [
        ("next.done", (1,), ["done"]),
        ("action", (2,), {"axes": ["x", "y"]}),
    ]
    assert [line.partition(":")[0] for line in skipped] == ["grid", "note", "observation.images.depth"]
    colour = Feature("image", (8, 8, 3))
    for keys in (["a.frame"], ["a.top cam"], ["a.top", "b.top"]):
        with pytest.raises(DataError, match="names the image in the tar"):
            sort_features({key: colour for key in keys})
    with pytest.raises(DataError, match="no colour camera"):
        sort_features({"action": Feature("float32", (2,))})
    with pytest.raises(DataError, match="taken by the sample's own fields"):
        sort_features(camera | {"task": Feature("float32", (1,))})
