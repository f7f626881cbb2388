"""The benchmark documents: counted FLOPs against the known ones, and the step's keys and differences."""

from __future__ import annotations

import json

import pytest

from somaspeed.bench.cli import main


def document(tmp_path, *arguments: str) -> dict:
    path = tmp_path / "out.json"
    assert main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_pi05_flops_are_the_counted_ones(tmp_path):
    found = document(tmp_path, "flops", "--policy", "pi05")
    assert (found["parameters"], found["trainable_parameters"]) == (4_143_404_816, 693_422_112)
    assert found["native"] == pytest.approx(16.7, abs=0.05)
    assert [round(value, 1) for value in found["native_variants"].values()] == [16.7, 12.2, 8.7, 6.3]
    assert found["somaspeed"] <= 2.76 and found["somaspeed_cached"] <= 0.12
    split = found["somaspeed_split"]
    assert sum(split.values()) == pytest.approx(found["somaspeed"])


@pytest.mark.parametrize("cached", [[], ["--cached"]])
def test_pi05_step_is_faster_and_equal(tmp_path, cached):
    found = document(tmp_path, "step", "--policy", "pi05", "--size", "tiny", "--repeats", "3", *cached)
    assert found["loss_difference"] <= 1e-5 and found["gradient_difference"] <= 1e-5
    assert found["ratio"] == pytest.approx(
        found["native"]["seconds_per_sample"] / found["somaspeed"]["seconds_per_sample"]
    )
    assert found["ratio"] > 2, "a generous floor: the tiny size is mostly overhead"
    assert found["device"] == "cpu" and found["policy"] == "pi05" and found["batch"] == 2
