"""The datasets people have: version 2.1, other names, odd sizes, several video files, and jobs in parts."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from legacy_dataset import write_legacy
from tiny_lerobot import CAMERA_STRIDE, read_number, write_dataset
from tiny_shards import make_shards, small_loader

from dataio.claim import Options, Part, parse_part
from dataio.encode import make_codec
from dataio.loader import batches
from dataio.manifest import DataError, load_manifest
from dataio.reader import ShardReader
from dataio.sharding import shard_dataset

PNG = Options(make_codec("png", 95, "4:4:4"), samples_per_shard=6)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ---- version 2.1


@pytest.mark.parametrize("video", [False, True])
def test_version_2_is_converted_beside_the_output(tmp_path: Path, request, video: bool) -> None:
    v3 = request.getfixturevalue("video_dataset" if video else "image_dataset")
    legacy = write_legacy(v3, tmp_path / "old")
    before = contents(legacy)
    outcome = shard_dataset(str(legacy), tmp_path / "out" / "shards", PNG)
    assert contents(legacy) == before, "the original is untouched"
    assert outcome.manifest is not None and outcome.manifest.source.dataset == "old"
    reader = ShardReader(tmp_path / "out" / "shards")
    expected = ShardReader(make_shards(v3, tmp_path / "v3"))
    assert reader.index.tolist() == list(range(15)) and reader.task.tolist() == expected.task.tolist()
    assert np.array_equal(reader.columns["action"], expected.columns["action"])
    assert reader.manifest.statistics == expected.manifest.statistics
    (batch,) = batches(reader, None, {}, None, microbatch=15)
    for row in range(15):
        assert read_number(batch.images["image2"][row].numpy()) == row + CAMERA_STRIDE
    cache = tmp_path / "out" / ".converted"
    assert len(list(cache.iterdir())) == 1
    stamp = next(cache.iterdir()).stat().st_mtime_ns
    shard_dataset(str(legacy), tmp_path / "out" / "again", PNG)
    assert next(cache.iterdir()).stat().st_mtime_ns == stamp, "one conversion serves every later run"


def test_a_broken_version_2_says_so_and_leaves_nothing(image_dataset: Path, tmp_path: Path) -> None:
    legacy = write_legacy(image_dataset, tmp_path / "old")
    (legacy / "meta/episodes_stats.jsonl").unlink()
    before = contents(legacy)
    with pytest.raises(DataError, match=r"converter from v2\.1 to v3 failed: .*episodes_stats"):
        shard_dataset(str(legacy), tmp_path / "shards", PNG)
    assert contents(legacy) == before and not (tmp_path / "shards").exists()
    info = json.loads((legacy / "meta/info.json").read_text())
    (legacy / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v2.0"}))
    with pytest.raises(DataError, match=r"LeRobot format v2\.0; v3 and v2\.1 are read"):
        shard_dataset(str(legacy), tmp_path / "shards", PNG)


def test_a_frame_rate_that_is_no_whole_number_survives_the_conversion(image_dataset: Path, tmp_path: Path) -> None:
    legacy = write_legacy(image_dataset, tmp_path / "old")
    info = json.loads((legacy / "meta/info.json").read_text())
    (legacy / "meta/info.json").write_text(json.dumps(info | {"fps": 29.97}))
    outcome = shard_dataset(str(legacy), tmp_path / "shards", PNG)
    assert outcome.manifest is not None and outcome.manifest.fps == 29.97


# ---- names


def test_features_get_the_names_that_the_map_gives(image_dataset: Path, tmp_path: Path) -> None:
    names = {"observation.images.image2": "wrist", "action": "actions.joint", "observation.state": "state"}
    outcome = shard_dataset(str(image_dataset), tmp_path / "shards", msgspec.structs.replace(PNG, map=names))
    assert outcome.renamed == {
        "observation.images.wrist": "observation.images.image2",
        "actions.joint": "action",
        "state": "observation.state",
    }
    reader = ShardReader(tmp_path / "shards")
    assert [camera.name for camera in reader.manifest.cameras] == ["image", "wrist"]
    (batch,) = batches(reader, None, {"actions.joint": [0, 1]}, ["wrist"], microbatch=15)
    assert [read_number(image.numpy()) for image in batch.images["wrist"]] == list(range(4096, 4111))
    assert batch.columns["actions.joint"].shape == (15, 2, 2) and batch.columns["state"][3, 1] == 6
    with pytest.raises(DataError, match="wrist2 asked|wrist there"):
        shard_dataset(
            str(image_dataset), tmp_path / "shards",
            msgspec.structs.replace(PNG, map={"observation.images.image2": "wrist2"}),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"observation.images.imag": "top"}, "no feature 'observation.images.imag'; did you mean 'obs"),
        ({"action": "observation.state"}, "would both be 'observation.state'"),
        ({"observation.images.image": "image2"}, "would both be 'observation.images.image2'"),
        ({"timestamp": "time"}, "no feature 'timestamp'"),
        ({"observation.images.image": "to p"}, "letters, digits, _ and - only"),
    ],
)
def test_bad_names_are_refused(image_dataset: Path, tmp_path: Path, names: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shard_dataset(str(image_dataset), tmp_path / "shards", msgspec.structs.replace(PNG, map=names))
    assert not (tmp_path / "shards").exists()


def test_names_that_cannot_be_part_of_a_tar_key_are_mapped(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    dataset = make_dataset(cameras=["frame", "image"])
    with pytest.raises(DataError, match=r"Rename it with --map observation\.images\.frame=NAME"):
        shard_dataset(str(dataset), tmp_path / "shards", PNG)
    names = {"observation.images.frame": "top"}
    outcome = shard_dataset(str(dataset), tmp_path / "shards", msgspec.structs.replace(PNG, map=names))
    assert outcome.manifest is not None and [c.name for c in outcome.manifest.cameras] == ["top", "image"]


# ---- sizes and files


@pytest.mark.parametrize(("height", "width"), [(33, 47), (5, 3), (48, 20)])
@pytest.mark.parametrize("codec", ["png", "jpeg"])
def test_frames_of_any_size(make_dataset, tmp_path: Path, height: int, width: int, codec: str) -> None:
    def picture(index: int, camera: int) -> np.ndarray:
        ramp = np.linspace(10 * index, 10 * index + 60 + 20 * camera, height * width).reshape(height, width, 1)
        return np.repeat(ramp, 3, axis=2).astype(np.uint8)

    dataset = make_dataset((3, 2), picture=picture)
    reader = ShardReader(make_shards(dataset, tmp_path / "shards", codec=codec))
    with small_loader(reader, microbatch=5) as loader:
        batch = next(loader)
    for row, index in enumerate(batch.index.tolist()):
        difference = batch.images["image2"][row].numpy().astype(int) - picture(index, 1)
        assert np.abs(difference).max() <= (0 if codec == "png" else 12)


# ---- parts


def test_parts_in_any_order_make_the_same_set(image_dataset: Path, tmp_path: Path) -> None:
    """Three parts on their own and one job alone: the same bytes, the manifest with its statistics included."""
    options = msgspec.structs.replace(PNG, samples_per_shard=4)
    whole = shard_dataset(str(image_dataset), tmp_path / "whole", options)
    left = []
    for number in (3, 1, 2):
        outcome = shard_dataset(str(image_dataset), tmp_path / "parts", options, part=Part(number, 3))
        left.append(outcome.shards_left)
        assert (outcome.manifest is None) == (number != 2)
    assert left == [2, 1, 0] and outcome.psnr == whole.psnr
    ours, theirs = contents(tmp_path / "parts"), contents(tmp_path / "whole")
    assert {name: data for name, data in ours.items() if not name.endswith(".lock")} == theirs
    again = shard_dataset(str(image_dataset), tmp_path / "parts", options, part=Part(2, 3))
    assert again.was_complete and again.manifest == whole.manifest


def test_parts_collected_from_other_disks_are_merged(image_dataset: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        shard_dataset(str(image_dataset), tmp_path / str(number), PNG, part=Part(number, 2))
    for path in (tmp_path / "2").iterdir():
        path.rename(tmp_path / "1" / path.name)
    outcome = shard_dataset(str(image_dataset), tmp_path / "1", PNG)
    assert outcome.manifest is not None and outcome.manifest.samples == 15
    assert len(ShardReader(tmp_path / "1", verify="full")) == 15


def test_a_part_with_a_corrupt_episode(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Its shard ends up without a sample; the merged manifest names the episode and holds the others."""
    values = [float(i) for i in range(15)]
    values[7] = float("nan")
    dataset = make_dataset(values=values)
    options = msgspec.structs.replace(PNG, samples_per_shard=1)
    for number in (2, 1):
        outcome = shard_dataset(str(dataset), tmp_path / "shards", options, part=Part(number, 2))
    assert outcome.manifest is not None and [q.episode for q in outcome.manifest.quarantined] == [1]
    assert ShardReader(tmp_path / "shards").index.tolist() == [*range(5), *range(9, 15)]
    assert load_manifest(tmp_path / "shards").statistics["action"].count == 11


def make_part(dataset: str, out: str, number: int) -> None:
    shard_dataset(dataset, out, msgspec.structs.replace(PNG, samples_per_shard=1), part=Part(number, 2))


def test_parts_run_at_the_same_time(image_dataset: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    jobs = [
        context.Process(target=make_part, args=(str(image_dataset), str(tmp_path / "shards"), number))
        for number in (1, 2)
    ]
    [job.start() for job in jobs]
    [job.join(240) for job in jobs]
    assert [job.exitcode for job in jobs] == [0, 0]
    assert len(ShardReader(tmp_path / "shards", verify="full")) == 15


def test_bad_parts_are_refused(image_dataset: Path, tmp_path: Path) -> None:
    assert parse_part("3/16") == Part(3, 16)
    for text in ("0/4", "5/4", "3", "a/b", "1/0", "-1/4"):
        with pytest.raises(DataError, match="--part"):
            parse_part(text)
    with pytest.raises(DataError, match="--part makes shards in episode order"):
        shard_dataset(
            str(image_dataset), tmp_path / "x", msgspec.structs.replace(PNG, order="shuffled"), part=Part(1, 2)
        )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = write_dataset(tmp_path / "dataset", (3, 4))
    spec = importlib.util.spec_from_file_location(
        "shard_script", Path(__file__).parents[2] / "scripts" / "shard_dataset.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    arguments = ["--dataset", str(dataset), "--out", str(tmp_path / "shards"), "--workers", "1",
                 "--samples-per-shard", "1", "--map", "observation.images.image=top"]  # fmt: skip
    assert script.main([*arguments, "--part", "1/2"]) == 0
    assert "this part is complete; 1 shards of other parts are not there yet" in capsys.readouterr().out
    assert script.main([*arguments, "--part", "2/2"]) == 0
    out = capsys.readouterr().out
    assert "feature observation.images.image → observation.images.top" in out and "7 samples of 2 episodes" in out
    assert script.main([*arguments[:-1], "top"]) == 1 and "as in KEY=NAME" in capsys.readouterr().err
