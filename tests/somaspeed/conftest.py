"""Fixtures of the training side."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dataio.reader import ShardReader
from somaspeed.policies.base import Policy
from tests.somaspeed.cases import loaded_policy, tiny_config


@pytest.fixture
def make_policy(sample: ShardReader) -> Callable[..., Policy]:
    return lambda **sections: loaded_policy(tiny_config(**sections), sample)
