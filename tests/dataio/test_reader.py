"""Reading shard sets, and every way in which their files can be other than they were written."""

from __future__ import annotations

import io
import logging
import resource
import shutil
import tarfile
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from tiny_lerobot import CAMERA_STRIDE, read_number
from tiny_shards import make_shards

from dataio.manifest import (
    FORMAT,
    VERSION,
    Camera,
    Codec,
    Column,
    DataError,
    Episode,
    Manifest,
    Shard,
    Source,
    load_manifest,
    save_manifest,
)
from dataio.reader import INDEX_FORMAT, ShardReader, allow_open_files, file_sha256


@pytest.fixture(scope="module")
def shards(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 samples in two shards of 9 and 6; do not modify."""
    return make_shards(image_dataset, tmp_path_factory.mktemp("reader") / "shards")


@pytest.fixture
def broken(shards: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(shards, tmp_path / "shards"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def test_every_sample_is_what_the_tar_holds(shards: Path) -> None:
    reader = ShardReader(shards)
    assert len(reader) == 15
    members = {}
    for shard in reader.manifest.shards:
        with tarfile.open(shards / shard.tar) as tar:
            members |= {member.name: tar.extractfile(member).read() for member in tar}
    for sample in range(15):
        for number, camera in enumerate(("image", "image2")):
            data = reader.encoded(sample, camera)
            assert data.tobytes() == members[f"{reader.index[sample]:08d}.{camera}.png"]
            assert not data.flags.writeable
            pixels = np.asarray(Image.open(io.BytesIO(data.tobytes())))
            assert read_number(pixels) == sample + CAMERA_STRIDE * number
        record = msgspec.msgpack.decode(reader.encoded(sample, "frame").tobytes())
        assert record["episode"] == reader.episode[sample] and record["frame"] == reader.frame[sample]
        assert record["task"] == reader.manifest.tasks[reader.task[sample]]
        assert record["action"] == reader.columns["action"][sample].tolist()
        assert np.float32(record["timestamp"]) == reader.timestamp[sample]
    assert reader.episode.tolist() == [0] * 5 + [1] * 4 + [2] * 6
    assert reader.index.tolist() == list(range(15))
    assert {key: rows.shape for key, rows in reader.columns.items()} == {
        "observation.state": (15, 3),
        "action": (15, 2),
    }


def test_batches_are_read_in_the_order_asked_for(shards: Path) -> None:
    reader = ShardReader(shards)
    ids = np.array([14, 0, 9, 8, 0])
    images = reader.read(ids, ["image2", "image"])
    for camera in ("image", "image2"):
        assert [i.tobytes() for i in images[camera]] == [reader.encoded(s, camera).tobytes() for s in ids]
    assert reader.read(ids, []) == {}


def test_unknown_names_and_ids_are_refused(shards: Path) -> None:
    reader = ShardReader(shards)
    with pytest.raises(DataError, match="no component 'imag'; did you mean 'image'"):
        reader.encoded(0, "imag")
    for sample in (-1, 15):
        with pytest.raises(DataError, match=r"\[0, 15\)"):
            reader.encoded(sample, "image")
    with pytest.raises(DataError, match="verify='ful'; did you mean 'full'"):
        ShardReader(shards, verify="ful")  # type: ignore[arg-type]


def test_what_was_verified_is_said(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ShardReader(shards, verify="size")
        ShardReader(shards)
    assert [record.message.endswith("sizes and sha256") for record in caplog.records] == [False, True]
    assert "15 samples in 2 shards" in caplog.text


def test_manifest_missing(broken: Path) -> None:
    (broken / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no manifest\.json here.*shard_dataset"):
        ShardReader(broken)


@pytest.mark.parametrize("name", ["000001.tar", "000001.index.safetensors"])
def test_file_missing(broken: Path, name: str) -> None:
    (broken / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: missing"):
        ShardReader(broken, verify="size")


def test_tar_cut_short(broken: Path) -> None:
    path = broken / "000001.tar"
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(DataError, match=r"000001\.tar: \d+ bytes, the manifest says \d+; an interrupted copy"):
        ShardReader(broken, verify="size")


@pytest.mark.parametrize("name", ["000000.tar", "000001.index.safetensors"])
def test_flipped_bit_is_found_by_hash(broken: Path, name: str) -> None:
    path = broken / name
    flip(path, path.stat().st_size - 3)  # in a tar that is the padding, which no image covers
    with pytest.raises(DataError, match=rf"{name}: sha256 .* the file's bytes have changed"):
        ShardReader(broken)


def test_flipped_bit_is_found_on_reading(broken: Path) -> None:
    reader = ShardReader(broken)
    place = int(reader._offset["image"][11]) + 40
    flip(broken / "000001.tar", place)
    reader = ShardReader(broken, verify="size")
    reader.encoded(11, "image2")
    with pytest.raises(DataError, match=r"000001\.tar, sample 00000011 \(episode 2, frame 2\): 'image' .* CRC32"):
        reader.encoded(11, "image")
    with pytest.raises(DataError, match="sample 00000011"):
        reader.read(np.arange(15), ["image2", "image"])


def test_index_of_another_tar(broken: Path) -> None:
    """Both indexes are there and readable, but exchanged, and the manifest does not notice their sizes."""
    manifest = load_manifest(broken)
    first, second = (broken / shard.index for shard in manifest.shards)
    swapped = first.read_bytes(), second.read_bytes()
    second.write_bytes(swapped[0])
    first.write_bytes(swapped[1])
    shards = [
        msgspec.structs.replace(shard, index_bytes=path.stat().st_size, index_sha256=file_sha256(path))
        for shard, path in zip(manifest.shards, (first, second), strict=True)
    ]
    save_manifest(broken, msgspec.structs.replace(manifest, shards=shards))
    with pytest.raises(DataError, match=r"000000\.index\.safetensors: index of another tar: its tar is 000001\.tar"):
        ShardReader(broken)


def test_stale_index(broken: Path, make_dataset, tmp_path: Path) -> None:
    """Tar and manifest are of a newer run, the index is left over from an older one with as many samples."""
    other = make_shards(make_dataset(values=[float(i + 7) for i in range(15)]), tmp_path / "other")
    shutil.copy(broken / "000001.index.safetensors", other)
    manifest = load_manifest(other)
    path = other / "000001.index.safetensors"
    shard = msgspec.structs.replace(manifest.shards[1], index_bytes=path.stat().st_size, index_sha256=file_sha256(path))
    save_manifest(other, msgspec.structs.replace(manifest, shards=[manifest.shards[0], shard]))
    with pytest.raises(DataError, match=r"000001\.index\.safetensors: index of another tar: its tar_"):
        ShardReader(other)


def test_column_that_the_index_lacks(broken: Path) -> None:
    manifest = load_manifest(broken)
    columns = [*manifest.columns, Column("observation.force", "float32", (6,))]
    save_manifest(broken, msgspec.structs.replace(manifest, columns=columns))
    with pytest.raises(DataError, match=r"lacks column\.observation\.force"):
        ShardReader(broken)
    cameras = [msgspec.structs.replace(manifest.cameras[0], name="top"), *manifest.cameras[1:]]
    save_manifest(broken, msgspec.structs.replace(manifest, cameras=cameras))
    with pytest.raises(DataError, match=r"lacks top\.crc32, .*, which the manifest lists; it has .*image\.crc32"):
        ShardReader(broken)
    columns = [msgspec.structs.replace(manifest.columns[0], shape=(4,)), *manifest.columns[1:]]
    save_manifest(broken, msgspec.structs.replace(manifest, columns=columns))
    with pytest.raises(DataError, match=r"the manifest says float32 \[9, 4\]"):
        ShardReader(broken)


def test_more_shards_than_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        allow_open_files(400)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
        allow_open_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(DataError, match="larger --samples-per-shard"):
                allow_open_files(hard + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def write_large_set(directory: Path, shards: int, samples: int) -> None:
    """A set without images: sparse tars, real indexes."""
    written = []
    zeros = {name: np.zeros(samples, np.int64) for name in ("task",)}
    for number in range(shards):
        tar, path = directory / f"{number:06d}.tar", directory / f"{number:06d}.index.safetensors"
        with open(tar, "wb") as file:
            file.truncate(samples * 2048)
        offset = np.arange(samples) * 2048 + 512
        tensors = {
            f"{component}.{kind}": rows
            for component in ("image", "image2", "frame")
            for kind, rows in (
                ("offset", offset),
                ("size", np.full(samples, 1024, np.int32)),
                ("crc32", np.full(samples, zlib.crc32(bytes(1024)), np.uint32)),
            )
        }
        tensors |= zeros | {
            "episode": np.full(samples, number),
            "frame": np.arange(samples),
            "index": np.arange(samples) + number * samples,
            "timestamp": np.zeros(samples, np.float32),
            "column.observation.state": np.zeros((samples, 8), np.float32),
            "column.action": np.zeros((samples, 7), np.float32),
        }
        size, sha256 = samples * 2048, "0" * 64
        metadata = {"tar": tar.name, "tar_bytes": str(size), "tar_sha256": sha256, "samples": str(samples)}
        save_file(tensors, path, {"format": INDEX_FORMAT, **metadata})
        index_bytes = path.stat().st_size
        written.append(Shard(tar.name, path.name, number * samples, samples, size, sha256, index_bytes, sha256))
    columns = [Column("observation.state", "float32", (8,)), Column("action", "float32", (7,))]
    cameras = [Camera(name, f"observation.images.{name}", 256, 256) for name in ("image", "image2")]
    manifest = Manifest(
        format=FORMAT, version=VERSION, name="large", source=Source("large", "", "v3.0", ""), fps=10.0,
        robot_type=None, samples=shards * samples, cameras=cameras, columns=columns, tasks=["move"],
        statistics={}, codec=Codec("jpeg", 90, "4:2:0"), rotation=0, order="episode",
        episodes=[Episode(number, samples) for number in range(shards)], shards=written,
    )  # fmt: skip
    save_manifest(directory, manifest)


def test_a_million_samples_open_quickly(tmp_path: Path) -> None:
    write_large_set(tmp_path, shards=1000, samples=1000)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    started = time.process_time()  # the machine may be busy with other things
    reader = ShardReader(tmp_path, verify="size")
    seconds = time.process_time() - started
    grown = (int(Path("/proc/self/statm").read_text().split()[1]) - before) * resource.getpagesize()
    assert len(reader) == 1_000_000
    assert reader.encoded(999_999, "image").tobytes() == bytes(1024)
    assert reader.index[[0, 999_999]].tolist() == [0, 999_999]
    print(f"a million samples: {seconds:.2f} s, {grown / 1e6:.0f} MB")
    assert seconds < 2
    assert grown < 500e6
