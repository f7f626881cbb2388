"""The episodes of an evaluation: planned, played in simulator processes, recorded one by one, resumable.

OUTPUT/evaluation.json   what is evaluated, and how; another evaluation there is refused
OUTPUT/episodes.jsonl    one line per finished episode
OUTPUT/videos/           the first episodes of every task
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from dataio.atomic import write_bytes
from dataio.manifest import DataError
from somaspeed.evaluate.video import save_video
from somaspeed.sim.pool import Conversation, Pool
from somaspeed.sim.protocol import Act, Begin, Finished, Observation, Rendering
from somaspeed.sim.seeds import episode_seed

FILM_EVERY = 2  # control steps


class Driver(Protocol):
    """Whatever drives the robot. One that is `blind` is shown no images."""

    blind: bool

    def act(self, task: int, seen: Observation, seed: int) -> np.ndarray:
        """The next actions, float [n, 7]; what is random in them is drawn from `seed`."""


class Trial(msgspec.Struct, frozen=True):
    """One episode to be played: `episode` counts within the task, `init` is the stored initial state."""

    task: int
    episode: int
    init: int
    seed: int


class Outcome(msgspec.Struct, frozen=True):
    """One line of `episodes.jsonl`: how an episode ended, after how many control steps and seconds."""

    task: int
    episode: int
    init: int
    seed: int
    success: bool
    steps: int
    seconds: float


class Settings(msgspec.Struct, frozen=True):
    """What makes success rates comparable; an evaluation that is resumed must agree in all of it."""

    suite: str
    checkpoint_sha256: str
    policy: str
    n_action_steps: int
    chunk_size: int
    flow_steps: int | None
    max_steps: int
    seed: int
    first_init: int
    versions: dict[str, str]
    rendering: Rendering = "full"
    demonstrations: str = ""  # the dataset's fingerprint, where the driver knows one


def plan(tasks: Mapping[int, int], episodes: int, first_init: int, seed: int) -> list[Trial]:
    """`episodes` trials of each of `tasks` (number → stored initial states), from initial state `first_init` on."""
    return [
        Trial(task, episode, (first_init + episode) % inits, episode_seed(seed, task, episode))
        for task, inits in tasks.items()
        for episode in range(episodes)
    ]


class Records:
    """The finished episodes of an evaluation directory."""

    def __init__(self, output: Path, settings: Settings) -> None:
        """Open or begin it. Raises DataError when `output` holds another evaluation, naming what differs."""
        self.output = output
        self._path = output / "episodes.jsonl"
        about = output / "evaluation.json"
        if about.exists():
            there = decode(about, about.read_bytes(), Settings)
            for key in Settings.__struct_fields__:
                if getattr(there, key) != getattr(settings, key):
                    raise DataError(
                        f"{output}: holds an evaluation with {key} = {getattr(there, key)}, now it is "
                        f"{getattr(settings, key)}. Remove it, or give another --output."
                    )
        else:
            write_bytes(about, msgspec.json.format(msgspec.json.encode(settings), indent=1) + b"\n")
        self.outcomes = {(o.task, o.episode): o for o in self._lines()}

    def add(self, outcome: Outcome) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")
        self.outcomes[outcome.task, outcome.episode] = outcome

    def _lines(self) -> Iterator[Outcome]:
        """Every whole line; one that a kill cut short is taken off the file."""
        if not self._path.exists():
            return
        raw = self._path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            write_bytes(self._path, whole)
        for line in whole.splitlines():
            yield decode(self._path, line, Outcome)


def decode[Kind: Settings | Outcome](path: Path, raw: bytes, kind: type[Kind]) -> Kind:
    """Raises DataError when `raw`, of file `path`, is not what this program writes."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: not readable ({error}). Remove it, or give another --output.") from None


def play(
    trials: Sequence[Trial],
    driver: Driver,
    records: Records,
    pool: Pool,
    max_steps: int,
    videos: int,
    show: Callable[[Outcome], None],
) -> list[Outcome]:
    """Play the trials that are not recorded yet; returns the outcomes of all of them, in their order.

    The policy runs in this process, one observation at a time, so that an episode does not depend on which others
    are being played. `videos` first episodes of each task are filmed. Raises PoolError.
    """

    def converse(trial: Trial) -> Conversation[Outcome]:
        started = time.monotonic()
        every = FILM_EVERY if trial.episode < videos else 0
        film = []
        reply = yield Begin(trial.task, trial.init, trial.seed, max_steps, every, driver.blind)
        while isinstance(reply, Observation):
            film.append(reply.film)
            draw = episode_seed(trial.seed, trial.task, trial.episode, draw=reply.steps)
            reply = yield Act(np.asarray(driver.act(trial.task, reply, draw)))
        assert isinstance(reply, Finished)
        film.append(reply.film)
        if every:
            save_film(records.output / "videos", trial, reply.success, film)
        return Outcome(
            **msgspec.structs.asdict(trial),
            success=reply.success,
            steps=reply.steps,
            seconds=round(time.monotonic() - started, 2),
        )

    missing = [trial for trial in trials if (trial.task, trial.episode) not in records.outcomes]
    for _, outcome in pool.run(missing, converse):
        records.add(outcome)
        show(outcome)
    return [records.outcomes[trial.task, trial.episode] for trial in trials]


def save_film(directory: Path, trial: Trial, success: bool, film: list[Any]) -> None:
    ending = "success" if success else "failure"
    path = directory / f"task{trial.task:02d}_episode{trial.episode:03d}_{ending}.mp4"
    save_video(path, np.concatenate([part for part in film if part is not None]), FILM_EVERY)
