"""The stages behind the loader: buffers that do not change, errors that surface, threads that end."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_shards import make_shards, small_loader

from dataio.batch import Batch
from dataio.loader import Loader, batches
from dataio.manifest import DataError
from dataio.reader import ShardReader


@pytest.fixture(scope="module")
def directory(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(image_dataset, tmp_path_factory.mktemp("stages") / "png")


@pytest.fixture
def reader(directory: Path) -> ShardReader:
    return ShardReader(directory)


@pytest.fixture
def load(reader: ShardReader) -> Iterator[Callable[..., Loader]]:
    """Makes loaders over `reader` (or another set) with small defaults, and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda source=reader, **options: stack.enter_context(small_loader(source, **options))


def threads_end(within: float = 5) -> bool:
    """Whether all of torchdata's threads are gone `within` seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not [t for t in threading.enumerate() if "_populate_queue" in t.name or "_apply_udf" in t.name]:
            return True
        time.sleep(0.02)
    return False


def test_held_batches_do_not_change(load) -> None:
    loader = load()
    held = [next(loader) for _ in range(4)]
    copies = [{name: image.clone() for name, image in batch.images.items()} for batch in held]
    only_a_view = next(loader).images["image"][1]
    copy = only_a_view.clone()
    for _ in range(20):
        next(loader)
    assert all(torch.equal(batch.images[name], c[name]) for batch, c in zip(held, copies, strict=True) for name in c)
    assert torch.equal(only_a_view, copy)
    loader.close()
    assert torch.equal(held[0].images["image"], copies[0]["image"])


def test_memory_is_flat_over_a_thousand_batches(load) -> None:
    loader = load(microbatch=32)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    places = set()
    for step in range(1000):
        places.add(next(loader).images["image"].data_ptr())
        if step == 100:
            gc.collect()
            before = resident()
    assert len(places) <= 6
    assert resident() < 1.05 * before  # a leak of the images alone would be 177 MB


@pytest.mark.throughput
@pytest.mark.parametrize("block", [0, 1])
def test_no_gap_at_the_end_of_an_epoch(load, reader: ShardReader, block: int) -> None:
    """Three epochs of ten steps of 30 ms: no step waits for an epoch to begin."""
    loader = load(samples=range(10), microbatch=1, block=block)
    next(loader)
    steps = []
    for _ in range(29):
        started = time.perf_counter()
        next(loader)
        waited = time.perf_counter() - started
        time.sleep(0.03)
        steps.append(waited + 0.03)
    assert max(steps) / sorted(steps)[len(steps) // 2] < 2


def test_an_error_names_its_stage_and_does_not_hang(load, reader: ShardReader, monkeypatch) -> None:
    original = reader._crc32["image2"].copy()
    reader._crc32["image2"][12] ^= 1
    try:
        loader = load()
        started = time.monotonic()
        with pytest.raises(DataError, match=r"loader stage 'read': .*000001\.tar, sample 00000012 .*'image2'"):
            [next(loader) for _ in range(20)]
        with pytest.raises(DataError, match="loader stage 'read'"):  # and not the batch behind it
            next(loader)
        assert time.monotonic() - started < 5
        assert threads_end()
    finally:
        reader._crc32["image2"][:] = original


def test_bytes_that_are_no_image_name_the_sample(load, reader: ShardReader, monkeypatch) -> None:
    original = reader.read

    def read(ids, cameras):
        images = original(ids, cameras)
        for row in np.flatnonzero(ids == 8):
            images["image"][row] = images["image"][row][:60]
        return images

    monkeypatch.setattr(reader, "read", read)
    loader = load()
    with pytest.raises(DataError, match=r"loader stage 'decode': .*sample 00000008 \(episode 1, frame 3\): 'image'"):
        [next(loader) for _ in range(20)]


def test_an_error_in_the_transform_keeps_its_cause(load) -> None:
    def transform(batch: Batch) -> dict:
        raise KeyError("no such prompt")

    with pytest.raises(RuntimeError, match=r"loader stage 'prepare': KeyError: 'no such prompt'") as caught:
        next(load(transform=transform))
    assert isinstance(caught.value.__cause__, KeyError)


def test_close_ends_the_threads(load, reader: ShardReader) -> None:
    assert threads_end()
    loader = load(workers=2)
    held = next(loader)
    assert not threads_end(within=0.3)
    loader.close()
    assert threads_end()
    with pytest.raises(RuntimeError, match="the loader was closed"):
        next(loader)
    assert held.images["image"].shape == (3, 32, 32, 3)


def test_dropping_a_loader_ends_its_threads(reader: ShardReader) -> None:
    loader = small_loader(reader)
    next(loader)
    del loader
    some = batches(reader, None, {}, None, microbatch=2)
    next(some)
    del some
    assert threads_end()


def test_a_process_keeps_torch_threads_and_ends_with_a_loader_open(directory: Path) -> None:
    """torchdata's workers set torch's thread count to one, in whatever thread has not used torch before."""
    script = (
        "import sys, torch; from dataio.reader import ShardReader; from dataio.loader import Loader\n"
        "loader = Loader(ShardReader(sys.argv[1]), None, {}, None, seed=0, microbatch=200)\n"
        "print(len(next(loader)), torch.get_num_threads())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(directory)], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "200 2\n"), result.stderr


@pytest.mark.gpu
def test_decoding_on_the_device_gives_the_same_batches(load, image_dataset: Path, tmp_path: Path) -> None:
    reader = ShardReader(make_shards(image_dataset, tmp_path / "jpeg", codec="jpeg"))
    on_host, on_device = load(reader), load(reader, device="mixed")
    held = [(next(on_host), next(on_device)) for _ in range(8)]
    for mine, theirs in held:
        assert theirs.images["image"].is_cuda
        assert theirs.sample.tolist() == mine.sample.tolist()
        for name, image in mine.images.items():
            assert (theirs.images[name].cpu().float() - image.float()).abs().mean() < 1
