"""Worker processes: results in order, progress, and that the first error stops the others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dataio.jobs import Meter, Silent, run_jobs
from dataio.manifest import DataError


class Counter(Silent):
    """Adds up what it is told."""

    images = 0

    def advance(self, images: int, written: int) -> None:
        self.images += images


def double(job: int, meter: Meter) -> tuple[int, int]:
    meter.advance(job, 1)
    return 2 * job, os.getpid()


def fail_or_work_on(job: Path | None, meter: Meter) -> None:
    """The job without a path fails once the other one is at work; that one would work for a minute."""
    if job is None:
        time.sleep(0.5)
        raise DataError("the job's own words")
    for _ in range(600):
        meter.advance(1, 1)
        time.sleep(0.1)
    job.touch()


def die(job: int, meter: Meter) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_order_with_their_progress() -> None:
    for workers in (1, 2):
        meter = Counter()
        results = run_jobs(double, [3, 1, 2], workers, meter)
        assert [result for result, _ in results] == [6, 2, 4] and meter.images == 6
        assert all((process == os.getpid()) == (workers == 1) for _, process in results)


def test_the_first_error_stops_the_other_jobs(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match="the job's own words"):
        run_jobs(fail_or_work_on, [tmp_path / "a", None, tmp_path / "b"], 2, Silent())
    assert time.monotonic() - start < 30
    assert not list(tmp_path.iterdir())


def test_a_killed_worker_is_reported() -> None:
    with pytest.raises(DataError, match="a worker process was killed.*it resumes"):
        run_jobs(die, [1, 2], 2, Silent())
