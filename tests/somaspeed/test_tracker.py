"""Trackers: every series of a run in TensorBoard's own files and at a stub of Weights & Biases, and resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from somaspeed.config import ConfigError
from somaspeed.metrics import PHASES, Tracker, check_tracker
from somaspeed.native.__main__ import main as native_main
from somaspeed.policies.pi05 import PI05
from somaspeed.train import main
from tests.conftest import ROOT

CONFIG = ROOT / "configs" / "pi05" / "somaspeed-tiny.toml"
RECORD = {
    "step": 1, "epoch": 0, "position": 4, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "samples_per_second": 50.0,
    "seconds": dict.fromkeys(PHASES, 0.01), "samples_crc32": 7,
}  # fmt: skip
NAMES = {"loss", "grad_norm", "lr", "samples_per_second", "epoch", *(f"seconds/{phase}" for phase in PHASES)}


class StubWandb:
    """In place of the `wandb` module: one run that remembers what was logged."""

    def __init__(self, error: str = ""):
        self.error, self.logged, self.settings, self.finished = error, [], [], 0
        self.errors = SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.__spec__ = SimpleNamespace()  # found by importlib

    def init(self, **settings):
        if self.error:
            raise self.errors.Error(self.error)
        self.settings.append(settings)
        return SimpleNamespace(id="abc123", log=self.log, finish=self.finish)

    def log(self, scalars, step):
        self.logged.append((step, scalars))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch) -> StubWandb:
    stub = StubWandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def board(output: Path) -> dict[str, list[tuple[int, float]]]:
    """Series by name, read as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def command(sample_dir: Path, output: Path, *extra: str) -> list[str]:
    short = ["training.microbatch=2", "training.log_every=1", "training.save_every=2", "data.held_out=0.15"]
    return ["--config", str(CONFIG), "--shards", str(sample_dir), f"output={output}", *short, *extra]


def test_a_run_and_its_resumption_are_one_series_in_tensorboard(sample_dir, tmp_path):
    run = command(sample_dir, tmp_path / "run", "training.tracker=tensorboard")
    assert main([*run, "training.steps=2"]) == 0
    assert main(["--resume", *run, "training.steps=3"]) == 0
    series = board(tmp_path / "run")
    assert set(series) == NAMES | {"held_out_loss"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm", "lr", "samples_per_second"):
        assert series[name] == [(line["step"], pytest.approx(line[name])) for line in lines], name
    for phase in PHASES:
        expected = [(line["step"], pytest.approx(line["seconds"][phase])) for line in lines]
        assert series[f"seconds/{phase}"] == expected, phase
    held = [(line["step"], pytest.approx(line["held_out_loss"])) for line in lines if "held_out_loss" in line]
    assert series["held_out_loss"] == held and [step for step, _ in held] == [2, 3]


def test_what_is_logged_again_after_a_crash_replaces_what_was(tmp_path):
    first = Tracker("tensorboard", tmp_path, {})
    for step in (1, 2, 3):
        first.write(RECORD | {"step": step, "loss": 9.0})
    first.close()
    again = Tracker("tensorboard", tmp_path, {}, first_step=1)
    again.write(RECORD | {"step": 2, "loss": 1.0})
    again.close()
    assert board(tmp_path)["loss"] == [(1, 9.0), (2, 1.0)]


def test_wandb_gets_the_same_series(tmp_path, wandb):
    tracker = Tracker("wandb", tmp_path, {"output": "x"})
    tracker.write(RECORD)
    tracker.write(RECORD | {"step": 2, "held_out_loss": 1.5})
    tracker.close()
    assert [step for step, _ in wandb.logged] == [1, 2] and wandb.finished == 1
    assert set(wandb.logged[0][1]) == NAMES and wandb.logged[1][1]["held_out_loss"] == 1.5
    assert wandb.settings[0]["config"] == {"output": "x"} and wandb.settings[0]["id"] is None


def test_a_resumed_run_goes_on_with_its_wandb_run(tmp_path, wandb):
    for first_step in (0, 4, 0):
        Tracker("wandb", tmp_path, {}, first_step).close()
    assert [settings["id"] for settings in wandb.settings] == [None, "abc123", None]


def test_wandb_without_a_login_says_what_to_do(tmp_path, wandb):
    wandb.error = "api_key not configured"
    with pytest.raises(ConfigError, match="api_key not configured.*wandb login.*WANDB_MODE=offline"):
        Tracker("wandb", tmp_path, {})


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_weights_are_read(sample_dir, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(PI05, "load", lambda self: pytest.fail("weights were read"))
    monkeypatch.setitem(sys.modules, kind, None)
    assert main(command(sample_dir, tmp_path / "run", f"training.tracker={kind}")) == 2
    assert f"pip install {kind}" in capsys.readouterr().err and not (tmp_path / "run").exists()
    native = ["--config", str(ROOT / "configs" / "pi05" / "native-tiny.toml"), "--dataset", str(tmp_path)]
    assert native_main([*native, f"training.tracker={kind}", f"output={tmp_path / 'run'}"]) == 2
    assert f"pip install {kind}" in capsys.readouterr().err
    check_tracker("none")
