"""Held-out episodes: whole ones, the same every time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tiny_shards import make_shards

from dataio.manifest import DataError
from dataio.reader import ShardReader
from dataio.split import split_episodes


@pytest.fixture(scope="module")
def reader(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    return ShardReader(make_shards(image_dataset, tmp_path_factory.mktemp("split") / "shards", order="shuffled"))


def test_whole_episodes_are_held_out(reader: ShardReader) -> None:
    for seed in range(10):
        train, held_out = split_episodes(reader, 1, seed)
        assert sorted([*train, *held_out]) == list(range(15))
        assert len(set(reader.episode[held_out])) == 1
        assert not set(reader.episode[held_out]) & set(reader.episode[train])
    assert len({int(reader.episode[split_episodes(reader, 1, seed)[1][0]]) for seed in range(10)}) > 1


def test_the_choice_is_fixed(reader: ShardReader) -> None:
    chosen = [int(reader.episode[split_episodes(reader, 1, seed)[1][0]]) for seed in range(6)]
    assert chosen == [0, 0, 1, 0, 1, 2]


def test_fractions_and_none(reader: ShardReader) -> None:
    for held_out, episodes in ((0, 0), (0.0, 0), (0.01, 1), (0.5, 2), (0.66, 2), (2, 2)):
        assert len(set(reader.episode[split_episodes(reader, held_out, 0)[1]])) == episodes


def test_an_episode_that_goes_moves_no_other(reader: ShardReader) -> None:
    """The order of the draws of the episodes that stay is the same, so the held-out ones stay held out."""
    train, held_out = split_episodes(reader, 1, 0)
    gone = int(reader.episode[train[0]])
    whole = reader.manifest
    try:
        reader.manifest = msgspec.structs.replace(
            whole, episodes=[episode for episode in whole.episodes if episode.episode != gone]
        )
        assert np.array_equal(split_episodes(reader, 1, 0)[1], held_out)
    finally:
        reader.manifest = whole


@pytest.mark.parametrize("held_out", [3, 0.99, -1, True, "1"])
def test_bad_numbers_are_refused(reader: ShardReader, held_out) -> None:
    with pytest.raises(DataError, match="held_out"):
        split_episodes(reader, held_out, 0)
