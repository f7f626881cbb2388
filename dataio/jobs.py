"""Independent jobs in worker processes: progress while they run, and an orderly stop."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from typing import Protocol

from dataio.manifest import DataError

POLL_SECONDS = 0.1


class Meter(Protocol):
    """Is told how far the work is."""

    def stage(self, name: str, images: int) -> None:
        """A stage of `images` images begins."""

    def advance(self, images: int, written: int) -> None:
        """`images` more are done; `written` bytes were encoded for them (0: they were there already)."""


class Silent:
    """A Meter that shows nothing."""

    def stage(self, name: str, images: int) -> None: ...

    def advance(self, images: int, written: int) -> None: ...


class Stopped(Exception):
    """Raised inside a worker when the run is being stopped."""


def run_jobs[Job, Result](
    function: Callable[[Job, Meter], Result], jobs: Sequence[Job], workers: int, meter: Meter
) -> list[Result]:
    """`[function(job, meter) for job in jobs]`, in `workers` processes; one worker runs in this process.

    On the first error, or Ctrl-C, the other jobs stop at their next report of progress, and it is raised
    here. Workers end by themselves when this process is killed.
    """
    if workers == 1 or len(jobs) < 2:
        return [function(job, meter) for job in jobs]
    context = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    start = functools.partial(_start_worker, messages, stop)
    pool = concurrent.futures.ProcessPoolExecutor(min(workers, len(jobs)), context, start)
    futures = [pool.submit(_work, function, job) for job in jobs]
    try:
        pending = set(futures)
        while pending:
            done, pending = concurrent.futures.wait(pending, POLL_SECONDS, concurrent.futures.FIRST_EXCEPTION)
            while not messages.empty():
                meter.advance(*messages.get())
            for future in done:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, most likely for want of memory. Run the same command again with "
            "fewer --workers; it resumes."
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        while any(future.running() for future in futures):
            # A worker that waits for room in the queue would never see the stop.
            while not messages.empty():
                messages.get()
            concurrent.futures.wait([f for f in futures if f.running()], POLL_SECONDS)
        pool.shutdown()


class _WorkerMeter:
    """Sends progress to the parent and stops the job when the parent asks for it."""

    def __init__(self, messages: multiprocessing.SimpleQueue, stop: Event):
        self._messages = messages
        self._stop = stop

    def stage(self, name: str, images: int) -> None:
        raise NotImplementedError("stages begin in the parent")

    def advance(self, images: int, written: int) -> None:
        if self._stop.is_set():
            raise Stopped
        self._messages.put((images, written))


_meter: Meter = Silent()


def _start_worker(messages: multiprocessing.SimpleQueue, stop: Event) -> None:
    global _meter
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends Ctrl-C to all; the parent stops the workers
    _meter = _WorkerMeter(messages, stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work[Job, Result](function: Callable[[Job, Meter], Result], job: Job) -> Result:
    return function(job, _meter)
