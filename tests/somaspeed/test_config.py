"""Configuration errors name the key, the place and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from somaspeed.config import ConfigError, load_config, parse_config, to_builtins
from tests.somaspeed.cases import tiny_config

GOOD = """
output = "runs/x"
[model]
name = "pi05"
size = "tiny"
empty_cameras = 1
[training]
steps = 10
microbatch = 4
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def test_sections_defaults_and_the_policys_own_keys(good):
    config = load_config(good)
    assert config.training.lr == 2.5e-5 and config.training.betas == (0.9, 0.95)
    assert config.model.options == {"empty_cameras": 1}
    assert parse_config(to_builtins(config), "again") == config


def test_overrides(good):
    config = load_config(good, ["training.steps=7", "model.path=some/where", "training.betas=[0.8, 0.9]"])
    assert (config.training.steps, config.model.path, config.training.betas) == (7, "some/where", (0.8, 0.9))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=3", r"unknown key 'training.stepz'; did you mean 'steps'"),
        ("trainin.steps=3", r"unknown key 'trainin'; did you mean 'training'"),
        ("training.steps=many", r"Expected `int`, got `str` - at `training.steps`"),
        ("training.microbatch=-2", r"`int` >= 1 - at `training.microbatch`"),
        ("model.dtype=float16", r"float16.*model.dtype"),
        ("training.lr=nan.5", r"training.lr"),
        ("training.steps", r"expected section.key=value"),
        ("output.x=3", r"'output' is a value, not a section"),
    ],
)
def test_mistakes_are_named(good, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(good, [override])


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)
    broken.write_text('output = "x"\n[model]\nname = "pi05"\n')
    with pytest.raises(ConfigError, match="missing key `training`"):
        load_config(broken)


def test_global_batch_must_divide_and_the_nearest_is_named():
    assert tiny_config(training={"global_batch": 16}).accumulation(2) == 2
    with pytest.raises(ConfigError, match=r"4 × 2 = 8. The nearest that is: 16"):
        tiny_config(training={"global_batch": 14}).accumulation(2)
    with pytest.raises(ConfigError, match="nearest that is: 8"):
        tiny_config(training={"global_batch": 3}).accumulation(2)
