"""What all tests share: the shipped sample, small configurations, and the `gpu` and `sim` markers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest  # noqa: E402 (the hub reads its environment when it is imported)
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "shards" / "libero_spatial_sample"


SIMULATOR = ROOT / ".venv-sim" / "bin" / "python"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "sim" in item.keywords and not SIMULATOR.exists():
            item.add_marker(pytest.mark.skip(reason="no simulator; make sim installs it"))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sample_dir() -> Path:
    return SAMPLE


@pytest.fixture(scope="session")
def sample() -> Any:
    from dataio.reader import ShardReader

    return ShardReader(SAMPLE)
