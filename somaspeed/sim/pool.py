"""Simulator processes side by side: every job is a conversation, and a process that dies costs one job's time.

A conversation is a generator that yields requests, is sent the replies, and returns the job's result:

    def converse(job):
        reply = yield Begin(task=job.task, ...)
        ...
        return result
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import somaspeed
from somaspeed.sim import protocol
from somaspeed.sim.protocol import Failed, ProtocolError, Ready, Rendering, Reply, Request

ENVIRONMENT = "SOMASPEED_SIM_PYTHON"
ATTEMPTS = 3  # of a job whose process dies
REPLY_SECONDS = 600.0  # without a reply; a process that is silent for longer counts as dead
START_SECONDS = 600.0  # the same for its greeting: the first start on a machine compiles
POLL_SECONDS = 0.5
LOG_BYTES = 2000  # of a dead process's last words


class PoolError(RuntimeError):
    """The simulator is not there or does not work. The message says what to do."""


class Job(Protocol):
    """One episode's worth of work on one task."""

    @property
    def task(self) -> int: ...


type Conversation[R] = Generator[Request, Reply, R]


def simulator_command(suite: str, rendering: Rendering = "full") -> list[str]:
    """The command that starts a process simulating `suite`. Raises PoolError when there is no simulator environment."""
    named = os.environ.get(ENVIRONMENT)
    beside = Path(somaspeed.__file__).parents[1] / ".venv-sim" / "bin" / "python"
    python = Path(named) if named else beside
    if not python.exists():
        raise PoolError(
            f"no simulator at {python}; `make sim` installs it (or set {ENVIRONMENT} to the Python of an environment "
            "that has it)."
        )
    return [str(python), "-m", "somaspeed.sim.worker", suite, rendering]


class Process:
    """One simulator process, its greeting and its log."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile()
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self.replies = self._process.stdin, self._process.stdout
        self.ready: Ready | None = None
        self.task = -1
        self.silent = False
        self.since = time.monotonic()

    def send(self, request: Request) -> None:
        """Raises OSError when the process has died."""
        self.since = time.monotonic()
        protocol.send(self._requests, request)

    def receive(self) -> Reply | None:
        """The next reply; None when the process has died. Raises ProtocolError."""
        return protocol.receive_reply(self.replies)

    def kill(self) -> None:
        """End a silent process: its stream of replies ends, which is how its death is noticed."""
        self.silent = True
        self._process.kill()

    def end(self) -> str:
        """Kill the process. Returns how it died and what it last said."""
        with contextlib.suppress(OSError):
            self._requests.close()
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
        died = self._process.poll()
        self._process.kill()
        self._process.wait()
        self.replies.close()
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - LOG_BYTES, 0))
        words = self._log.read().decode(errors="replace").strip()
        self._log.close()
        how = "was stopped" if died is None else f"ended with exit status {died}"
        if self.silent:
            how = f"had said nothing for {time.monotonic() - self.since:.0f} s and was stopped"
        return f"{how}{f'; its last words:\n{words}' if words else ''}"


class Pool:
    """Runs conversations in up to `workers` processes started with `command`. Use as a context manager.

    `say` is told in one line of every process that dies; its job is run again from the start, at most three times.
    """

    def __init__(
        self, command: Sequence[str], workers: int, say: Callable[[str], None], reply_seconds: float = REPLY_SECONDS
    ) -> None:
        self._command, self._workers, self._say, self._limit = command, workers, say, reply_seconds
        self._processes: list[Process] = []
        self.crashes: Counter[Any] = Counter()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end()
        self._processes = []

    def greeting(self) -> Ready:
        """What the processes simulate; starts the first one when there is none. Raises PoolError."""
        if not self._processes:
            self._processes.append(Process(self._command))
        process = self._processes[0]
        if process.ready is None:
            self._greet(process, process.receive())
        assert process.ready
        return process.ready

    def run[J: Job, R](self, jobs: Sequence[J], converse: Callable[[J], Conversation[R]]) -> Iterator[tuple[J, R]]:
        """Yield (job, result) as jobs finish. Raises PoolError when a job's process dies three times."""
        waiting = {task: deque(job for job in jobs if job.task == task) for task in sorted({job.task for job in jobs})}
        talks: dict[Process, tuple[J, Conversation[R]]] = {}
        left = len(jobs)
        try:
            while left:
                while len(self._processes) < min(self._workers, left):
                    self._processes.append(Process(self._command))
                self._assign(waiting, talks, converse)
                for process in self._heard(talks):
                    if reply := self._reply(process, talks, waiting):
                        job, talk = talks[process]
                        try:
                            request = talk.send(reply)
                        except StopIteration as stop:
                            del talks[process]
                            left -= 1
                            yield job, stop.value
                        else:
                            self._say_to(process, request, talks, waiting)
        finally:
            for process in talks:  # left in mid-sentence: of no further use
                self._processes.remove(process)
                process.end()

    def _assign[J: Job, R](
        self,
        waiting: dict[int, deque[J]],
        talks: dict[Process, tuple[J, Conversation[R]]],
        converse: Callable[[J], Conversation[R]],
    ) -> None:
        """Give every idle process a job."""
        for process in list(self._processes):
            if process.ready and process not in talks and (job := next_job(waiting, process.task)):
                talk = converse(job)
                talks[process] = job, talk
                process.task = job.task
                self._say_to(process, next(talk), talks, waiting)

    def _reply(self, process: Process, talks: dict[Process, Any], waiting: dict[int, deque]) -> Reply | None:
        """What `process` says to its job, if it does; greetings and deaths are dealt with here."""
        try:
            reply = process.receive()
        except ProtocolError as error:
            self._bury(process, str(error), talks, waiting)
            return None
        if process.ready is None:
            self._greet(process, reply)
        elif reply is None:
            self._bury(process, "", talks, waiting)
        elif isinstance(reply, Failed):
            self._bury(process, f"failed:\n{reply.trace}", talks, waiting)
        else:
            return reply
        return None

    def _greet(self, process: Process, reply: Reply | None) -> None:
        if not isinstance(reply, Ready):
            self._processes.remove(process)
            raise PoolError(f"a simulator process ({' '.join(self._command)}) did not start: it {process.end()}")
        process.ready = reply

    def _heard(self, talks: dict[Process, Any]) -> list[Process]:
        """The processes that have something to say; those that are silent for too long are killed."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                if process in talks or process.ready is None:
                    selector.register(process.replies, selectors.EVENT_READ, process)
            heard = [key.data for key, _ in selector.select(POLL_SECONDS)]
        for process in set(self._processes) - set(heard):
            limit = self._limit if process in talks else START_SECONDS
            waited_for = process in talks or process.ready is None
            if waited_for and time.monotonic() - process.since > limit:
                process.kill()
        return heard

    def _say_to(self, process: Process, request: Request, talks: dict[Process, Any], waiting: dict[int, deque]) -> None:
        try:
            process.send(request)
        except OSError:
            self._bury(process, "", talks, waiting)

    def _bury(self, process: Process, reason: str, talks: dict[Process, Any], waiting: dict[int, deque]) -> None:
        """Report a dead process and put its job back to the front of the queue."""
        job, talk = talks.pop(process)
        talk.close()
        self._processes.remove(process)
        reason = f"{reason}\nit {process.end()}" if reason else f"it {process.end()}"
        self.crashes[job] += 1
        if self.crashes[job] == ATTEMPTS:
            raise PoolError(f"a simulator process died {ATTEMPTS} times on {job}: {reason}")
        self._say(f"a simulator process died on {job}; that is run again. {reason}")
        waiting[job.task].appendleft(job)


def next_job[J: Job](waiting: dict[int, deque[J]], task: int) -> J | None:
    """The next job for a process whose scene is `task`: of the same task, else of the one with most left."""
    if waiting.get(task):
        return waiting[task].popleft()
    longest = max(waiting.values(), key=len)
    return longest.popleft() if longest else None


def default_workers() -> int:
    """One process per core that this one may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
