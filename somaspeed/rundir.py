"""The beginning of a run: when its process began, and an earlier run's files moved aside."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def process_started() -> float:
    """When this process began, on the clock of `time.perf_counter`: set-up includes the imports."""
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


def make_way(output: Path) -> None:
    """Move an earlier run out of the way of a new one; nothing is overwritten."""
    if not (output / "metrics.jsonl").exists() and not (output / "checkpoints").exists():
        return
    number = 1
    while (aside := output.with_name(f"{output.name}.previous-{number}")).exists():
        number += 1
    os.rename(output, aside)
    print(f"{output} held an earlier run; it is now {aside} (--resume goes on with a run)")
