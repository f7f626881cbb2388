"""The record script at tiny size on the CPU: every part, the table, failures and a machine without DALI."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "scripts" / "gpu_record.py"
ABSENT = ("nvidia.dali", "psutil", "rich", "webdataset", "torchdata", "matplotlib")


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_record", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(path, *extra: str) -> list[str]:
    return ["--device", "cpu", "--size", "tiny", "--repeats", "1", "--seconds", "600", "--json", str(path), *extra]


def test_every_part_runs_and_the_table_comes_last(script, tmp_path, capsys):
    assert script.main(arguments(tmp_path / "record.json")) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    policies = ("pi05", "molmoact2", "groot")
    names = ["update, correct", *(f"{p}, correct" for p in policies), *(f"{p}, tiny" for p in policies), "loader"]
    assert list(record["parts"]) == names, "correctness before rates"
    for policy in policies:
        assert record["parts"][f"{policy}, correct"]["gradient"] < 1e-4
        assert record["parts"][f"{policy}, tiny"]["ratio"] > 0
    table = capsys.readouterr().out.rstrip().splitlines()[-len(names) :]
    assert [row[2:20].rstrip() for row in table] == names
    assert record["hardware"]["gpus"] == 0 and record["versions"]["lerobot"] == "0.6.1"


def test_a_part_that_fails_is_recorded_and_the_rest_goes_on(script, tmp_path, monkeypatch):
    def broken(policy, _):
        raise RuntimeError(f"no {policy}")

    monkeypatch.setattr(script, "step_correctness", broken)
    monkeypatch.setattr(script, "step_rates", lambda policy, _: {"line": "fine"})
    assert script.main(arguments(tmp_path / "record.json", "--policies", "pi05")) == 1
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert parts["pi05, correct"]["error"] == "RuntimeError: no pi05" and parts["pi05, tiny"]["line"] == "fine"


def test_no_part_begins_when_the_time_is_up(script, tmp_path):
    assert script.main([*arguments(tmp_path / "record.json"), "--seconds", "-1"]) == 0
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert parts and all("skipped" in part for part in parts.values())


def test_a_wrong_update_is_found(script, monkeypatch):
    real = script.adamw_reference

    def wrong(*inputs, **settings):
        real(*inputs, **{**settings, "eps": 1e-2})

    monkeypatch.setattr(script, "adamw_reference", wrong)
    with pytest.raises(AssertionError, match="differs from torch's"):
        script.update_correctness("cpu")


def test_a_bare_machine_suffices(tmp_path):
    """Without DALI and the other packages that the step does not need: only the loader part is skipped."""
    block = "".join(f"sys.modules[{name!r}] = None; " for name in ABSENT)
    command = arguments(tmp_path / "record.json", "--policies", "pi05")
    run = f"sys.argv = ['record', *{command!r}]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    code = f"import runpy, sys; {block}{run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert "no DALI" in parts["loader"]["skipped"] and parts["pi05, tiny"]["ratio"] > 0
