"""Run one trainer as a process group of its own, and read what it measured from its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import somaspeed
from somaspeed.bench.documents import Phase, PhaseSummary
from somaspeed.config import Config

GRACE = 0.2  # a run that has not ended this fraction of its budget after it is ended from outside
LEAST_GRACE_SECONDS = 300.0
TERMINATION_SECONDS = 30.0
FEW_UPDATES = 20  # a steady rate over fewer is said to be uncertain
OUT_OF_MEMORY = re.compile(r"out ?of ?memory|can(no|')t allocate memory|^(\[rank\d+\]: )?MemoryError", re.IGNORECASE)


class Job(NamedTuple):
    """What to run: `module` with `arguments`, on `world` devices, writing to `output` and `log`."""

    module: str
    arguments: list[str]
    config: Config
    config_name: str
    world: int
    output: Path
    log: Path
    budget_seconds: float
    variant: str | None = None

    def command(self, interpreter: str) -> list[str]:
        launcher = [interpreter, "-m"]
        if self.world > 1:
            launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.world), "-m"]
        return [*launcher, self.module, *self.arguments]


def run_phase(job: Job) -> Phase:
    """Run `job` to its end and return its measurements, or why there are none. Never raises for the job's failure."""
    settings = job.config.training
    phase = Phase(
        config=job.config_name,
        backend=job.config.backend,
        microbatch_per_gpu=settings.microbatch,
        global_batch=settings.microbatch * job.world * job.config.accumulation(job.world),
        gradient_accumulation=job.config.accumulation(job.world),
        summary=None,
        finite_loss_updates=None,
        measured_samples=None,
        measured_seconds=None,
        peak_allocated_gib=None,
        variant=job.variant,
        command=job.command("python"),
        log=str(job.log),
    )
    job.log.parent.mkdir(parents=True, exist_ok=True)
    started, load, threads = time.time(), os.getloadavg()[0], len(os.sched_getaffinity(0))
    status, timed_out = execute(job.command(sys.executable), job.log, job.budget_seconds)
    if timed_out:
        phase.error = f"did not end within {job.budget_seconds * (1 + GRACE):.0f} s and was ended"
    elif status != 0:
        phase.error = reason(status, job.log)
    summary = job.output / "summary.json"
    if phase.error is None and not (summary.is_file() and summary.stat().st_mtime >= started - 1):
        phase.error = "ended without writing summary.json"
    if phase.error is None:
        read_results(job, phase)
    if load > threads:
        busy = f"the machine was busy: load average {load:.1f} on {threads} threads when it began"
        phase.warning = f"{phase.warning}; {busy}" if phase.warning else busy
    return phase


def execute(command: list[str], log: Path, budget_seconds: float) -> tuple[int, bool]:
    """Run `command` in its own process group with output to `log`. Returns its status, and whether it was ended.

    Nothing of the group outlives this call: a crashed rank's siblings and a loader's workers are killed.
    """
    root = str(Path(somaspeed.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    limit = budget_seconds + max(LEAST_GRACE_SECONDS, GRACE * budget_seconds)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    timed_out = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out = True
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_SECONDS)
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()
    return process.returncode, timed_out


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to what is left of the process's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def reason(status: int, log: Path) -> str:
    """Why a run failed, from the end of its output: our own message, or the last exception's line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-400:] if line.strip()]
    lines = [line for line in lines if "ChildFailedError" not in line]  # the launcher's, which says only that one did
    memory = next((line for line in reversed(lines) if OUT_OF_MEMORY.search(line)), None)
    if memory:
        return f"out of memory: {memory}"
    for pattern in (r"^[\w.-]+: error: ", r"^(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b"):
        found = next((line for line in reversed(lines) if re.match(pattern, line)), None)
        if found:
            return found
    if status < 0:
        what = signal.Signals(-status).name
        return f"ended by {what}" + (" (the system may be out of memory)" if status == -signal.SIGKILL else "")
    return f"exit status {status}: {lines[-1] if lines else 'no output'}"


def read_results(job: Job, phase: Phase) -> None:
    """Fill `phase` from `summary.json` and `metrics.jsonl` of the run."""
    raw = msgspec.json.decode((job.output / "summary.json").read_bytes())
    summary = msgspec.convert(raw, PhaseSummary)
    phase.summary = summary
    phase.finite_loss_updates = summary.completed_steps - raw.get("skipped_updates", 0)
    phase.backend = raw.get("backend") or phase.backend  # what ran, where it is not what was asked for
    phase.peak_allocated_gib = raw["peak_allocated_gib"]
    phase.versions = raw.get("versions", {})
    assert phase.global_batch is not None
    phase.measured_samples = summary.measured_steps * phase.global_batch
    rate = summary.samples_per_second_steady
    phase.measured_seconds = phase.measured_samples / rate if rate else 0.0
    records = read_metrics(job.output / "metrics.jsonl")
    phase.losses = [(record["step"], record["loss"]) for record in records]
    settled = [record for record in records if record["step"] > job.config.training.warmup_measurement]
    if settled:
        phase.seconds = {
            name: statistics.fmean(record["seconds"][name] for record in settled) for name in settled[0]["seconds"]
        }
    if summary.bounded_early_stop and 0 < summary.measured_steps < FEW_UPDATES:
        phase.warning = (
            f"only {summary.measured_steps} updates measured: {summary.setup_seconds:.0f} of "
            f"{summary.wall_seconds:.0f} s were set-up; a larger budget gives a steadier rate"
        )
    if not summary.measured_steps:
        phase.error = (
            f"made {summary.completed_steps} updates in {summary.wall_seconds:.0f} s, none of them after the first "
            f"{job.config.training.warmup_measurement}, which are not measured; give it a larger budget"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def raw_summary(output: Path) -> dict[str, Any]:
    """`summary.json` of a run as it is; empty where there is none."""
    path = output / "summary.json"
    return msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
