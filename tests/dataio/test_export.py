"""Shards back to LeRobot: values and pixels equal, complete or absent, never over something else."""

from __future__ import annotations

import fcntl
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from dataio import export
from dataio.export import RECORD, export_dataset
from dataio.frames import decode_image
from dataio.manifest import DataError
from dataio.reader import ShardReader
from tests.dataio.tiny_lerobot import TASKS, write_dataset
from tests.dataio.tiny_shards import make_shards

EXTRA = {
    "next.done": ({"dtype": "bool", "shape": (1,), "names": None}, lambda index: np.array([index % 3 == 0])),
    "observation.count": ({"dtype": "int64", "shape": (2,), "names": None}, lambda index: np.array([index, -index])),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("source") / "set", extra=EXTRA)


def load(root: Path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("test/exported", root=root)


@pytest.mark.parametrize(("codec", "order"), [("png", "episode"), ("jpeg", "shuffled")])
def test_values_and_pixels_are_equal(dataset, tmp_path, codec, order):
    shards = make_shards(dataset, tmp_path / "shards", codec=codec, order=order)
    seen: list[tuple[int, int]] = []
    done = export_dataset(shards, tmp_path / "out", lambda *progress: seen.append(progress))
    assert (done.episodes, done.frames, done.was_complete) == (3, 15, False)
    assert seen == [(1, 3), (2, 3), (3, 3)]

    source, back, reader = load(dataset), load(tmp_path / "out"), ShardReader(shards)
    assert len(back) == len(source) == 15 and back.fps == source.fps and back.meta.robot_type == "test_arm"
    row_of = {int(index): row for row, index in enumerate(reader.index)}
    for index in range(15):
        a, b = source[index], back[index]
        for key in ("observation.state", "action", "next.done", "observation.count", "timestamp", "frame_index"):
            assert a[key].dtype == b[key].dtype and np.array_equal(a[key], b[key]), (index, key)
        assert a["episode_index"] == b["episode_index"] and a["task"] == b["task"] in TASKS
        for camera in ("image", "image2"):
            stored = decode_image(reader.encoded(row_of[index], camera).tobytes())
            pixels = (b[f"observation.images.{camera}"] * 255).round().byte().permute(1, 2, 0).numpy()
            assert np.array_equal(pixels, stored), "PNG keeps the stored image's pixels"
            if codec == "png":
                assert np.array_equal(a[f"observation.images.{camera}"], b[f"observation.images.{camera}"])


def test_episode_numbers_of_the_source_are_kept_and_timestamps_are_the_sources(dataset, tmp_path, monkeypatch):
    from dataio.claim import Options
    from dataio.encode import make_codec
    from dataio.sharding import shard_dataset

    shard_dataset(str(dataset), tmp_path / "shards", Options(make_codec("png", 95, "4:4:4")), "0,2")
    real = ShardReader.__init__

    def jittered(self, *arguments):
        real(self, *arguments)
        self.timestamp = self.timestamp + np.float32(0.0125)

    monkeypatch.setattr(ShardReader, "__init__", jittered)
    export_dataset(tmp_path / "shards", tmp_path / "out")
    back = load(tmp_path / "out")
    assert back.num_episodes == 2 and back[5]["action"][0] == 9, "episode 2 follows episode 0"
    assert float(back[1]["timestamp"]) == pytest.approx(0.1125)
    assert b"0,\n  2\n" in (tmp_path / "out" / RECORD).read_bytes()


def test_statistics_are_the_shards_and_not_the_mean_of_the_episodes_quantiles(dataset, tmp_path, monkeypatch):
    shards = make_shards(dataset, tmp_path / "shards")
    exact = ShardReader(shards).manifest.statistics["action"]

    def quantile(out: str) -> np.ndarray:
        export_dataset(shards, tmp_path / out)
        return load(tmp_path / out).meta.stats["action"]["q99"]

    assert np.array_equal(quantile("out"), exact.q99)
    monkeypatch.setattr(export, "keep_statistics", lambda *_: None)
    assert not np.allclose(quantile("merged"), exact.q99)


def test_again_is_nothing_and_other_directories_are_left_alone(dataset, tmp_path):
    shards = make_shards(dataset, tmp_path / "shards")
    out = tmp_path / "out"
    export_dataset(shards, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert export_dataset(shards, out).was_complete
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    other = make_shards(dataset, tmp_path / "other", samples_per_shard=20)
    with pytest.raises(DataError, match="an export of other shards"):
        export_dataset(other, out)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    with pytest.raises(DataError, match="was not written by this program"):
        export_dataset(shards, mine)
    assert (mine / "notes.txt").read_text() == "keep"


def test_an_interrupted_export_leaves_nothing_under_the_name(dataset, tmp_path, monkeypatch):
    shards = make_shards(dataset, tmp_path / "shards")
    real = export.frame_of

    def failing(reader, row):
        if row == 7:
            raise KeyboardInterrupt
        return real(reader, row)

    monkeypatch.setattr(export, "frame_of", failing)
    with pytest.raises(KeyboardInterrupt):
        export_dataset(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(export, "frame_of", real)
    assert export_dataset(shards, tmp_path / "out").frames == 15
    assert len(load(tmp_path / "out")) == 15


def test_two_exports_do_not_write_one_dataset(dataset, tmp_path):
    shards = make_shards(dataset, tmp_path / "shards")
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is exporting"):
            export_dataset(shards, tmp_path / "out")


def test_the_command(dataset, tmp_path, capsys):
    path = Path(__file__).parents[2] / "scripts" / "export_dataset.py"
    spec = importlib.util.spec_from_file_location("export_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    shards = make_shards(dataset, tmp_path / "shards")
    arguments = ["--shards", str(shards), "--out", str(tmp_path / "out")]
    assert script.main(arguments) == 0 and "3 episodes, 15 frames, written" in capsys.readouterr().out
    assert script.main(arguments) == 0 and "was complete already" in capsys.readouterr().out
    assert script.main(["--shards", str(tmp_path), "--out", str(tmp_path / "x")]) == 1
    assert "no manifest.json" in capsys.readouterr().err
