"""Evaluation during training: what is evaluated when, what is kept, and that training does not depend on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from somaspeed.config import EvaluateConfig
from somaspeed.evaluate import during
from somaspeed.evaluate.during import Evaluations, describe
from somaspeed.sim.pool import ENVIRONMENT
from somaspeed.train import main
from tests.somaspeed.test_train import command, lines

STUB = """\
import json, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert (pathlib.Path(given["--checkpoint"]) / "model.safetensors").stat().st_size > 0
print(json.dumps(given))
if given["--tasks"] == "9":
    sys.exit("somaspeed-eval: error: task 9 is not there")
while given["--first-init"] == "7" and not pathlib.Path(given["--output"]).with_name("go").exists():
    time.sleep(0.02)
result = {"success_rate": 0.5, "interval": [0.1, 0.9], "successes": 1, "episodes": 2, "tasks": []}
pathlib.Path(given["--json"]).write_text(json.dumps(result))
"""


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation's command, without a simulator."""
    script = tmp_path / "stub.py"
    script.write_text(STUB)
    monkeypatch.setattr(during, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setenv(ENVIRONMENT, sys.executable)


def evaluations(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]


def test_checkpoints_are_evaluated_while_training_goes_on(sample_dir: Path, tmp_path: Path, capsys) -> None:
    """Also those that training removes; losses are those of a run without evaluation."""
    common = ("training.steps=6", "data.held_out=0.0", "training.log_every=1", "training.keep_checkpoints=1")
    wanted = ("evaluate.every=2", "evaluate.episodes=3", "evaluate.tasks=0,1")
    assert main(command(sample_dir, tmp_path / "with", *common, *wanted)) == 0
    assert main(command(sample_dir, tmp_path / "without", *common)) == 0
    found = evaluations(tmp_path / "with")
    expected = {"success_rate": 0.5, "interval": [0.1, 0.9], "successes": 1, "episodes": 2}
    assert found == [{"step": step} | expected for step in (2, 4, 6)]
    assert "success of step 4: 50% (1 of 2, 95 % interval 10% – 90%)" in capsys.readouterr().out
    asked = json.loads((tmp_path / "with/evaluations/000002/log.txt").read_text())
    assert asked["--episodes"] == "3" and asked["--tasks"] == "0,1" and "--device" not in asked
    assert not list((tmp_path / "with").glob("evaluations/*/pretrained_model")), "weights are let go of"
    assert [x["loss"] for x in lines(tmp_path / "with")] == [x["loss"] for x in lines(tmp_path / "without")]
    assert not (tmp_path / "without/evaluations").exists()


def test_a_failed_evaluation_is_recorded_and_training_goes_on(sample_dir: Path, tmp_path: Path, capsys) -> None:
    wanted = ("training.steps=2", "evaluate.every=2", "evaluate.tasks=9")
    assert main(command(sample_dir, tmp_path / "out", *wanted)) == 0
    assert evaluations(tmp_path / "out") == [{"step": 2, "error": "somaspeed-eval: error: task 9 is not there"}]
    assert "evaluation of step 2 failed: somaspeed-eval: error: task 9 is not there" in capsys.readouterr().out


def test_without_a_simulator_nothing_starts(sample_dir: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "none"))
    assert main(command(sample_dir, tmp_path / "out", "evaluate.every=2")) == 2
    assert "evaluate.every = 2: no simulator at" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_an_interrupted_run_left_is_gone_on_with(tmp_path: Path) -> None:
    pretrained = tmp_path / "pretrained_model"
    pretrained.mkdir()
    (pretrained / "model.safetensors").write_bytes(b"weights")
    settings = EvaluateConfig(every=5, first_init=7)
    first = Evaluations(settings, tmp_path / "run")
    assert [step for step in range(12) if first.due(step)] == [5, 10]
    first.submit(5, pretrained)
    first.submit(10, pretrained)
    (pretrained / "model.safetensors").unlink()
    assert first.poll() == [], "the first waits, and the second waits for it"
    first.stop()
    second = Evaluations(settings, tmp_path / "run")
    second.resume()
    for step in (5, 10):
        (second.place(step) / "go").touch()
    assert [describe(line) for line in second.finish()] == [
        f"success of step {step}: 50% (1 of 2, 95 % interval 10% – 90%)" for step in (5, 10)
    ]
    assert second.waiting == Evaluations(settings, tmp_path / "run").waiting
