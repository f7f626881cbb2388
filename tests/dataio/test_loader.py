"""The loader: the same samples for any ranks and workers, LeRobot's values, exact resuming."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from tiny_lerobot import CAMERA_STRIDE, FPS, read_number
from tiny_shards import CHUNK, make_shards, small_loader

from dataio.batch import Batch
from dataio.loader import Loader, batches
from dataio.manifest import DataError
from dataio.order import Stream
from dataio.reader import ShardReader

# The order of 15 samples under seed 0, in global batches of 6: the fourth ends in the second epoch.
GLOBAL_BATCHES = [[2, 12, 8, 7, 4, 9], [13, 1, 5, 11, 14, 0], [3, 10, 6, 12, 0, 9], [14, 10, 13, 11, 8, 6]]


@pytest.fixture(scope="module")
def directory(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(image_dataset, tmp_path_factory.mktemp("loader") / "png")


@pytest.fixture
def reader(directory: Path) -> ShardReader:
    return ShardReader(directory)


@pytest.fixture
def load(reader: ShardReader) -> Iterator[Callable[..., Loader]]:
    """Makes loaders over `reader` (or another set) with small defaults, and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda source=reader, **options: stack.enter_context(small_loader(source, **options))


def photo(index: int, camera: int) -> np.ndarray:
    """Something that a codec changes a little: waves with noise, uint8 [40, 56, 3]."""
    y, x = np.mgrid[:40, :56]
    waves = np.stack([np.sin(x / 6 + index) + np.cos(y / (5 + c) + camera) for c in range(3)], 2)
    noise = np.random.default_rng([index, camera]).normal(0, 4, waves.shape)
    return (waves * 50 + noise + 128).clip(0, 255).astype(np.uint8)


def samples(loader: Loader, count: int) -> list[list[int]]:
    return [next(loader).sample.tolist() for _ in range(count)]


# ---- order


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 2), (1, 6), (2, 1), (2, 3), (3, 1), (3, 2), (6, 1)])
def test_global_batches_are_the_same_for_any_ranks(load, ranks: int, accumulation: int) -> None:
    microbatch = 6 // (ranks * accumulation)
    loaders = [load(microbatch=microbatch, rank=rank, ranks=ranks, windows={}, cameras=[]) for rank in range(ranks)]
    for expected in GLOBAL_BATCHES:
        union = [sample for _ in range(accumulation) for loader in loaders for sample in next(loader).sample.tolist()]
        assert union == expected


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (3, 1), (8, 4)])
def test_one_order_for_any_ranks_and_workers(load, ranks: int, workers: int) -> None:
    """The first 24 samples, in a global batch larger than the set."""
    options = {"microbatch": 24 // ranks, "ranks": ranks, "workers": workers, "windows": {}, "cameras": []}
    drawn = [next(load(rank=rank, **options)).sample.tolist() for rank in range(ranks)]
    assert sum(drawn, []) == sum(GLOBAL_BATCHES, [])


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_workers_and_prefetch_change_nothing(load, workers: int, prefetch: int) -> None:
    loader = load(microbatch=6, workers=workers, prefetch=prefetch)
    assert samples(loader, 4) == GLOBAL_BATCHES


def test_epoch_and_position_key_each_sample(load) -> None:
    loader = load(microbatch=6)
    got = [next(loader) for _ in range(3)]
    assert torch.cat([batch.epoch for batch in got]).tolist() == [0] * 15 + [1] * 3
    assert torch.cat([batch.position for batch in got]).tolist() == [*range(15), 0, 1, 2]


def test_no_repeats_within_an_epoch(load, make_dataset, tmp_path: Path) -> None:
    """Ten samples in four shards, batches of three."""
    reader = ShardReader(make_shards(make_dataset((3, 3, 2, 2)), tmp_path / "shards", samples_per_shard=2))
    assert [shard.samples for shard in reader.manifest.shards] == [3, 3, 2, 2]
    seen = sum(samples(load(reader), 10), [])
    assert [sorted(seen[epoch * 10 : epoch * 10 + 10]) for epoch in range(3)] == [list(range(10))] * 3


@pytest.mark.parametrize(("lengths", "ranks", "microbatch"), [((5, 3, 2), 8, 2), ((5, 3, 2), 2, 2), ((1,), 4, 3)])
def test_ranks_get_equal_batches(load, make_dataset, tmp_path: Path, lengths, ranks, microbatch) -> None:
    """Few, unequal shards: every rank gets as many batches of the same size, for as long as it asks."""
    reader = ShardReader(make_shards(make_dataset(lengths), tmp_path / "shards", samples_per_shard=1))
    assert [shard.samples for shard in reader.manifest.shards] == list(lengths)
    loaders = [load(reader, rank=rank, ranks=ranks, microbatch=microbatch) for rank in range(ranks)]
    drawn = [next(loader).sample.tolist() for _ in range(6) for loader in loaders]
    assert {len(batch) for batch in drawn} == {microbatch}
    flat = sum(drawn, [])
    whole = len(flat) // len(reader) * len(reader)
    assert len(reader) * [whole // len(reader)] == np.bincount(flat[:whole], minlength=len(reader)).tolist()


def test_batch_larger_than_the_dataset(load) -> None:
    """It holds whole epochs, one after another, and the start of the next."""
    batch = next(load(microbatch=40))
    assert batch.epoch.tolist() == [0] * 15 + [1] * 15 + [2] * 10
    assert sorted(batch.sample[:15].tolist()) == sorted(batch.sample[15:30].tolist()) == list(range(15))
    assert batch.images["image"].shape == (40, 32, 32, 3)


def test_a_subset_is_permuted_by_itself(load, reader: ShardReader) -> None:
    ids = np.flatnonzero(reader.episode != 1)
    drawn = sum(samples(load(samples=ids, microbatch=11), 2), [])
    assert sorted(drawn[:11]) == sorted(drawn[11:]) == ids.tolist()
    assert drawn[:11] == ids[Stream(11, 0).at(0, 11)[2]].tolist()


# ---- values


@pytest.mark.parametrize("codec", ["png", "jpeg"])
def test_every_sample_equals_lerobot(make_dataset, tmp_path: Path, codec: str) -> None:
    dataset = make_dataset(picture=photo)
    deltas = CHUNK | {"observation.state": [-1, 0]}
    theirs = LeRobotDataset(
        "test/dataset",
        root=dataset,
        delta_timestamps={key: [delta / FPS for delta in distances] for key, distances in deltas.items()},
    )
    reader = ShardReader(make_shards(dataset, tmp_path / codec, codec=codec))
    squares, values = 0.0, 0
    for batch in batches(reader, None, deltas, None, microbatch=4):
        for row, index in enumerate(batch.index.tolist()):
            item = theirs[index]
            for key in deltas:
                assert torch.equal(batch.columns[key][row], item[key])
                assert torch.equal(batch.is_pad[key][row], item[f"{key}_is_pad"])
            assert batch.timestamp[row] == item["timestamp"]
            assert (batch.episode[row], batch.frame[row]) == (item["episode_index"], item["frame_index"])
            assert reader.manifest.tasks[batch.task[row]] == item["task"]
            for camera in reader.manifest.cameras:
                original = (item[camera.key] * 255).round().permute(1, 2, 0)
                difference = batch.images[camera.name][row].float() - original
                squares, values = squares + difference.square().sum().item(), values + difference.numel()
    psnr = 10 * math.log10(255**2 * values / squares) if squares else math.inf
    print(f"{codec}: PSNR {psnr:.1f} dB")
    assert psnr == math.inf if codec == "png" else 35 < psnr < 50


def test_images_are_those_of_their_samples(load) -> None:
    loader = load(microbatch=5)
    for _ in range(5):
        batch = next(loader)
        for row, sample in enumerate(batch.sample.tolist()):
            assert read_number(batch.images["image"][row].numpy()) == sample
            assert read_number(batch.images["image2"][row].numpy()) == sample + CAMERA_STRIDE


def test_only_the_cameras_asked_for(load) -> None:
    assert list(next(load(cameras=["image2"])).images) == ["image2"]
    batch = next(load(cameras=[]))
    assert batch.images == {} and batch.columns["action"].shape == (3, 7, 2)


def test_each_sample_once_for_evaluation(reader: ShardReader) -> None:
    ids = [9, 2, 14, 0, 7]
    got = list(batches(reader, ids, CHUNK, None, microbatch=2))
    assert [batch.sample.tolist() for batch in got] == [[9, 2], [14, 0], [7]]
    assert [batch.position.tolist() for batch in got] == [[0, 1], [2, 3], [4]]
    assert got[2].images["image"].shape == (1, 32, 32, 3)
    assert list(batches(reader, [], CHUNK, None, microbatch=2)) == []


def test_transform_runs_in_the_background(load) -> None:
    def transform(batch: Batch) -> dict:
        thread = threading.current_thread()
        return {"doubled": batch.sample * 2, "mean": batch.images["image"].float().mean(), "thread": thread}

    batch = next(load(transform=transform))
    assert batch.extra["doubled"].tolist() == (batch.sample * 2).tolist()
    assert batch.extra["mean"] == batch.images["image"].float().mean()
    assert batch.extra["thread"] is not threading.current_thread()
    moved = batch.to("meta")
    assert moved.extra["doubled"].is_meta and moved.images["image"].is_meta and moved.columns["action"].is_meta


# ---- state


def test_resume_is_exact(load) -> None:
    whole = samples(load(), 12)
    loader = load(prefetch=4)
    assert samples(loader, 7) == whole[:7]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == {"epoch": 1, "position": 6, "samples": 15, "seed": 0}
    resumed = load()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert samples(resumed, 5) == whole[7:]
    loader.load_state_dict(load().state_dict())  # back to the start, on a loader that is running
    assert samples(loader, 2) == whole[:2]


def test_state_counts_what_was_delivered(load) -> None:
    loader = load(prefetch=4)
    assert loader.state_dict()["position"] == 0
    next(loader)
    time.sleep(0.3)  # the queue is full by now
    assert loader.state_dict()["position"] == 3


def test_resume_with_other_ranks_and_microbatch(load) -> None:
    """Two ranks take two batches of three each; three ranks go on with batches of two, then one with six."""
    two = [load(rank=rank, ranks=2) for rank in range(2)]
    assert [sum((samples(loader, 1)[0] for loader in two), []) for _ in range(2)] == GLOBAL_BATCHES[:2]
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1] == {"epoch": 0, "position": 12, "samples": 15, "seed": 0}
    three = [load(rank=rank, ranks=3, microbatch=2) for rank in range(3)]
    for loader in three:
        loader.load_state_dict(states[0])
    assert [samples(loader, 1)[0] for loader in three] == [[3, 10], [6, 12], [0, 9]]
    one = load(microbatch=6)
    one.load_state_dict(three[2].state_dict())
    assert samples(one, 1) == GLOBAL_BATCHES[3:]


def test_resume_reads_no_earlier_sample(load, reader: ShardReader, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = reader.read
    monkeypatch.setattr(reader, "read", lambda ids, cameras: read.append(ids.tolist()) or original(ids, cameras))
    loader = load()
    position = 10_000 * 3
    loader.load_state_dict({"epoch": position // 15, "position": position % 15, "samples": 15, "seed": 0})
    assert next(loader).epoch.tolist() == [2000] * 3
    loader.close()
    expected = [Stream(15, 0).at(position + 3 * k, 3)[2].tolist() for k in range(len(read))]
    assert read == expected and len(read) < 10


def test_state_of_another_order_is_refused(load) -> None:
    state = load().state_dict()
    with pytest.raises(DataError, match="an order with samples 15, this one has samples 4"):
        load(samples=[0, 1, 2, 3]).load_state_dict(state)
    with pytest.raises(DataError, match="an order with seed 0, this one has seed 1"):
        load(seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatch": 0}, "microbatch must be a whole number of at least 1, got 0"),
        ({"microbatch": -2}, "got -2"),
        ({"workers": -1}, "workers must be a whole number of at least 0"),
        ({"prefetch": 0}, "prefetch must be a whole number of at least 1"),
        ({"rank": 2, "ranks": 2}, r"rank 2 of 2 ranks: it must lie in \[0, 2\)"),
        ({"cameras": ["imag2"]}, "camera 'imag2' is not in the shards; did you mean 'image2'"),
        ({"windows": {"actions": [0]}}, "column 'actions' is not in the shards; did you mean 'action'"),
        ({"samples": []}, "at least one sample"),
        ({"samples": [0, 15]}, r"must lie in \[0, 15\)"),
        ({"samples": [3, 3]}, "twice"),
        ({"samples": [0.5]}, "list of sample ids"),
        ({"device": "gpu"}, "decode device 'gpu'"),
    ],
)
def test_bad_arguments_are_refused(load, options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(**options)
