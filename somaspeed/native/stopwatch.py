"""The stopwatch around an upstream trainer: step times, losses, the time limit, and the files of a run."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from dataio.atomic import write_bytes
from somaspeed.config import Config
from somaspeed.metrics import MetricsFile, PhaseTimer, Summary, Tracker, peak_allocated_gib
from somaspeed.parallel import Ranks
from somaspeed.progress import Progress
from somaspeed.versions import installed_versions

NATIVE_PHASES = ("data_wait", "prepare", "forward", "backward", "update")


class Stopped(Exception):
    """Raised inside the upstream loop to end it: its own code has no time limit."""


class NativeSummary(Summary):
    """`summary.json` of a baseline: the keys of ours, and what the comparison says about the baseline."""

    backend: str = ""
    parameters: int = 0
    trainable_parameters: int = 0
    versions: dict[str, str] = {}


class Stopwatch:
    """One run's measurements. The upstream loop is made to call `waiting`, `batch`, `ready` and `updated` in turn.

    A step lasts from asking for its batch to the end of its update, as in our own loop. What upstream synchronises
    is left as it is; nothing here waits for the device between logged steps.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float) -> None:
        self.config, self.ranks, self.started = config, ranks, started
        self.settings, self.output = config.training, Path(config.output)
        self.global_batch = self.settings.microbatch * ranks.world * config.accumulation(ranks.world)
        self.timer = PhaseTimer(ranks.device, NATIVE_PHASES)
        self.step, self.finite = 0, 0
        self.slowest: list[float] = []
        self.losses: list[Any] = []  # since the last logged step; floats, or tensors on the device
        self.grad_norm: Any = math.nan
        self.lr = math.nan
        self.peak = self.setup_peak = self.setup_seconds = 0.0
        self.backend = config.backend
        self.stop_reason = ""
        self.signalled = False
        self.parameters = self.trainable = 0
        self.begin: Any = None  # mark of the current step's begin
        self.previous_handler: Any = None

    def open(self) -> None:
        """Open the run's files on the main rank, and listen for SIGTERM."""
        self.previous_handler = signal.signal(signal.SIGTERM, self.on_sigterm)
        if self.ranks.main:
            self.output.mkdir(parents=True, exist_ok=True)
            self.file = MetricsFile(self.output / "metrics.jsonl", 0)
            self.tracker = Tracker(self.settings.tracker, self.output, msgspec.to_builtins(self.config))
            self.progress = Progress(self.settings.steps, 0, self.global_batch)

    def on_sigterm(self, _signal: int, _frame: Any) -> None:
        self.signalled = True

    def model(self, module: nn.Module) -> None:
        """Count the model's parameters, once it is built."""
        self.parameters = sum(p.numel() for p in module.parameters())
        self.trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)

    def waiting(self) -> None:
        """The loop asks for a batch. Before the first one, this ends set-up."""
        if self.begin is None:
            self.setup_seconds = time.perf_counter() - self.started
            self.setup_peak = self.peak = peak_allocated_gib(self.ranks.device)
            self.begin = self.timer.mark()
        self.host_begin = self.timer.mark(host=True)

    def batch(self) -> None:
        """The batch has come; the loop goes on to pre-process it."""
        self.timer.spans.append(("data_wait", self.host_begin, self.timer.mark(host=True)))
        self.last = self.timer.mark()

    def mark(self, phase: str) -> None:
        """`phase` ends here; it began where the phase before it ended."""
        now = self.timer.mark()
        self.timer.spans.append((phase, self.last, now))
        self.last = now

    def updated(self, loss: Any, grad_norm: Any, lr: float) -> None:
        """The update is done. Raises Stopped at the time limit or after SIGTERM, on every rank alike."""
        self.mark("update")
        end = self.last
        self.timer.spans.append(("step", self.begin, end))
        self.begin = end
        self.step += 1
        self.losses.append(loss)
        self.grad_norm, self.lr = grad_norm, lr
        self.peak = max(self.peak, peak_allocated_gib(self.ranks.device))
        alone_signalled = self.signalled and self.ranks.world == 1
        if self.step in (1, self.settings.steps) or self.step % self.settings.log_every == 0 or alone_signalled:
            self.log()

    def log(self) -> None:
        """Write a line of metrics and decide whether to stop. Waits for the device."""
        seconds, steps = self.timer.collect()
        slowest = self.ranks.maximum(steps)
        self.slowest += slowest
        losses = self.ranks.mean([float(loss) for loss in self.losses])
        self.finite += sum(map(math.isfinite, losses))
        self.losses.clear()
        if self.ranks.main:
            record = {
                "step": self.step,
                "loss": losses[-1],
                "grad_norm": float(self.grad_norm),
                "lr": self.lr,
                "samples_per_second": len(slowest) * self.global_batch / sum(slowest),
                "seconds": {phase: value / len(steps) for phase, value in seconds.items()},
            }
            self.file.write(record)
            self.tracker.write(record)
            self.progress.show(record)
        total, updates = self.settings.max_seconds, self.settings.max_training_seconds
        late = total is not None and time.perf_counter() - self.started >= total
        late = late or (updates is not None and sum(self.slowest) >= updates)
        timed_out, signalled = self.ranks.maximum([float(late), float(self.signalled)])
        if self.step < self.settings.steps and (timed_out or signalled):
            self.stop_reason = "time_limit" if timed_out else "signal"
            raise Stopped(self.stop_reason)

    def finish(self) -> NativeSummary:
        """Write and return `summary.json`. No rank waits for another here."""
        signal.signal(signal.SIGTERM, self.previous_handler)
        wall = time.perf_counter() - self.started
        measured = self.slowest[self.settings.warmup_measurement :]
        summary = NativeSummary(
            completed_steps=self.step,
            target_steps=self.settings.steps,
            setup_seconds=self.setup_seconds,
            setup_peak_allocated_gib=self.setup_peak,
            wall_seconds=wall,
            samples_per_second_end_to_end=self.step * self.global_batch / wall,
            samples_per_second_steady=len(measured) * self.global_batch / sum(measured) if measured else 0.0,
            measured_steps=len(measured),
            bounded_early_stop=self.stop_reason == "time_limit",
            stop_reason=self.stop_reason or "completed",
            peak_allocated_gib=self.peak,
            skipped_updates=self.step - self.finite,
            ranks=self.ranks.world,
            backend=self.backend,
            parameters=self.parameters,
            trainable_parameters=self.trainable,
            versions=installed_versions(),
        )
        if self.ranks.main:
            encoded = msgspec.json.format(msgspec.json.encode(summary), indent=1)
            write_bytes(self.output / "summary.json", encoded + b"\n")
            self.progress.close()
            self.tracker.close()
            self.file.close()
        return summary
