"""Documents, their derived figures, and the comparison and scaling commands that write them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from somaspeed.bench import compare, hardware, scaling
from somaspeed.bench.cli import main
from somaspeed.bench.documents import Comparisons, Phase, derived, read_document
from somaspeed.bench.launch import Job, execute, read_results, reason, run_phase
from somaspeed.config import load_config
from somaspeed.metrics import Summary
from tests.conftest import ROOT

REFERENCE = ROOT / "tests" / "reference"
COMPARISONS, SCALING = REFERENCE / "comparisons.json", REFERENCE / "scaling.json"
POLICIES = ("molmoact2", "groot", "pi05")


def missing_keys(expected, found, where: str = "") -> list[str]:
    """Keys of `expected`, recursively, that `found` lacks; every item of a list is compared with the first expected."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return [f"{where}: not an object"]
        return [
            problem
            for key, value in expected.items()
            for problem in (missing_keys(value, found[key], f"{where}.{key}") if key in found else [f"{where}.{key}"])
        ]
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        return [problem for n, item in enumerate(found) for problem in missing_keys(expected[0], item, f"{where}[{n}]")]
    return []


def test_the_tree_walk_finds_what_is_missing():
    assert missing_keys({"a": {"b": 1}, "c": [{"d": 1}]}, {"a": {}, "c": [{"d": 1}, {}]}) == [".a.b", ".c[1].d"]


@pytest.mark.parametrize("path", [COMPARISONS, SCALING])
def test_published_documents_are_reproduced(path, capsys):
    assert main(["verify", str(path)]) == 0
    assert "largest relative deviation" in capsys.readouterr().out
    figures = list(derived(read_document(path)))
    names = {figure.where.rpartition(".")[2] for figure in figures}
    wanted = {"speedup", "samples_per_second_steady"} if path is COMPARISONS else {"efficiency_percent"}
    assert wanted <= names and len(figures) >= 18
    assert all(figure.deviation <= 1e-9 for figure in figures)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (COMPARISONS, lambda d: d["comparisons"][0].update(speedup=9.3083768)),
        (COMPARISONS, lambda d: d["comparisons"][1]["native"]["summary"].update(samples_per_second_steady=86.54)),
        (COMPARISONS, lambda d: d["comparisons"][2]["somaspeed"].update(measured_samples=734209)),
        (COMPARISONS, lambda d: d["comparisons"][2].update(speedup=None)),
        (SCALING, lambda d: d["models"]["pi05"][1].update(efficiency_percent=91.4962713)),
        (SCALING, lambda d: d["models"].update(groot=[], molmoact2=[], pi05=[])),
    ],
)
def test_a_changed_figure_is_found(path, change, tmp_path):
    document = json.loads(path.read_text())
    change(document)
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(document))
    assert main(["verify", str(path), str(changed)]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "neither a comparison"),
        ('{"comparisons": []}', "hardware"),
        ('{"models": {"pi05": [{}]}, "system": "", "task": "", "measurement": ""}', "$.models[...][0]"),
    ],
)
def test_what_is_no_document_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    assert main(["verify", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "none.json")]) == 2


def test_the_link_matrix_is_read():
    topology = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV4\tSYS\t0-23\t0\nGPU1\tNV4\t X \tPXB\t0-23\t0\nNIC0\tSYS\tPXB\t X\n\nLegend:\n  X    = Self\n"
    )
    assert hardware.parse_links(topology, 2) == [["X", "NV4"], ["NV4", "X"]]
    assert hardware.parse_links(topology, 1) == [["X"]] == hardware.parse_links("no devices", 4)


def test_nothing_of_a_phase_outlives_it(tmp_path):
    """A child that the phase leaves behind is in its process group and is killed with it."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.exit(3)"
    log = tmp_path / "log"
    assert execute([sys.executable, "-c", code], log, 30) == (3, False)
    child = log.read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True).stdout.strip()
    assert state == "" or state.startswith("Z")


def test_a_phase_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("somaspeed.bench.launch.LEAST_GRACE_SECONDS", 0.2)
    status, timed_out = execute([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 0.3)
    assert timed_out and status == -signal.SIGTERM


@pytest.mark.parametrize(
    ("status", "log", "expected"),
    [
        (2, "noise\nsomaspeed.native: error: no meta/info.json\nmore", "somaspeed.native: error: no meta/info.json"),
        (1, "Traceback\nImportError: 'peft' is required\n\n", "ImportError: 'peft' is required"),
        (1, "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried …\nE1 failed", "out of memory: [rank0]: torch"),
        (-9, "step 1\n", "ended by SIGKILL (the system may be out of memory)"),
        (1, "[rank1]: KeyError: 'x'\ntorch.distributed.…errors.ChildFailedError: \n===", "[rank1]: KeyError: 'x'"),
        (7, "", "exit status 7: no output"),
    ],
)
def test_the_reason_of_a_failure_is_found(status, log, expected, tmp_path):
    (tmp_path / "log").write_text(log)
    assert reason(status, tmp_path / "log").startswith(expected)


@pytest.mark.parametrize("code", ["import torch; torch.empty(1 << 50)", "bytearray(1 << 50)"])
def test_memory_that_is_not_there_is_named(code, tmp_path):
    status, _ = execute([sys.executable, "-c", code], tmp_path / "log", 60)
    assert status == 1 and reason(status, tmp_path / "log").startswith("out of memory: ")


def write_run(job: Job, rate: float, steps: int = 25) -> None:
    """The files that a run of `job` would leave."""
    batch = job.config.training.microbatch * job.world
    job.output.mkdir(parents=True, exist_ok=True)
    summary = Summary(
        completed_steps=steps, target_steps=1000, setup_seconds=3.0, setup_peak_allocated_gib=1.0, wall_seconds=30.0,
        samples_per_second_end_to_end=steps * batch / 30.0, samples_per_second_steady=rate, measured_steps=steps - 5,
        bounded_early_stop=True, stop_reason="time_limit", peak_allocated_gib=2.0,
    )  # fmt: skip
    raw = msgspec.to_builtins(summary) | {"parameters": 10, "trainable_parameters": 3, "skipped_updates": 1}
    (job.output / "summary.json").write_text(json.dumps(raw))
    lines = [{"step": n, "loss": 1 / n, "seconds": {"data_wait": 0.1, "update": 0.01 * n}} for n in range(1, steps + 1)]
    (job.output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class FakeRuns:
    """In place of `run_phase`: runs that end at once, at given rates or with an error."""

    def __init__(self, rates: dict[str, float | str]):
        self.rates, self.jobs = rates, []

    def __call__(self, job: Job) -> Phase:
        self.jobs.append(job)
        name = f"{job.output.parent.name}/{job.output.name}"
        result = self.rates.get(name, self.rates.get(job.output.name, 4.0))
        phase = Phase(
            config=job.config_name, backend=job.config.backend, microbatch_per_gpu=job.config.training.microbatch,
            global_batch=job.config.training.microbatch * job.world, gradient_accumulation=1, summary=None,
            finite_loss_updates=None, measured_samples=None, measured_seconds=None, peak_allocated_gib=None,
            variant=job.variant, command=job.command("python"),
        )  # fmt: skip
        if isinstance(result, str):
            phase.error = result
        else:
            write_run(job, result)
            read_results(job, phase)
        return phase


@pytest.fixture
def fake(monkeypatch):
    def install(**rates):
        runs = FakeRuns(rates)
        monkeypatch.setattr(compare, "run_phase", runs)
        monkeypatch.setattr(scaling, "run_phase", runs)
        return runs

    return install


def arguments(out: Path, sample_dir: Path, *extra: str) -> list[str]:
    dataset = out.parent / "dataset"
    (dataset / "meta").mkdir(parents=True, exist_ok=True)
    (dataset / "meta" / "info.json").touch()
    options = ["--configs", str(ROOT / "configs"), "--configs-suffix", "tiny", "--out", str(out)]
    return ["compare", "--shards", str(sample_dir), "--dataset", str(dataset), "--devices", "1", *options, *extra]


def test_every_key_of_the_published_comparison_is_written(tmp_path, sample_dir, fake):
    runs = fake(native=4.0, somaspeed=10.0)
    out = tmp_path / "out.json"
    assert main(arguments(out, sample_dir, "--equal-batch", "--native", "published")) == 0
    expected, found = json.loads(COMPARISONS.read_text()), json.loads(out.read_text())
    assert missing_keys(expected, found) == []
    assert {c["model"] for c in found["comparisons"]} == set(POLICIES)
    assert main(["verify", str(out)]) == 0
    pi05 = next(c for c in read_document(out).comparisons if c.model == "pi05")
    assert (pi05.speedup, pi05.equal_batch.speedup, pi05.parameters, pi05.gpu_links) == (2.5, 1.0, 10, [["X"]])
    assert pi05.native.finite_loss_updates == 24 and pi05.native.measured_samples == 20 * pi05.native.global_batch
    assert pi05.native.losses[3] == (4, 0.25) and pi05.native.seconds["update"] == pytest.approx(0.155)
    assert pi05.equal_batch.somaspeed.global_batch == pi05.native.global_batch < pi05.somaspeed.global_batch
    order = [f"{job.output.parent.name}/{job.output.name}" for job in runs.jobs]
    assert [name for name in order if "pi05" in name] == ["pi05/native", "pi05/somaspeed", "pi05/equal_batch"]
    assert all("data.held_out=0" in job.arguments for job in runs.jobs)


def test_the_headline_is_against_the_fastest_native(tmp_path, sample_dir, fake):
    fast = {"native": 4.0, "somaspeed": 10.0, "probe-1": "out of memory: …", "probe-2": 5.5, "probe-3": 4.1}
    fake(**fast, **{"native-fastest": 5.0})
    out = tmp_path / "out.json"
    assert main(arguments(out, sample_dir, "--policies", "pi05")) == 0, "a probe that does not fit is no failure"
    found = read_document(out).comparisons[0]
    assert found.native.variant == "no checkpointing" and found.speedup == 2.0
    assert found.native_published.rate == 4.0 and found.native_published.variant == "published recipe"
    assert [probe.error for probe in found.native_variants] == ["out of memory: …", None, None]
    assert main(["verify", str(out)]) == 0

    fake(**fast, **{"native-fastest": 3.0})
    assert main(arguments(out, sample_dir, "--policies", "pi05")) == 0
    found = read_document(out).comparisons[0]
    assert found.native.variant == "published recipe" and found.speedup == 2.5 and found.native_published is None


def test_probes_get_time_for_set_up_and_for_their_updates():
    def published(setup, update):
        summary = SimpleNamespace(setup_seconds=setup)
        return SimpleNamespace(summary=summary, global_batch=2, rate=2 / update)

    assert compare.probe_seconds(published(8, 0.1), 60) == 25, "set-up and the least"
    assert compare.probe_seconds(published(100, 0.1), 7080) == 833, "set-up and a tenth"
    assert compare.probe_seconds(published(8, 2.0), 60) == 40, "set-up and fifteen updates"
    assert compare.probe_seconds(published(30, 2.0), 60) == 60, "never more than a phase"
    assert compare.probe_seconds(SimpleNamespace(summary=None, rate=None, global_batch=2), 60) == 53


def test_a_busy_machine_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (999.0, 0.0, 0.0))
    config = load_config(ROOT / "configs" / "pi05" / "somaspeed-tiny.toml")
    phase = run_phase(Job("no_such_module", [], config, "x", 1, tmp_path / "run", tmp_path / "log", 30))
    assert "load average 999.0" in phase.warning and "no_such_module" in phase.error


def test_a_failed_phase_is_recorded_and_the_rest_goes_on(tmp_path, sample_dir, fake):
    fake(**{"pi05/native": "ImportError: no lerobot", "molmoact2/somaspeed": "out of memory: …"})
    out = tmp_path / "out.json"
    assert main(arguments(out, sample_dir, "--native", "published")) == 1
    found = {c.model: c for c in read_document(out).comparisons}
    assert found["pi05"].native.error == "ImportError: no lerobot" and found["pi05"].somaspeed.rate == 4.0
    assert found["molmoact2"].somaspeed.error.startswith("out of memory") and found["molmoact2"].native.rate == 4.0
    assert found["pi05"].speedup is None and found["groot"].speedup == 1.0
    assert main(["verify", str(out)]) == 0, "nothing that was measured is wrong"


def test_a_failure_of_the_published_recipe_or_the_equal_batch_is_one_too(tmp_path, sample_dir, fake):
    out = tmp_path / "out.json"
    fake(**{"native": "out of memory: …", "probe-1": "out of memory: …", "probe-2": 3.0, "somaspeed": 9.0})
    assert main(arguments(out, sample_dir, "--policies", "pi05")) == 1
    found = read_document(out).comparisons[0]
    assert found.native_published.error.startswith("out of memory") and found.speedup == 9.0 / 4.0
    fake(equal_batch="out of memory: …")
    assert main(arguments(out, sample_dir, "--policies", "pi05", "--native", "published", "--equal-batch")) == 1
    assert read_document(out).comparisons[0].equal_batch.speedup is None and main(["verify", str(out)]) == 0


def test_a_rate_over_few_updates_carries_a_warning(tmp_path, sample_dir, fake, capsys, monkeypatch):
    fake()
    out = tmp_path / "out.json"
    command = arguments(out, sample_dir, "--policies", "pi05", "--native", "published")
    assert main(command) == 0 and read_document(out).comparisons[0].native.warning is None
    real = write_run
    monkeypatch.setattr(sys.modules[__name__], "write_run", lambda job, rate: real(job, rate, steps=8))
    capsys.readouterr()
    assert main(command) == 0
    assert "pi05 native (published recipe): warning: only 3 updates measured: 3 of 30 s" in capsys.readouterr().out
    assert read_document(out).comparisons[0].native.warning.startswith("only 3 updates")
    assert main(["verify", str(out)]) == 0 and "only 3 updates" in capsys.readouterr().out


def test_without_a_dataset_ours_still_runs(tmp_path, sample_dir, fake):
    runs = fake()
    out = tmp_path / "out.json"
    command = arguments(out, sample_dir, "--policies", "pi05")
    shutil.rmtree(tmp_path / "dataset")
    assert main(command) == 1
    found = read_document(out).comparisons[0]
    assert "not a LeRobot dataset" in found.native.error and found.somaspeed.rate == 4.0 and len(runs.jobs) == 1


def test_the_dataset_is_exported_once_into_the_cache(tmp_path, sample_dir, fake, monkeypatch):
    runs, exported = fake(), []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compare, "export_dataset", lambda shards, out: exported.append((shards, out)))
    command = arguments(tmp_path / "out.json", sample_dir, "--policies", "pi05", "--native", "published")
    del command[command.index("--dataset") : command.index("--dataset") + 2]
    assert main(command) == 0
    ((shards, dataset),) = exported
    assert shards == sample_dir and dataset.parent == tmp_path / "cache" / "somaspeed" / "datasets"
    assert str(dataset) in runs.jobs[0].arguments


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--policies", "pi5"], "did you mean 'pi05'"),
        (["--policies", ","], "names none"),
        (["--budget-seconds", "0"], "must be positive"),
        (["--configs-suffix", "small"], "no such configuration"),
        (["training.step=3"], "did you mean 'steps'"),
    ],
)
def test_bad_usage_starts_nothing(tmp_path, sample_dir, fake, capsys, extra, message):
    runs = fake()
    assert main(arguments(tmp_path / "out.json", sample_dir, *extra)) == 2
    assert message in capsys.readouterr().err and runs.jobs == [] and not (tmp_path / "out.json").exists()


def scaling_arguments(out: Path, sample_dir: Path, *extra: str) -> list[str]:
    options = ["--configs", str(ROOT / "configs"), "--configs-suffix", "tiny", "--out", str(out)]
    return ["scaling", "--shards", str(sample_dir), *options, *extra]


def test_every_key_of_the_published_scaling_is_written(tmp_path, sample_dir, fake):
    fake(**{"1-devices-1": 10.0, "1-devices-2": 12.0, "2-devices-1": 19.8, "2-devices-2": 19.8, "4-devices-1": 40.0})
    out = tmp_path / "out.json"
    command = scaling_arguments(out, sample_dir, "--devices", "2,1", "--trials", "2", "--policies", "pi05,groot")
    assert main(command) == 0
    expected, found = json.loads(SCALING.read_text()), json.loads(out.read_text())
    expected["models"] = {name: expected["models"][name] for name in ("pi05", "groot")}
    assert missing_keys(expected, found) == []
    one, two = read_document(out).models["pi05"]
    assert (one.gpus, one.samples_per_second, one.minimum_samples_per_second) == (1.0, 11.0, 10.0)
    assert two.efficiency_percent == pytest.approx(90.0) and two.per_gpu_batch * 2 == two.global_batch
    assert main(["verify", str(out)]) == 0


def test_an_incomplete_scaling_run_says_so(tmp_path, sample_dir, fake):
    fake(**{"2-devices-1": "out of memory: …"})
    out = tmp_path / "out.json"
    assert main(scaling_arguments(out, sample_dir, "--devices", "1,2", "--policies", "pi05")) == 1
    one, two = read_document(out).models["pi05"]
    assert (one.complete, two.complete, two.errors) == ("True", "False", ["out of memory: …"])
    assert main(scaling_arguments(out, sample_dir, "--devices", "one")) == 2


def test_both_phases_of_pi05_for_real(tmp_path, sample_dir):
    """The command as a user runs it, on the CPU, for a few updates."""
    from tests.dataio.tiny_lerobot import write_dataset

    out = tmp_path / "out.json"
    command = arguments(out, sample_dir, "--policies", "pi05", "--native", "published", "--same-order")
    shutil.rmtree(tmp_path / "dataset")
    write_dataset(tmp_path / "dataset", lengths=(7, 6))
    assert main([*command, "training.steps=8", "training.log_every=1", "training.microbatch=2"]) == 0
    found = read_document(out)
    assert isinstance(found, Comparisons)
    (pi05,) = found.comparisons
    assert pi05.native.summary.measured_steps == pi05.somaspeed.summary.measured_steps == 3
    assert pi05.speedup > 1 and pi05.native.backend == "native-pi05-lerobot-accelerate"
    assert pi05.native.command[:3] == ["python", "-m", "somaspeed.native"]
    assert pi05.somaspeed.seconds["expert"] > 0 and pi05.native.seconds["backward"] > 0
    assert main(["verify", str(out)]) == 0


def test_a_run_on_two_processes_for_real(tmp_path, sample_dir):
    config = ROOT / "configs" / "pi05" / "somaspeed-tiny.toml"
    overrides = ["training.steps=7", "training.microbatch=2", "data.held_out=0", f"output={tmp_path / 'run'}"]
    files = ["--config", str(config), "--shards", str(sample_dir)]
    loaded = load_config(config, overrides)
    job = Job("somaspeed.train", [*files, *overrides], loaded, "x", 2, tmp_path / "run", tmp_path / "log", 120)
    phase = run_phase(job)
    assert phase.error is None and phase.global_batch == 4 and phase.measured_samples == 8
