"""The line a person watches: step, loss, rate, time left."""

from __future__ import annotations

import datetime
from typing import Any

from rich.console import Console


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
            self.console.print(f"{'':>11}  held-out loss {record['held_out_loss']:.4f}")

    def close(self) -> None:
        self.console.file.flush()
