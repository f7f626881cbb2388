"""The line a person watches: step, loss, rate, time left."""

from __future__ import annotations

import datetime
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from somaspeed.metrics import Summary


class Progress:
    """Prints one short line per logged step to standard output."""

    def __init__(self, steps: int, first_step: int, global_batch: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.steps, self.global_batch = steps, global_batch
        if first_step:
            self.console.print(f"resumed at step {first_step}")

    def show(self, record: dict[str, Any]) -> None:
        left = (self.steps - record["step"]) * self.global_batch / record["samples_per_second"]
        spent = sum(record["seconds"].values())
        waiting = record["seconds"]["data_wait"] / spent if spent else 0.0
        self.console.print(
            f"step {record['step']:>6}/{self.steps}  loss {record['loss']:.4f}  norm {record['grad_norm']:.3f}  "
            f"lr {record['lr']:.2e}  {record['samples_per_second']:.1f} samples/s  waiting for data {waiting:.1%}  "
            f"left {datetime.timedelta(seconds=round(left))}"
        )
        if "held_out_loss" in record:
            self.note(f"held-out loss {record['held_out_loss']:.4f}")

    def note(self, text: str) -> None:
        self.console.print(f"{'':>11}  {text}")

    def close(self) -> None:
        self.console.file.flush()


def closing_report(output: Path, summary: Summary) -> None:
    """The last lines of a run: how it ended, what it measured, and where the checkpoint is."""
    console = Console(highlight=False, soft_wrap=True)
    ended = {"completed": "finished", "time_limit": "stopped at the time limit", "signal": "stopped by a signal"}
    console.print(
        f"\n{ended[summary.stop_reason]} after {summary.completed_steps} of {summary.target_steps} steps, "
        f"{datetime.timedelta(seconds=round(summary.wall_seconds))} ({summary.setup_seconds:.0f} s set-up)"
    )
    losses = [record["loss"] for record in map(json.loads, (output / "metrics.jsonl").read_bytes().splitlines())]
    if len(losses) > 1:
        tenth = max(1, min(10, len(losses) // 2))
        first, last = statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])
        console.print(f"loss        {first:.4f} → {last:.4f} (mean of the first and last {tenth} logged steps)")
    if summary.held_out_loss is not None:
        console.print(f"held out    {summary.held_out_loss:.4f}")
    if summary.measured_steps:
        console.print(
            f"rate        {summary.samples_per_second_steady:.1f} samples/s steady over "
            f"{summary.measured_steps} steps, "
            f"{summary.samples_per_second_end_to_end:.1f} end to end"
        )
    console.print(f"memory      {summary.peak_allocated_gib:.1f} GiB at most")
    console.print(f"checkpoint  {output / 'checkpoints' / 'last' / 'pretrained_model'} (a LeRobot policy directory)")
    console.print(f"files       {output}: summary.json, metrics.jsonl, first_batch.png")
