"""Windows equal LeRobot's own, in any order of samples, and refuse what would make them wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from tiny_lerobot import FPS
from tiny_shards import make_shards

from dataio.manifest import DataError
from dataio.reader import ShardReader
from dataio.windows import Windows

DELTAS = {"action": [0, 1, 2, 3, 4, 5, 6], "observation.state": [-3, -1, 0]}


@pytest.fixture(scope="module", params=["episode", "shuffled"])
def reader(request, image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    out = tmp_path_factory.mktemp("windows") / request.param
    return ShardReader(make_shards(image_dataset, out, order=request.param))


def test_equal_lerobot_for_every_sample(reader: ShardReader, image_dataset: Path) -> None:
    theirs = LeRobotDataset(
        "test/dataset",
        root=image_dataset,
        delta_timestamps={key: [delta / FPS for delta in deltas] for key, deltas in DELTAS.items()},
    )
    if reader.manifest.order == "shuffled":
        assert reader.index.tolist() != list(range(15))
    columns, is_pad = Windows(reader, DELTAS).gather(np.arange(15))
    assert columns["action"].shape == (15, 7, 2) and columns["observation.state"].shape == (15, 3, 3)
    for sample in range(15):
        item = theirs[int(reader.index[sample])]
        for key in DELTAS:
            assert torch.equal(torch.from_numpy(columns[key][sample]), item[key])
            assert torch.equal(torch.from_numpy(is_pad[key][sample]), item[f"{key}_is_pad"])
        assert item["timestamp"].numpy() == reader.timestamp[sample]
        assert item["episode_index"] == reader.episode[sample] and item["frame_index"] == reader.frame[sample]
        assert item["task"] == reader.manifest.tasks[reader.task[sample]]


def test_literal_pads(make_dataset, tmp_path: Path) -> None:
    """An episode of three frames and a chunk of four: only what lies behind the end is a pad."""
    reader = ShardReader(make_shards(make_dataset((3, 3)), tmp_path / "shards"))
    columns, is_pad = Windows(reader, {"action": [0, 1, 2, 3]}).gather(np.array([0, 2, 3]))
    assert is_pad["action"].astype(int).tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]]
    # The action's second number is the frame in the episode, its first the frame in the dataset.
    assert columns["action"][..., 1].tolist() == [[0, 1, 2, 2], [2, 2, 2, 2], [0, 1, 2, 2]]
    assert columns["action"][..., 0].tolist() == [[0, 1, 2, 2], [2, 2, 2, 2], [3, 4, 5, 5]]


def test_columns_without_a_window_are_single_rows(reader: ShardReader) -> None:
    columns, is_pad = Windows(reader, {}).gather(np.array([3, 3, 0]))
    assert is_pad == {}
    assert columns["action"].tolist() == reader.columns["action"][[3, 3, 0]].tolist()


def test_bad_windows_are_refused(reader: ShardReader) -> None:
    with pytest.raises(DataError, match="column 'actoin' is not in the shards; did you mean 'action'"):
        Windows(reader, {"actoin": [0]})
    for deltas in ([], [0.1], [[0, 1]], ["0"]):
        with pytest.raises(DataError, match="window over 'action': give a list of whole frame distances"):
            Windows(reader, {"action": deltas})  # type: ignore[dict-item]


def test_incomplete_episodes_are_refused(reader: ShardReader) -> None:
    whole = reader.manifest
    try:
        episodes = [msgspec.structs.replace(e, length=e.length + (e.episode == 1)) for e in whole.episodes]
        reader.manifest = msgspec.structs.replace(whole, episodes=episodes)
        with pytest.raises(DataError, match="episode 1 is not whole"):
            Windows(reader, {})
    finally:
        reader.manifest = whole
    reader.frame[reader.index == 12] += 1
    try:
        with pytest.raises(DataError, match="episode 2 is not whole"):
            Windows(reader, {})
    finally:
        reader.frame[reader.index == 12] -= 1
