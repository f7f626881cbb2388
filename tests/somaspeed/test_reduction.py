"""The reduction over real gloo ranks: every layout makes the same updates, and the prefix hides it."""

from __future__ import annotations

import pytest

from tests.somaspeed.ranks import on_ranks


def run(ranks: int) -> dict:
    return on_ranks(ranks, "tests.somaspeed.rank_cases:cases")[0].result


@pytest.fixture(scope="module")
def results() -> dict[int, dict]:
    return {ranks: run(ranks) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["unsharded", "sharded", "bf16", "sharded bf16", "hybrid"])
def test_every_layout_makes_the_updates_of_one_rank(results, ranks, layout):
    if layout == "hybrid" and ranks == 2:
        pytest.skip("a hybrid needs four ranks")
    one, found = results[1]["unsharded"], results[ranks][layout]
    tolerance = 2e-2 if "bf16" in layout else 2e-3  # the narrow parameter itself is bf16
    assert found["norms"] == pytest.approx(one["norms"], rel=tolerance)
    assert found["final"] == pytest.approx(one["final"], abs=tolerance)
    assert found["same"], "ranks must end with equal parameters"
    assert found["bytes"] == found["live"], "the arenas times the wire's width, nothing else"
    if "sharded" not in layout or layout == "unsharded":
        aligned = 2 * 64 * (1 if layout != "hybrid" else 2)  # two parameters of 50, on 64-element boundaries
        assert found["bytes"] == aligned * (2 if "bf16" in layout else 4)


def test_ranks_that_do_not_share_gradients_are_noticed(results):
    assert not results[2]["skipped"]["same"]


def test_the_norm_is_global(results):
    assert results[2]["norms"] == [5.0, 5.0]


def test_the_prefix_hides_a_slow_link(results):
    """Compute 0.2 s, link 0.2 s: overlapped a step takes little more than either, awaited at once nearly both."""
    assert results[2]["hidden"] <= 1.25, results[2]["hidden"]
    assert results[2]["awaited"] >= 1.6, results[2]["awaited"]
