"""What a run measures and writes: phase times, `metrics.jsonl`, `summary.json`, trackers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from dataio.atomic import write_bytes
from somaspeed.config import ConfigError

PHASES = ("data_wait", "prepare", "prefix", "expert", "reduce_exposed", "update")
SERIES = ("loss", "grad_norm", "lr", "samples_per_second", "epoch", "held_out_loss", "success_rate", "success_step")


class PhaseTimer:
    """Seconds per phase and per step, from device events where there is a device, from the clock elsewhere.

    Nothing waits for the device until `collect`, which the loop calls on logging steps only. `data_wait` is the
    host's waiting, so it is always taken from the clock.
    """

    def __init__(self, device: torch.device, phases: tuple[str, ...] = PHASES) -> None:
        self.cuda, self.phases = device.type == "cuda", phases
        self.spans: list[tuple[str, Any, Any]] = []

    def mark(self, host: bool = False) -> Any:
        """A point in time: a recorded device event, or the clock."""
        if not self.cuda or host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        host = name == "data_wait"
        start = self.mark(host)
        yield
        self.spans.append((name, start, self.mark(host)))

    def collect(self) -> tuple[dict[str, float], list[float]]:
        """Seconds by phase since the last call, and the seconds of each step. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(self.phases, 0.0)
        steps = []
        for name, start, end in self.spans:
            elapsed = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
            if name == "step":
                steps.append(elapsed)
            else:
                seconds[name] += elapsed
        self.spans.clear()
        return seconds, steps


class Summary(msgspec.Struct):
    """`summary.json` of one run; the published keys."""

    completed_steps: int
    target_steps: int
    setup_seconds: float
    setup_peak_allocated_gib: float
    wall_seconds: float
    samples_per_second_end_to_end: float
    samples_per_second_steady: float
    measured_steps: int
    bounded_early_stop: bool
    stop_reason: str
    peak_allocated_gib: float
    held_out_loss: float | None = None
    skipped_updates: int = 0
    ranks: int = 1


def peak_allocated_gib(device: torch.device) -> float:
    """Peak device memory, or on the CPU the process's peak resident memory, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class MetricsFile:
    """`metrics.jsonl`: one object per logged step, flushed as it is written. Resuming drops what came after."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = []
        if path.exists():
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(json.JSONDecodeError, KeyError):  # a killed run may leave half a line
                    if json.loads(line)["step"] <= resumed_step:
                        kept.append(line + b"\n")
        write_bytes(path, b"".join(kept))
        self.file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


class Tracker:
    """Sends every logged step's series to TensorBoard or Weights & Biases; "none" sends nothing.

    The series are `SERIES`, `held_out_loss` on the steps that have one, and `seconds/<phase>` for every phase.
    Resuming goes on with the run that the tracker has. Raises ConfigError when it cannot be opened.
    """

    def __init__(self, kind: str, output: Path, config: dict[str, Any], first_step: int = 0) -> None:
        self.board: Any = None
        self.run: Any = None
        check_tracker(kind)
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            # What an interrupted run logged after its last checkpoint is logged again.
            self.board = SummaryWriter(str(output / "tensorboard"), purge_step=first_step + 1 if first_step else None)
        elif kind == "wandb":
            self.run = open_wandb(output, config, resumed=bool(first_step))

    def write(self, record: dict[str, Any]) -> None:
        scalars = {key: record[key] for key in SERIES if key in record}
        scalars |= {f"seconds/{phase}": value for phase, value in record.get("seconds", {}).items()}
        if self.board:
            for key, value in scalars.items():
                self.board.add_scalar(key, value, record["step"])
            self.board.flush()
        if self.run:
            self.run.log(scalars, step=record["step"])

    def close(self) -> None:
        if self.board:
            self.board.close()
        if self.run:
            self.run.finish()


def check_tracker(kind: str) -> None:
    """Raise ConfigError when the package of `training.tracker` is not there."""
    package = {"tensorboard": "tensorboard", "wandb": "wandb"}.get(kind)
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"training.tracker = {kind!r} needs the package {package}: pip install {package}; or leave the key out."
        )


def open_wandb(output: Path, config: dict[str, Any], resumed: bool) -> Any:
    """A run of Weights & Biases; its id is kept in `output`, so that a resumed run goes on with it."""
    import wandb

    kept = output / "wandb_run"
    identifier = kept.read_text().strip() if resumed and kept.exists() else None
    try:
        run = wandb.init(dir=str(output), config=config, name=output.name, id=identifier, resume="allow")
    except wandb.errors.Error as error:
        raise ConfigError(
            f"training.tracker = 'wandb': {error}. Run `wandb login`, or set WANDB_MODE=offline."
        ) from None
    kept.write_text(f"{run.id}\n")
    return run
