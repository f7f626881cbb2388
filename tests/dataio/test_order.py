"""The global order: literal numbers, bijections, evenness, and access that costs nothing at any size."""

from __future__ import annotations

import collections
import time

import numpy as np
import pytest

from dataio.manifest import DataError
from dataio.order import Order, Stream


def test_literal_order() -> None:
    """A change of these numbers breaks resuming every run that was saved before it."""
    ten = np.arange(10)
    assert Order(10, 0).at(0, ten).tolist() == [2, 3, 8, 7, 4, 9, 6, 1, 5, 0]
    assert Order(10, 0).at(1, ten).tolist() == [1, 0, 9, 7, 5, 2, 4, 8, 6, 3]
    assert Order(10, 1).at(0, ten).tolist() == [0, 8, 7, 4, 1, 2, 3, 6, 9, 5]
    places = np.array([0, 1, 2, 49_999_999])
    assert Order(50_000_000, 7).at(3, places).tolist() == [28595266, 18681008, 44652292, 38364911]


@pytest.mark.parametrize("samples", [*range(1, 70), 255, 256, 257, 1000, 1024, 1025, 65537])
def test_every_epoch_is_a_permutation(samples: int) -> None:
    for epoch in (0, 1, 1000):
        assert sorted(Order(samples, 3).at(epoch, np.arange(samples)).tolist()) == list(range(samples))


def test_positions_may_come_in_any_order_and_number() -> None:
    whole = Order(1000, 5).at(2, np.arange(1000))
    some = np.array([999, 0, 512, 512])
    assert Order(1000, 5).at(2, some).tolist() == whole[some].tolist()
    assert Order(1000, 5).at(2, np.array([], np.int64)).size == 0


def test_all_orders_of_a_small_set_are_equally_likely() -> None:
    counts = collections.Counter(tuple(Order(4, 0).at(epoch, np.arange(4)).tolist()) for epoch in range(3_000))
    assert len(counts) == 24
    # 125 expected, standard deviation 11.
    assert 80 < min(counts.values()) and max(counts.values()) < 170


def test_large_sets_are_well_mixed() -> None:
    order = np.stack([Order(1000, 0).at(epoch, np.arange(1000)) for epoch in range(200)])
    counts = np.histogram2d(np.tile(np.arange(1000), 200) // 50, order.ravel() // 50, bins=20)[0]
    chi_squared = ((counts - 500) ** 2 / 500).sum() / 361  # per degree of freedom; 1 ± 0.07
    assert 0.7 < chi_squared < 1.3
    neighbours = (np.abs(np.diff(order, axis=1)) <= 5).mean()  # 1 % by chance
    assert 0.008 < neighbours < 0.012
    assert (order[0] == order[1]).sum() < 10
    assert (Order(1000, 1).at(0, np.arange(1000)) == order[0]).sum() < 10


def test_access_to_fifty_million_samples_is_immediate() -> None:
    stream = Stream(50_000_000, 1)
    started = time.perf_counter()
    for step in range(20):
        sample = stream.at(step * 2_345_678_901, 256)[2]
        assert len(set(sample.tolist())) == 256
    assert time.perf_counter() - started < 2


def test_stream_goes_on_over_the_ends_of_epochs() -> None:
    epoch, position, sample = Stream(5, 3).at(start=3, count=9)
    assert epoch.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert position.tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert sample.tolist() == [1, 2, 2, 1, 4, 3, 0, 4, 2]


def test_no_samples_are_refused() -> None:
    with pytest.raises(DataError, match="at least one sample"):
        Order(0, 0)
