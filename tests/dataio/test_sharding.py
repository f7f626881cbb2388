"""The sharding command: what is in the shards, what is left out, how interrupted runs end."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import webdataset
from PIL import Image, JpegImagePlugin
from tiny_lerobot import CAMERA_STRIDE, TASKS, draw_number, read_number

import dataio.writer
from dataio.manifest import load_manifest
from dataio.reader import ShardReader
from dataio.sharding import plan
from dataio.source import Span

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/shard_dataset.py"


@pytest.fixture(scope="module")
def command() -> Callable[..., int]:
    """`command(dataset, out, *options)`: the script's exit code, run in this process with one worker."""
    spec = importlib.util.spec_from_file_location("shard_dataset", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return lambda dataset, out, *options: script.main(
        ["--dataset", str(dataset), "--out", str(out), "--workers", "1", *map(str, options)]
    )


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` but the job's description."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "job.json")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def replace_image(dataset: Path, index: int, data: bytes, key: str = "observation.images.image2") -> None:
    """Store `data` as the image of frame `index` in an image-kind dataset of one data file."""
    (path,) = (dataset / "data").glob("*/*.parquet")
    table = parquet.read_table(path)
    images = table[key].to_pylist()
    images[index] = {"bytes": data, "path": "frame.jpg"}
    place = table.column_names.index(key)
    table = table.set_column(place, table.schema.field(place), pa.array(images, table.schema.field(place).type))
    parquet.write_table(table, path)


def encoded(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def test_shards_are_complete_for_other_readers(
    image_dataset: Path, tmp_path: Path, command: Callable[..., int]
) -> None:
    assert command(image_dataset, tmp_path, "--codec", "png", "--samples-per-shard", 6) == 0
    manifest = load_manifest(tmp_path)
    assert [(s.tar, s.first, s.samples) for s in manifest.shards] == [
        ("000000.tar", 0, 9),
        ("000001.tar", 9, 6),
    ]
    assert (manifest.name, manifest.source.dataset, manifest.fps) == ("tiny_images", "tiny_images", 10)
    assert str(image_dataset.parent).encode() not in b"".join(contents(tmp_path).values())

    for shard in manifest.shards:
        raw = (tmp_path / shard.tar).read_bytes()
        with tarfile.open(tmp_path / shard.tar) as tar:
            members = tar.getmembers()
        assert len(members) == 3 * shard.samples
        for member in members:
            header = raw[member.offset : member.offset + 512]
            assert header[156:157] == b"0" and header[257:263] == b"ustar\0" and member.mtime == 0
    listing = subprocess.run(["tar", "tf", tmp_path / "000001.tar"], capture_output=True, text=True, check=True)
    assert listing.stdout.split()[:3] == [
        "00000009.frame.msgpack",
        "00000009.image.png",
        "00000009.image2.png",
    ]

    urls = [str(tmp_path / shard.tar) for shard in manifest.shards]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8"))
    assert [sample["__key__"] for sample in samples] == [f"{i:08d}" for i in range(15)]
    for i, sample in enumerate(samples):
        for c, name in enumerate(("image", "image2")):
            assert np.array_equal(sample[f"{name}.png"], draw_number(i + CAMERA_STRIDE * c, 32))
    record = msgspec.msgpack.decode(samples[11]["frame.msgpack"])
    assert record["episode"] == 2 and record["frame"] == 2 and record["task"] == TASKS[0]
    assert record["task_index"] == 0 and record["index"] == 11 and record["timestamp"] == np.float32(0.2)
    assert record["observation.state"] == [11, 22, -11] and record["action"] == [11, 2]


def test_index_leads_to_every_payload_and_row(video_dataset: Path, tmp_path: Path, command: Callable[..., int]) -> None:
    options = ("--quality", 90, "--subsampling", "4:2:0", "--samples-per-shard", 1, "--episodes", "0,2")
    assert command(video_dataset, tmp_path, *options) == 0
    reader = ShardReader(tmp_path, verify="full")
    assert len(reader.manifest.shards) == 2 and reader.index.tolist() == [*range(5), *range(9, 15)]
    assert reader.episode.tolist() == [0] * 5 + [2] * 6 and reader.task.tolist() == [0] * 11
    assert (reader.columns["action"][:, 0] == reader.index).all() and (
        reader.columns["action"][:, 1] == reader.frame
    ).all()
    assert (reader.timestamp == np.float32(reader.frame / 10)).all()
    for i, index in enumerate(reader.index.tolist()):
        for c, name in enumerate(("image", "image2")):
            image = Image.open(io.BytesIO(reader.encoded(i, name)))
            assert (
                JpegImagePlugin.get_sampling(image) == 2 and read_number(np.asarray(image)) == index + CAMERA_STRIDE * c
            )
        record = msgspec.msgpack.decode(reader.encoded(i, "frame"))
        assert record["action"] == reader.columns["action"][i].tolist() and record["index"] == index


BAD_IMAGES = {
    "cut": (lambda good: encoded(good, "JPEG")[: len(encoded(good, "JPEG")) // 2], "truncated"),
    "cmyk": (lambda good: encoded(good.convert("CMYK"), "JPEG"), "a CMYK image, RGB is needed"),
    "one pixel": (lambda good: encoded(good.resize((1, 1)), "JPEG"), "1x1 pixels, the dataset says 32x32"),
    "png of another shape": (lambda good: encoded(good.resize((32, 30)), "PNG"), "32x30 pixels"),
    "empty": (lambda good: b"", "no image is stored"),
    "garbage": (lambda good: b"\xff\xd8\xff\xe0 no jpeg", "cannot decode"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_an_episode_with_a_corrupt_image_is_left_out_by_name(
    kind: str, image_dataset: Path, tmp_path: Path, command: Callable[..., int]
) -> None:
    make, reason = BAD_IMAGES[kind]
    dataset = Path(shutil.copytree(image_dataset, tmp_path / "dataset"))
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    replace_image(dataset, 7, make(Image.fromarray(noise)))
    assert command(dataset, tmp_path / "out") == 3
    manifest = load_manifest(tmp_path / "out")
    assert [entry.episode for entry in manifest.quarantined] == [1]
    assert manifest.quarantined[0].reason.startswith("observation.images.image2, frame 2: ")
    assert reason in manifest.quarantined[0].reason
    assert [episode.episode for episode in manifest.episodes] == [0, 2]
    assert ShardReader(tmp_path / "out").index.tolist() == [*range(5), *range(9, 15)]
    assert manifest.statistics["action"].count == 11


def test_a_corrupt_video_leaves_out_the_episodes_in_it(
    make_dataset: Callable[..., Path], tmp_path: Path,
    command: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def picture(index: int, camera: int) -> np.ndarray:
        noise = np.random.default_rng(index).integers(0, 20, (128, 128, 3), np.uint8)
        return draw_number(index, 128) + noise

    # Damage that the decoder paints over without an error, as it does in frames of many macroblocks.
    dataset = make_dataset((20, 20, 20), video=True, picture=picture)
    video = dataset / "videos/observation.images.image/chunk-000/file-000.mp4"
    raw = bytearray(video.read_bytes())
    data = raw.index(b"mdat") + 4
    middle = data + (len(raw) - data) // 2
    raw[middle : middle + 100] = bytes(byte ^ 0x5A for byte in raw[middle : middle + 100])
    video.write_bytes(raw)
    assert command(dataset, tmp_path / "out") == 3
    manifest = load_manifest(tmp_path / "out")
    assert [entry.episode for entry in manifest.quarantined] == [1]
    assert "videos/observation.images.image/chunk-000/file-000.mp4" in manifest.quarantined[0].reason
    assert ShardReader(tmp_path / "out").index.tolist() == [*range(20), *range(40, 60)]

    video.write_bytes(bytes(1000))
    assert command(dataset, tmp_path / "none") == 1
    error = capsys.readouterr().err
    assert "not one of 3 episodes can be decoded (PyAV" in error and "file-000.mp4" in error


def test_a_shard_of_corrupt_episodes_only_does_not_exist(
    image_dataset: Path, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = Path(shutil.copytree(image_dataset, tmp_path / "dataset"))
    replace_image(dataset, 6, b"")
    out = tmp_path / "out"
    assert command(dataset, out, "--samples-per-shard", 1) == 3
    assert sorted(contents(out)) == [
        "000000.index.safetensors", "000000.tar", "000002.index.safetensors", "000002.tar", "manifest.json",
    ]  # fmt: skip
    assert [shard.first for shard in load_manifest(out).shards] == [0, 5] and len(ShardReader(out)) == 11
    before = contents(out)
    (out / "000002.tar").write_bytes(before["000002.tar"][:-700])
    assert command(dataset, out, "--samples-per-shard", 1) == 3
    assert contents(out) == before
    (out / "manifest.json").unlink()
    (out / "000002.tar").write_bytes(before["000002.tar"][:-1] + b"x")
    assert command(dataset, out, "--samples-per-shard", 1) == 3
    assert contents(out) == before
    assert command(dataset, out, "--samples-per-shard", 1) == 3
    assert "complete already" in capsys.readouterr().out
    assert command(dataset, tmp_path / "none", "--episodes", 1) == 1
    assert "not one of 1 episodes" in capsys.readouterr().err


def test_an_episode_with_a_value_that_is_no_number_is_left_out(
    make_dataset: Callable[..., Path], tmp_path: Path, command: Callable[..., int]
) -> None:
    dataset = make_dataset((2, 2), values=[0, 1, math.nan, 3])
    assert command(dataset, tmp_path / "out") == 3
    (entry,) = load_manifest(tmp_path / "out").quarantined
    assert entry.episode == 1 and "frame 0: not a finite number" in entry.reason


def test_statistics_are_exact_over_all_frames(
    make_dataset: Callable[..., Path], tmp_path: Path, command: Callable[..., int]
) -> None:
    values = [*range(10), *range(1000, 1010)]
    dataset = make_dataset((10, 10), values=values, cameras=("image",))
    assert command(dataset, tmp_path / "out", "--samples-per-shard", 5) == 0
    statistics = load_manifest(tmp_path / "out").statistics["action"]
    assert statistics.q01[0] == pytest.approx(0.19, abs=1e-12)  # the mean of the episodes' own would be about 500
    assert statistics.q99[0] == pytest.approx(1008.81, abs=1e-9)
    assert statistics.mean[0] == 504.5 and statistics.std[0] == pytest.approx(np.std(values), abs=1e-9)
    assert (statistics.min, statistics.max, statistics.count) == ([0, 0], [1009, 9], 20)


def test_rotation_turns_each_frame_once(
    make_dataset: Callable[..., Path], tmp_path: Path, command: Callable[..., int]
) -> None:
    def picture(index: int, camera: int) -> np.ndarray:
        frame = np.zeros((24, 32, 3), np.uint8)
        frame[0, 0] = 255
        return frame

    dataset = make_dataset((2,), picture=picture, cameras=("image",))
    assert command(dataset, tmp_path / "out", "--codec", "png", "--rotate", 180) == 0
    reader = ShardReader(tmp_path / "out")
    assert reader.manifest.rotation == 180
    for i in range(2):
        pixels = np.asarray(Image.open(io.BytesIO(reader.encoded(i, "image"))))
        assert np.argwhere(pixels[..., 0]).tolist() == [[23, 31]] and pixels[23, 31].tolist() == [255] * 3


def test_shuffled_order_permutes_the_same_samples(
    image_dataset: Path, tmp_path: Path, command: Callable[..., int]
) -> None:
    assert command(image_dataset, tmp_path / "plain") == 0
    assert command(image_dataset, tmp_path / "out", "--order", "shuffled", "--samples-per-shard", 4) == 0
    plain, shuffled = ShardReader(tmp_path / "plain"), ShardReader(tmp_path / "out", verify="full")
    assert [shard.samples for shard in shuffled.manifest.shards] == [4, 4, 4, 3]
    assert shuffled.manifest.order == "shuffled"
    assert shuffled.manifest.statistics == plain.manifest.statistics
    index = shuffled.index.tolist()
    assert index != sorted(index) and sorted(index) == plain.index.tolist()
    for i, source in enumerate(index):
        assert (shuffled.columns["action"][i] == plain.columns["action"][source]).all()
        for component in ("image", "image2", "frame"):
            assert shuffled.encoded(i, component).tobytes() == plain.encoded(source, component).tobytes()
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]


def test_other_shards_in_the_directory_are_not_touched(
    image_dataset: Path, video_dataset: Path, tmp_path: Path,
    command: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "README.md").write_text("a file that is no shard is welcome")
    assert command(image_dataset, tmp_path, "--episodes", "0:2") == 0
    before = contents(tmp_path)
    for arguments, difference in [
        ((image_dataset, tmp_path, "--episodes", "0:2", "--quality", 90), "quality 95 there, 90 asked"),
        ((image_dataset, tmp_path, "--episodes", "0:3"), "the episodes selected, or the dataset's metadata"),
        ((video_dataset, tmp_path), "dataset tiny_images there, tiny_videos asked"),
    ]:
        assert command(*arguments) == 1
        assert difference in capsys.readouterr().err
    (tmp_path / "job.json").unlink()
    assert command(image_dataset, tmp_path, "--episodes", "0:2") == 1
    assert "holds shards that this command did not make" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("order", ["episode", "shuffled"])
def test_a_full_disk_leaves_nothing_that_looks_complete(
    order: str, image_dataset: Path, tmp_path: Path, command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options = ("--samples-per-shard", 4, "--order", order)
    assert command(image_dataset, tmp_path / "whole", *options) == 0
    out = tmp_path / "out"
    room = 0.7 * sum(len(data) for data in contents(tmp_path / "whole").values()) * (2 if order == "shuffled" else 1)

    class FileOnFullDisk(io.FileIO):
        def write(self, data: bytes) -> int:
            nonlocal room
            room -= len(data)
            if room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    with monkeypatch.context() as patch:
        patch.setattr(dataio.writer, "open", FileOnFullDisk, raising=False)
        assert command(image_dataset, out, *options) == 1
    assert f"{out}: not enough space on its file system" in capsys.readouterr().err
    names = list(contents(out))
    assert any(name.endswith(".tar") for name in names) and "manifest.json" not in names
    assert all(name.removesuffix(".tar") + ".index.safetensors" in names for name in names if name.endswith(".tar"))
    assert not [name for name in names if name.endswith(".partial")]
    assert command(image_dataset, out, *options) == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_a_disk_that_is_too_small_is_refused_before_work(
    image_dataset: Path, tmp_path: Path, command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 2000))
    assert command(image_dataset, tmp_path) == 1
    assert "0.0 MB free, about 0.1 MB still needed" in capsys.readouterr().err
    assert not contents(tmp_path)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_run_resumes_to_the_same_bytes(
    make_dataset: Callable[..., Path], tmp_path: Path, command: Callable[..., int]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    dataset = make_dataset((8,) * 10, picture=lambda index, camera: np.roll(noise, index, axis=0), cameras=("image",))
    options = ["--codec", "png", "--samples-per-shard", "8"]
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--dataset", dataset, "--out", out, "--workers", "2", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("*.index.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) >= 2 and not any(map(is_running, workers))

    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.index.safetensors")}
    assert 1 <= len(kept) < 10 and not (out / "manifest.json").exists()
    assert command(dataset, out, *options) == 0
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert command(dataset, tmp_path / "whole", *options) == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_two_runs_do_not_share_a_directory(
    image_dataset: Path, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert command(image_dataset, tmp_path) == 1
    assert "another process is sharding into it" in capsys.readouterr().err
    os.close(held)
    assert command(image_dataset, tmp_path) == 0


def test_plan_keeps_episodes_whole() -> None:
    spans = [Span(episode, 0, length, "", {}) for episode, length in enumerate((5, 4, 6, 20, 1))]
    assert [[span.episode for span in part] for part in plan(spans, 9)] == [[0, 1], [2, 3], [4]]
    assert [[span.episode for span in part] for part in plan(spans, 1)] == [[0], [1], [2], [3], [4]]


def test_bad_options_are_refused(
    image_dataset: Path, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value, reason in [
        ("--quality", 0, "quality 0: JPEG's goes from 1 to 100"),
        ("--samples-per-shard", 0, "must be 1 or more"),
        ("--episodes", "0:4", "outside the dataset's episodes 0:3"),
    ]:
        assert command(image_dataset, tmp_path, option, value) == 1
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    assert command(image_dataset, tmp_path / "file") == 1
    assert "is a file" in capsys.readouterr().err
