"""The block-shuffled order: exhaustive, the same at any size, resumed anywhere, and as well shuffled as it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_shards import make_shards, small_loader

from dataio.blocks import BlockStream, describe, neighbours
from dataio.manifest import DataError
from dataio.order import Stream
from dataio.reader import ShardReader

# 15 samples in six shards of 3, 3, 3, 2, 2, 2 under seed 0, two shards in flight.
SIZES = [3, 3, 3, 2, 2, 2]
SHARD = np.repeat(np.arange(6), SIZES)
FIRST_EPOCH = [8, 9, 10, 6, 7, 13, 4, 14, 3, 5, 11, 2, 0, 12, 1]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    from tiny_lerobot import write_dataset

    root = tmp_path_factory.mktemp("blocks")
    return ShardReader(make_shards(write_dataset(root / "source", SIZES), root / "shards", samples_per_shard=1))


def test_literal_order() -> None:
    """Written down once: a change of the order would make every saved position point elsewhere."""
    stream = BlockStream(SHARD, 2, 0)
    assert stream.at(0, 15)[2].tolist() == FIRST_EPOCH
    assert stream.at(15, 15)[2].tolist() != FIRST_EPOCH


@pytest.mark.parametrize("block", [1, 2, 4, 6, 100])
def test_every_epoch_is_exhaustive_and_whole_shards_are_in_flight(block: int) -> None:
    stream = BlockStream(SHARD, block, 3)
    assert stream.blocks == -(-6 // block)
    for epoch in range(4):
        _, position, samples = stream.at(15 * epoch, 15)
        assert sorted(samples.tolist()) == list(range(15)) and position.tolist() == list(range(15))
        seen: list[int] = []
        for start in position.tolist():
            now, ahead, behind = stream.around(epoch, start)
            assert len(now) <= block and SHARD[samples[start]] in now
            seen += [shard for shard in now if shard not in seen]
        assert sorted(seen) == list(range(6))
    assert stream.around(0, 14)[1] == stream.around(1, 0)[0], "the next epoch's first block is fetched ahead"
    assert stream.around(0, 0)[2] == [] and stream.around(1, 0)[2] == stream.around(0, 14)[0]


def test_any_slice_is_that_of_the_whole() -> None:
    stream = BlockStream(SHARD, 2, 0)
    whole = stream.at(0, 100)
    for start, count in [(0, 1), (3, 7), (13, 5), (29, 40), (99, 1)]:
        for part, all_of_it in zip(stream.at(start, count), whole, strict=True):
            assert part.tolist() == all_of_it[start : start + count].tolist()


def test_samples_left_out_leave_the_others_in_their_shards() -> None:
    ids = np.array([0, 2, 7, 8, 13])
    stream = BlockStream(SHARD[ids], 2, 0)
    assert sorted(ids[stream.at(0, 5)[2]].tolist()) == ids.tolist()
    assert set(stream.around(0, 0)[0]) <= {0, 2, 5}


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 1), (3, 4), (8, 2)])
def test_the_same_for_any_ranks_and_workers(reader: ShardReader, ranks: int, workers: int) -> None:
    options = {"block": 2, "windows": {}, "cameras": [], "workers": workers, "microbatch": 24 // ranks, "ranks": ranks}
    loaders = [small_loader(reader, rank=rank, **options) for rank in range(ranks)]
    try:
        drawn = [i for _ in range(2) for loader in loaders for i in next(loader).sample.tolist()]
    finally:
        [loader.close() for loader in loaders]
    assert drawn[:15] == FIRST_EPOCH and drawn == BlockStream(SHARD, 2, 0).at(0, 48)[2].tolist()


def test_resume_is_exact_and_of_this_order_only(reader: ShardReader) -> None:
    options = {"block": 2, "windows": {}, "cameras": []}
    with small_loader(reader, **options) as loader:
        for _ in range(3):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    assert state == {"epoch": 0, "position": 9, "samples": 15, "seed": 0, "block": 2}
    with small_loader(reader, **options, microbatch=6) as resumed:
        resumed.load_state_dict(state)
        assert next(resumed).sample.tolist() == FIRST_EPOCH[9:]
    for other, theirs in [({}, 0), ({"block": 3}, 3)]:
        with pytest.raises(DataError, match=f"of an order with block 2, this one has block {theirs}"):
            small_loader(reader, **(options | {"block": 0} | other)).load_state_dict(state)
    with pytest.raises(DataError, match="block must be"):
        small_loader(reader, block=-1)


def test_shuffle_quality_is_judged_and_said(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """40 episodes of 25 frames: one shard in flight is one episode, all of them are as good as one permutation."""
    dataset = make_dataset([25] * 40, cameras=["image"], size=4)
    reader = ShardReader(make_shards(dataset, tmp_path / "shards", samples_per_shard=25))
    ids = np.arange(1000)
    quality = {block: neighbours(reader, ids, BlockStream(reader.shard_of(ids), block, 0), 20) for block in (1, 10, 40)}
    whole = neighbours(reader, ids, Stream(1000, 0), 20)
    assert quality[1] > 0.9 and 0.3 < quality[10] < 0.8 and quality[40] == pytest.approx(whole, abs=0.06)
    line = describe(reader, ids, 10, 0, 20)
    assert "4 block(s) of 10 shards (250 samples)" in line and f"{quality[10]:.1%} of samples share" in line
