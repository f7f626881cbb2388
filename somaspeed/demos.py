"""Oracle episodes of a LIBERO suite as a LeRobot dataset: solve, render, write, each step resumable.

Beside the output, while it is being made:
    OUT.partial/job.json                    what is being made; another job is refused
    OUT.partial/solved/TT-EEEE.msgpack      what the oracle did (protocol.Episode)
    OUT.partial/frames/TT-EEEE.msgpack      its frames (protocol.Frames), for solved episodes
    OUT.partial/dataset/                    the LeRobot dataset, renamed to OUT when it is complete
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from PIL import Image

from dataio.atomic import PARTIAL, write_bytes
from dataio.export import lerobot_dataset
from dataio.manifest import DataError
from somaspeed.sim import protocol
from somaspeed.sim.pool import Conversation, Pool
from somaspeed.sim.protocol import Collect, Episode, Frames, Ready, Render, Rendering
from somaspeed.sim.seeds import episode_seed

RECORD = "somaspeed_demos.json"
FPS = 10  # as LIBERO's training data is labelled; the simulator's control steps are 20 Hz
SIDE = 256
CAMERAS = ("image", "image2")
STATE_NAMES = ["x", "y", "z", "rx", "ry", "rz", "gripper_l", "gripper_r"]
ACTION_NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
IMAGE_THREADS = 4

Stage = Literal["solve", "render", "write"]


class Demo(msgspec.Struct, frozen=True):
    """One episode to be made: `episode` counts within the task, `init` is the stored initial state."""

    task: int
    episode: int
    init: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task:02d}-{self.episode:04d}.msgpack"


class JobRecord(msgspec.Struct, frozen=True):
    """What is made; a run that is resumed must agree in all of it."""

    suite: str
    tasks: list[int]
    episodes_per_task: int
    seed: int
    noise: float
    store: Literal["image", "video"]
    versions: dict[str, str]
    rendering: Rendering = "full"


class Made(msgspec.Struct, frozen=True):
    """One episode of the dataset, as it can be made again."""

    task: int
    init: int
    seed: int
    attempts: int
    steps: int


class DemoRecord(msgspec.Struct, frozen=True):
    """`somaspeed_demos.json` of a finished dataset: how it was made, and the oracle's success per task."""

    job: JobRecord
    solved: dict[int, int]
    tried: dict[int, int]
    episodes: list[Made]


Progress = Callable[[Stage, int, int, dict[int, tuple[int, int]]], None]


def make_demos(
    out: Path,
    suite: str,
    tasks: Sequence[int] | None,
    episodes_per_task: int,
    seed: int,
    noise: float,
    store: Literal["image", "video"],
    pool: Pool,
    progress: Progress,
) -> DemoRecord:
    """Make the dataset at `out`, or go on with it. `tasks` None means all.

    `progress(stage, done, total, {task: (solved, tried)})` is called after every episode. Raises DataError when
    `out` holds something else, and PoolError.
    """
    ready = pool.greeting()
    chosen = checked_tasks(ready, tasks)
    job = JobRecord(suite, chosen, episodes_per_task, seed, noise, store, ready.versions, ready.rendering)
    if out.exists():
        return finished(out, job)
    work = out.with_name(out.name + PARTIAL)
    claim(work, job)
    demos = [
        Demo(task, episode, episode % ready.tasks[task].inits, episode_seed(seed, task, episode))
        for task in chosen
        for episode in range(episodes_per_task)
    ]
    solve(work, demos, noise, pool, progress)
    episodes = {demo: load(work / "solved" / demo.name, Episode) for demo in demos}
    score = scores(episodes)
    good = [demo for demo in demos if episodes[demo].success]
    if not good:
        raise DataError(f"{work}: the oracle solved none of {len(demos)} episodes; there is nothing to write.")
    render(work, good, episodes, pool, lambda done: progress("render", done, len(good), score))
    record = DemoRecord(
        job,
        solved={task: score[task][0] for task in chosen},
        tried={task: score[task][1] for task in chosen},
        episodes=[made(demo, episodes[demo]) for demo in good],
    )
    languages = [task.language for task in ready.tasks]
    write(work, out.name, good, episodes, languages, record, lambda done: progress("write", done, len(good), score))
    (work / "dataset").rename(out)
    shutil.rmtree(work)
    return record


def checked_tasks(ready: Ready, tasks: Sequence[int] | None) -> list[int]:
    """The chosen task numbers, all by default. Raises DataError for one that the suite does not have."""
    for task in tasks or ():
        if not 0 <= task < len(ready.tasks):
            raise DataError(f"{ready.suite} has tasks 0 to {len(ready.tasks) - 1}, not {task}.")
    return sorted(set(tasks)) if tasks is not None else list(range(len(ready.tasks)))


def finished(out: Path, job: JobRecord) -> DemoRecord:
    """The record of a complete `out`. Raises DataError when it is not what `job` would make."""
    try:
        record = msgspec.json.decode((out / RECORD).read_bytes(), type=DemoRecord)
    except (OSError, msgspec.MsgspecError):
        raise DataError(f"{out}: exists and was not made by this program; give another --out.") from None
    check_same(out, record.job, job)
    return record


def claim(work: Path, job: JobRecord) -> None:
    """Say in `work` what it is for. Raises DataError when it is for something else."""
    path = work / "job.json"
    if path.exists():
        try:
            there = msgspec.json.decode(path.read_bytes(), type=JobRecord)
        except msgspec.MsgspecError as error:
            raise DataError(f"{path}: not readable ({error}). Remove {work}, or give another --out.") from None
        check_same(work, there, job)
    else:
        write_bytes(path, msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n")


def check_same(place: Path, there: JobRecord, job: JobRecord) -> None:
    for key in JobRecord.__struct_fields__:
        if getattr(there, key) != getattr(job, key):
            raise DataError(
                f"{place}: was made with {key} = {getattr(there, key)}, now it is {getattr(job, key)}. "
                "Remove it, or give another --out."
            )


def solve(work: Path, demos: list[Demo], noise: float, pool: Pool, progress: Progress) -> None:
    """Let the oracle play what is not there yet."""
    paths = {demo: work / "solved" / demo.name for demo in demos}
    there = {demo: load(path, Episode) for demo, path in paths.items() if path.exists()}
    outcomes: dict[Demo, Any] = dict(there)

    def converse(demo: Demo) -> Conversation[Episode]:
        reply = yield Collect(demo.task, demo.init, demo.seed, noise)
        assert isinstance(reply, Episode)
        return reply

    for demo, episode in pool.run([demo for demo in demos if demo not in there], converse):
        write_bytes(paths[demo], protocol.encode(episode))
        outcomes[demo] = episode
        progress("solve", len(outcomes), len(demos), scores(outcomes))


def render(
    work: Path, demos: list[Demo], episodes: dict[Demo, Episode], pool: Pool, progress: Callable[[int], None]
) -> None:
    """Render what is not there yet."""
    missing = [demo for demo in demos if not (work / "frames" / demo.name).exists()]

    def converse(demo: Demo) -> Conversation[Frames]:
        reply = yield Render(demo.task, demo.seed, episodes[demo].states)
        assert isinstance(reply, Frames)
        return reply

    for number, (demo, frames) in enumerate(pool.run(missing, converse), start=1):
        write_bytes(work / "frames" / demo.name, protocol.encode(frames))
        progress(len(demos) - len(missing) + number)


def write(
    work: Path,
    name: str,
    demos: list[Demo],
    episodes: dict[Demo, Episode],
    languages: list[str],
    record: DemoRecord,
    progress: Callable[[int], None],
) -> None:
    """Write the dataset through LeRobot's own writer, anew: its files cannot be continued after a kill."""
    root = work / "dataset"
    shutil.rmtree(root, ignore_errors=True)
    dataset = lerobot_dataset().create(
        f"somaspeed/{name}",
        FPS,
        features(record.job.store),
        root=root,
        robot_type="panda",
        use_videos=record.job.store == "video",
        image_writer_threads=IMAGE_THREADS,
    )
    for number, demo in enumerate(demos, start=1):
        episode, frames = episodes[demo], load(work / "frames" / demo.name, Frames)
        for step in range(len(episode.action)):
            images = {f"observation.images.{camera}": decode(frames.images[camera][step]) for camera in CAMERAS}
            columns = {"observation.state": episode.state[step], "action": episode.action[step]}
            dataset.add_frame({**images, **columns, "task": languages[demo.task]})
        dataset.save_episode()
        progress(number)
    dataset.finalize()
    write_bytes(root / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def features(store: str) -> dict[str, dict[str, Any]]:
    """LIBERO's schema as LeRobot declares features."""
    image = {"dtype": store, "shape": (SIDE, SIDE, 3), "names": ["height", "width", "channels"]}
    return {
        **{f"observation.images.{camera}": image for camera in CAMERAS},
        "observation.state": {"dtype": "float32", "shape": (8,), "names": {"motors": STATE_NAMES}},
        "action": {"dtype": "float32", "shape": (7,), "names": {"motors": ACTION_NAMES}},
    }


def decode(png: bytes) -> np.ndarray:
    """uint8 [H, W, 3]."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def load[Kind: Episode | Frames](path: Path, kind: type[Kind]) -> Kind:
    """Raises DataError when the file is not what this program writes."""
    try:
        found = protocol.decode_reply(path.read_bytes())
    except protocol.ProtocolError as error:
        raise DataError(f"{path}: {error}; remove it and run the command again.") from None
    if not isinstance(found, kind):
        raise DataError(f"{path}: holds {type(found).__name__}, not {kind.__name__}; remove it and run again.")
    return found


def scores(episodes: dict[Demo, Any]) -> dict[int, tuple[int, int]]:
    """Per task: episodes solved, and tried."""
    counts: dict[int, tuple[int, int]] = {}
    for demo, episode in episodes.items():
        solved, tried = counts.get(demo.task, (0, 0))
        counts[demo.task] = solved + episode.success, tried + 1
    return counts


def made(demo: Demo, episode: Episode) -> Made:
    return Made(demo.task, demo.init, demo.seed, episode.attempts, len(episode.action))
