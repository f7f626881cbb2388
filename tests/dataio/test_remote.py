"""Streaming over HTTP: the local batches, lost connections and wrong bytes survived or named, a bounded cache."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_server import Server, serving
from tiny_lerobot import write_dataset
from tiny_shards import make_shards, small_loader

from dataio.blocks import BlockStream
from dataio.loader import batches
from dataio.manifest import DataError
from dataio.reader import ShardReader
from dataio.remote import RemoteShards, open_shards

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight shards of one episode each."""
    root = tmp_path_factory.mktemp("remote")
    return make_shards(write_dataset(root / "source", [3] * 8), root / "shards", samples_per_shard=1, codec="jpeg")


@pytest.fixture
def server(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("dataio.remote.BACKOFF_SECONDS", 0.01)
    shutil.copytree(directory, tmp_path / "served")
    with serving(tmp_path / "served") as running:
        yield running


def bytes_of_tars(cache: Path) -> int:
    total = 0
    for path in cache.rglob("*.tar*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_local_set(directory: Path, server: Server, tmp_path: Path, workers: int) -> None:
    reader = open_shards(server.url, "auto", tmp_path / "cache", PLENTY)
    options = {"block": 2, "microbatch": 5, "workers": workers}
    with small_loader(ShardReader(directory), **options) as local, small_loader(reader, **options) as remote:
        for _ in range(12):
            mine, theirs = next(remote), next(local)
            assert mine.sample.tolist() == theirs.sample.tolist()
            assert torch.equal(mine.images["image2"], theirs.images["image2"])
            assert torch.equal(mine.columns["action"], theirs.columns["action"])
    assert {name: count for name, count in server.delivered.items() if name.endswith(".tar")} == {
        f"{number:06d}.tar": 1 for number in range(8)
    }, "a set that fits is fetched once"
    reader.close()


def test_lost_connections_and_wrong_bytes_are_tried_again(server: Server, tmp_path: Path) -> None:
    server.faults = {"000000.tar": ["drop", "flip"], "000003.index.safetensors": ["drop"], "manifest.json": ["drop"]}
    reader = open_shards(server.url, "auto", tmp_path, PLENTY)
    assert len(list(batches(reader, None, {}, None, microbatch=24))[0]) == 24
    assert server.delivered["000000.tar"] == 3 and server.delivered["000003.index.safetensors"] == 2


@pytest.mark.parametrize(
    ("fault", "reason"), [("drop", "4 attempts; the last: "), ("flip", r"the last: OSError: sha256 \w+…, the man")]
)
def test_what_stays_wrong_is_named(server: Server, tmp_path: Path, fault: str, reason: str) -> None:
    server.faults = {"000005.tar": [fault] * 99}
    reader = open_shards(server.url, "auto", tmp_path, PLENTY)
    with small_loader(reader, block=8) as loader:
        with pytest.raises(DataError, match=rf"stage 'read': {server.url}/000005\.tar: not delivered .*{reason}"):
            [next(loader) for _ in range(9)]
    assert server.delivered["000005.tar"] % 4 == 0
    assert not [path for path in tmp_path.rglob("*") if ".partial" in path.name]


def test_what_is_not_there_is_named(server: Server, tmp_path: Path) -> None:
    (server.directory / "000002.tar").unlink()
    reader = open_shards(server.url, "auto", tmp_path, PLENTY)
    with pytest.raises(DataError, match=r"000002\.tar: not there"):
        list(batches(reader, None, {}, None, microbatch=24))
    with pytest.raises(DataError, match=r"nowhere/manifest\.json: not there"):
        open_shards(f"{server.url}/nowhere", "auto", tmp_path, PLENTY)
    with pytest.raises(DataError, match="cannot be opened"):
        open_shards("htp://example.org/shards", "auto", tmp_path, PLENTY)


def test_a_tar_that_arrives_while_it_is_looked_for(server: Server, tmp_path: Path, monkeypatch) -> None:
    """It is there in whichever of its looks the cache first finds it."""
    reader = RemoteShards(server.url, tmp_path / "cache", PLENTY)
    tar, exists = reader._cache.get(3), Path.exists
    for unseen in range(3):
        looks = iter([False] * unseen)
        monkeypatch.setattr(Path, "exists", lambda path, looks=looks: next(looks, exists(path)))
        assert reader._cache.get(3) == tar
    monkeypatch.undo()
    reader.close()


def test_the_cache_is_bounded_and_fetches_ahead(server: Server, tmp_path: Path) -> None:
    size = max(path.stat().st_size for path in server.directory.glob("*.tar"))
    cache = tmp_path / "cache"
    reader = RemoteShards(server.url, cache, 6 * size)
    largest = 0
    with small_loader(reader, block=2, workers=1) as loader:
        next(loader)
        for _ in range(40):
            next(loader)
            largest = max(largest, bytes_of_tars(cache))
    assert 3 * size < largest <= 6 * size
    fetched = sum(count for name, count in server.delivered.items() if name.endswith(".tar"))
    assert fetched > 8, "five epochs do not fit"
    with small_loader(reader, block=3, workers=1) as loader, pytest.raises(DataError, match="shards in flight have"):
        [next(loader) for _ in range(8)]
    reader.close()


def test_resume_fetches_no_earlier_shard(server: Server, tmp_path: Path) -> None:
    reader = RemoteShards(server.url, tmp_path, PLENTY)
    shard = reader.shard_of(np.arange(24))
    now, ahead, _ = BlockStream(shard, 2, 0).around(0, 14)
    with small_loader(reader, block=2) as loader:
        loader.load_state_dict({"epoch": 0, "position": 14, "samples": 24, "seed": 0, "block": 2})
        batch = next(loader)
    assert batch.sample.tolist() == BlockStream(shard, 2, 0).at(14, 3)[2].tolist()
    reader.close()
    fetched = {int(name[:6]) for name in server.delivered if name.endswith(".tar")}
    following = BlockStream(shard, 2, 0).around(0, 20)[1]
    assert fetched <= {*now, *ahead, *following} and len(fetched) <= 6


def test_a_changed_set_is_not_served_from_the_cache(server: Server, tmp_path: Path, make_dataset) -> None:
    first = RemoteShards(server.url, tmp_path / "cache", PLENTY)
    assert len(list(batches(first, None, {}, None, microbatch=24))) == 1
    other = make_shards(make_dataset((4, 2)), tmp_path / "other", samples_per_shard=1)
    shutil.rmtree(server.directory)
    shutil.copytree(other, server.directory)
    second = RemoteShards(server.url, tmp_path / "cache", PLENTY)
    (batch,) = batches(second, None, {}, None, microbatch=6)
    assert batch.sample.tolist() == list(range(6)) and batch.images["image"].shape == (6, 32, 32, 3)


def test_errors_name_the_url(server: Server, tmp_path: Path) -> None:
    reader = RemoteShards(server.url, tmp_path, PLENTY)
    assert reader.locate(4).startswith(f"{server.url}/000001.tar, sample 00000004")
