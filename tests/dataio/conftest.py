"""Fixtures: small LeRobot datasets made by `tiny_lerobot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tiny_lerobot import write_dataset


@pytest.fixture(scope="session")
def image_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image kind: 15 frames in episodes of 5, 4, 6; cameras `image`, `image2`, 32 x 32. Do not modify."""
    return write_dataset(tmp_path_factory.mktemp("image_dataset") / "tiny_images")


@pytest.fixture(scope="session")
def video_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Video kind (h264): as `image_dataset`, 64 x 64. Do not modify."""
    return write_dataset(tmp_path_factory.mktemp("video_dataset") / "tiny_videos", video=True, size=64)


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Path]:
    """`make_dataset(lengths, **options)` writes a dataset of the test's own, see `write_dataset`."""

    def make(lengths: Sequence[int] = (5, 4, 6), name: str = "dataset", **options) -> Path:
        return write_dataset(tmp_path / name, lengths, **options)

    return make
