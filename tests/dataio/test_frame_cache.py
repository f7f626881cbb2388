"""The frame cache: the same batches without decoding, shared by processes, never half a frame, never another set's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_lerobot import CAMERA_STRIDE, read_number
from tiny_shards import make_shards, small_loader

from dataio.decode import Decoder
from dataio.frame_cache import FrameCache, open_frame_cache
from dataio.manifest import DataError
from dataio.reader import ShardReader


@pytest.fixture(scope="module")
def directory(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(image_dataset, tmp_path_factory.mktemp("frame_cache") / "jpeg", codec="jpeg")


@pytest.fixture
def reader(directory: Path) -> ShardReader:
    return ShardReader(directory)


@pytest.fixture
def cache(reader: ShardReader, tmp_path: Path) -> Iterator[FrameCache]:
    with contextlib.closing(open_frame_cache(reader, None, "disk", tmp_path / "frames")) as opened:
        yield opened


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images of each camera every call of the decoder was given."""
    calls: list[int] = []
    original = Decoder.decode

    def counted(self, encoded, *arguments, **options):
        calls.append(len(encoded["image"]))
        return original(self, encoded, *arguments, **options)

    monkeypatch.setattr(Decoder, "decode", counted)
    return calls


def test_batches_are_equal_and_every_frame_is_decoded_once(reader, cache, decodes) -> None:
    with small_loader(reader, microbatch=4) as plain, small_loader(reader, microbatch=4, frame_cache=cache) as cached:
        pairs = [(next(plain), next(cached)) for _ in range(12)]
    for expected, batch in pairs:
        assert torch.equal(batch.sample, expected.sample) and torch.equal(batch.image_rows, expected.image_rows)
        for name in ("image", "image2"):
            assert torch.equal(batch.images[name], expected.images[name])
    assert cache.slots.filled() == 15
    decodes.clear()
    with small_loader(reader, microbatch=4, frame_cache=cache, workers=2) as again:
        for expected, _ in pairs:
            assert torch.equal(next(again).images["image2"], expected.images["image2"])
    assert not decodes, "nothing is decoded once it is there"


def test_a_batch_may_be_half_there(reader, cache, decodes) -> None:
    """Eight of fifteen are there: the other rows of each batch are decoded into their own places."""
    from dataio.loader import batches

    for _ in batches(reader, range(0, 15, 2), {}, None, microbatch=8, frame_cache=cache):
        pass
    decodes.clear()
    (batch,) = batches(reader, [4, 1, 3, 8, 0, 5], {}, None, microbatch=6, frame_cache=cache)
    assert decodes == [3] and batch.sample.tolist() == [4, 1, 3, 8, 0, 5]
    for row, sample in enumerate(batch.sample.tolist()):
        assert read_number(batch.images["image"][row].numpy()) == sample
        assert read_number(batch.images["image2"][row].numpy()) == sample + CAMERA_STRIDE
    assert np.flatnonzero(cache.slots.valid).tolist() == sorted({*range(0, 15, 2), 1, 3, 5})


def test_samples_that_need_no_image_take_no_place(reader, cache) -> None:
    options = {"microbatch": 15, "frame_cache": cache, "skip": lambda ids: ids % 2 == 1}
    with small_loader(reader, **options) as loader:
        first, second = next(loader), next(loader)
    for batch in (first, second):
        assert (batch.sample[batch.image_rows] % 2 == 0).all() and len(batch.images["image"]) == 8
        for row, sample in zip(batch.images["image"], batch.sample[batch.image_rows].tolist(), strict=True):
            assert read_number(row.numpy()) == sample
    assert np.flatnonzero(cache.slots.valid).tolist() == list(range(0, 15, 2))


def test_held_batches_do_not_change(reader, cache) -> None:
    with small_loader(reader, frame_cache=cache, workers=2) as loader:
        held = [next(loader) for _ in range(12)]
        copies = [batch.images["image"].clone() for batch in held]
        for _ in range(20):
            next(loader)
    assert all(torch.equal(batch.images["image"], copy) for batch, copy in zip(held, copies, strict=True))


def test_another_set_or_camera_never_sees_it(reader, cache, make_dataset, tmp_path: Path) -> None:
    with small_loader(reader, frame_cache=cache) as loader:
        next(loader)
    root = tmp_path / "frames"
    assert open_frame_cache(reader, None, "disk", root).slots.filled() > 0
    assert open_frame_cache(reader, ["image2"], "disk", root).slots.filled() == 0
    assert open_frame_cache(reader, None, "disk", root, device="mixed").slots.filled() == 0
    other = ShardReader(make_shards(make_dataset((15,)), tmp_path / "other", codec="jpeg"))
    assert open_frame_cache(other, None, "disk", root).slots.filled() == 0
    with pytest.raises(DataError, match=r"frame cache is of cameras \['image', 'image2'\]"):
        small_loader(reader, frame_cache=cache, cameras=["image"])


def test_processes_share_one_mapping(directory: Path, reader, cache) -> None:
    """What another process decodes is served here at once, while both have the files open."""
    script = (
        "import sys; from dataio.reader import ShardReader; from dataio.frame_cache import open_frame_cache\n"
        "from dataio.loader import batches\n"
        "reader = ShardReader(sys.argv[1]); cache = open_frame_cache(reader, None, 'disk', sys.argv[2])\n"
        "for batch in batches(reader, [3, 7], {}, None, microbatch=2, frame_cache=cache): pass\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", script, str(directory), str(cache.slots.directory.parent)],
        check=True, timeout=60, cwd=root,
    )  # fmt: skip
    assert cache.has(np.arange(15)).nonzero()[0].tolist() == [3, 7]
    out = {name: torch.zeros((1, 32, 32, 3), dtype=torch.uint8) for name in cache.cameras}
    cache.read(np.array([7]), np.array([0]), out)
    assert read_number(out["image2"][0].numpy()) == 7 + CAMERA_STRIDE


def test_what_is_not_in_memory_is_asked_for_at_once(reader, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cold disk, or one whose file system cannot say: all announced, then read, with the same bytes."""
    with contextlib.closing(small_loader(reader, frame_cache=cache)) as loader:
        for _ in range(5):
            next(loader)
    assert cache.slots.filled() == 15
    samples, rows = np.array([3, 7, 2]), np.array([2, 0, 1])

    def served() -> dict[str, torch.Tensor]:
        out = {name: torch.zeros((3, 32, 32, 3), dtype=torch.uint8) for name in cache.cameras}
        cache.read(samples, rows, out)
        return out

    calls: list[str] = []
    read, advise = os.preadv, os.posix_fadvise

    def preadv(descriptor, parts, offset, flags):
        calls.append("try" if flags else "read")
        if flags:
            raise BlockingIOError
        return read(descriptor, parts, offset, flags)

    def fadvise(descriptor, start, length, advice):
        calls.append("announce")
        advise(descriptor, start, length, advice)

    warm = served()
    monkeypatch.setattr("dataio.slots.os.preadv", preadv)
    monkeypatch.setattr("dataio.slots.os.posix_fadvise", fadvise)
    cold = served()
    assert calls == ["try"] * 3 + ["announce"] * 3 + ["read"] * 3
    assert all(torch.equal(warm[name], cold[name]) for name in warm)
    assert [read_number(warm["image"][row].numpy()) for row in rows] == samples.tolist()


def test_a_kill_while_writing_leaves_no_half_frame(directory: Path, reader, tmp_path: Path) -> None:
    """The writer is killed inside a slot: its first camera is there, the slot does not count."""
    script = (
        "import sys, time, numpy as np; from dataio.reader import ShardReader\n"
        "from dataio.frame_cache import open_frame_cache\nfrom dataio.loader import batches\n"
        "reader = ShardReader(sys.argv[1]); cache = open_frame_cache(reader, None, 'disk', sys.argv[2])\n"
        "mark = cache.slots.mark\n"
        "def slow(sample):\n"
        "    if sample == 2: print('inside', flush=True); time.sleep(60)\n"
        "    mark(sample)\n"
        "cache.slots.mark = slow\n"
        "for batch in batches(reader, [0, 1, 2, 3], {}, None, microbatch=4, frame_cache=cache): pass\n"
    )
    arguments = [sys.executable, "-c", script, str(directory), str(tmp_path / "killed")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None and process.stdout.readline() == b"inside\n"
        os.kill(process.pid, signal.SIGKILL)
    cache = open_frame_cache(reader, None, "disk", tmp_path / "killed")
    assert cache.has(np.arange(15)).nonzero()[0].tolist() == [0, 1]
    assert cache.slots.slots[2].any(), "bytes were written, and are not believed"


def test_what_does_not_fit_is_refused_with_the_numbers(reader, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dataio.slots.free_bytes", lambda directory: 1000)
    with pytest.raises(DataError, match=r"frame_cache: 15 slots of 0\.01 MB need 0\.0 GB in .* are free\. Set data\.f"):
        open_frame_cache(reader, None, "disk", tmp_path / "full")
    assert not (tmp_path / "full").exists()


def test_memory_mode_lives_in_shared_memory(reader, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dataio.frame_cache.SHARED_MEMORY", tmp_path)
    cache = open_frame_cache(reader, None, "memory")
    assert cache.slots.directory.is_relative_to(tmp_path)
    assert "0 of 15 samples filled, 0.01 MB each, 0.00 GB when full" in cache.describe()


def test_bad_modes_are_refused(reader, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.frame_cache = 'dsk'; did you mean 'disk'"):
        open_frame_cache(reader, None, "dsk", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no camera is used"):
        open_frame_cache(reader, [], "disk", tmp_path)


@pytest.mark.throughput
def test_serving_frames_costs_a_fraction_of_decoding(sample, tmp_path: Path) -> None:
    cache = open_frame_cache(sample, None, "disk", tmp_path)
    seconds = {}
    for name, options in {"fill": {"frame_cache": cache}, "cached": {"frame_cache": cache}, "plain": {}}.items():
        with small_loader(sample, windows={}, microbatch=32, workers=1, **options) as loader:
            for _ in range(17 if name == "fill" else 3):
                next(loader)
            started = time.process_time()
            for _ in range(16):
                next(loader)
            seconds[name] = time.process_time() - started
    print(f"CPU: decoding {seconds['plain']:.3f} s, frame cache {seconds['cached']:.3f} s for 512 samples")
    assert seconds["cached"] < seconds["plain"] / 3
