"""`somaspeed-eval`: roll a checkpoint out in the LIBERO simulator and count successes."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a checkpoint is complete; read when the hub's client is imported

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402

from dataio.atomic import write_bytes  # noqa: E402
from dataio.manifest import DataError, did_you_mean  # noqa: E402
from dataio.reader import ShardReader  # noqa: E402
from somaspeed.actor import Actor, fingerprint  # noqa: E402
from somaspeed.arguments import device, natural, positive, stop_when_terminated, task_list  # noqa: E402
from somaspeed.checkpoint import CheckpointError  # noqa: E402
from somaspeed.demos import CAMERAS, checked_tasks  # noqa: E402
from somaspeed.evaluate import report  # noqa: E402
from somaspeed.evaluate.blind import BLIND, Demonstrations  # noqa: E402
from somaspeed.evaluate.trials import Driver, Outcome, Records, Settings, Trial, plan, play  # noqa: E402
from somaspeed.sim.pool import Pool, PoolError, default_workers, simulator_command  # noqa: E402
from somaspeed.sim.protocol import RENDERINGS, Observation, Ready  # noqa: E402

MAX_STEPS = 280  # LeRobot's limit for LIBERO Spatial: the longest demonstration has 193 steps
AGAINST = ("untrained", *BLIND)
PACKAGES = ("somaspeed", "lerobot", "torch", "transformers")

EPILOG = """\
The same command resumes; the same seed gives the same episodes. `make sim` installs the simulator.
example:
  somaspeed-eval --checkpoint runs/pi05/checkpoints/last --suite libero_spatial --episodes 20 --n-action-steps 10
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="somaspeed-eval",
        description="Roll a checkpoint out in the real LIBERO simulator, through its own LeRobot processors.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="DIR", help="a LeRobot policy directory, or a run's output")
    add("--suite", default="libero_spatial", help="e.g. libero_spatial, libero_spatial_swap (default: %(default)s)")
    add("--tasks", type=task_list, metavar="all|0,3", help="task numbers (default: all)")
    add("--episodes", type=positive, default=10, metavar="N", help="per task (default: %(default)s)")
    add("--first-init", type=natural, default=0, metavar="K", help="first stored initial state (default: %(default)s)")
    add("--seed", type=natural, default=0, metavar="S", help="of simulator and policy (default: %(default)s)")
    add("--n-action-steps", type=positive, metavar="N", help="actions taken of each chunk (default: the policy's)")
    add("--flow-steps", type=positive, metavar="N", help="of the policy's sampler (default: the policy's)")
    add(
        "--max-steps",
        type=positive,
        default=MAX_STEPS,
        metavar="N",
        help="control steps, at most (default: %(default)s, for LIBERO Spatial)",
    )
    add(
        "--against",
        type=contestants,
        default=[],
        metavar="LIST",
        help="also play untrained,replay,regressor: the policy with random weights, one demonstration blindly, and a "
        "network of task and proprioception alone",
    )
    add("--shards", metavar="DIR", help="demonstrations for replay and regressor")
    add("--workers", type=positive, default=default_workers(), metavar="N", help="environments (default: one a core)")
    add(
        "--rendering",
        choices=RENDERINGS,
        default="full",
        help="full: the simulator's own pixels; fast: no multi-sampling or mirrors, a third of the time",
    )
    add("--videos", type=natural, default=1, metavar="N", help="episodes filmed per task (default: %(default)s)")
    add("--device", type=device, metavar="cpu|cuda", help="of the policy (default: cuda where there is one)")
    add("--output", type=Path, metavar="DIR", help="records and videos (default: evaluation/SUITE by the checkpoint)")
    add("--json", type=Path, metavar="FILE", help="where the result goes (default: OUTPUT/result.json)")
    arguments = parser.parse_args(argv)
    if BLIND.keys() & set(arguments.against) and not arguments.shards:
        parser.error("--against replay or regressor needs --shards with demonstrations")
    return arguments


def contestants(text: str) -> list[str]:
    for name in (names := text.split(",")):
        if name not in AGAINST:
            raise argparse.ArgumentTypeError(f"{name!r} is not known{did_you_mean(name, AGAINST)}")
    return names


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0, 2 after an error that the user can mend, 130 when interrupted."""
    arguments = parse_arguments(argv)
    stop_when_terminated()
    console = Console(highlight=False, soft_wrap=True)
    try:
        evaluate(arguments, simulator_command(arguments.suite, arguments.rendering), console)
    except (CheckpointError, DataError, PoolError, OSError) as error:
        print(f"somaspeed-eval: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def evaluate(arguments: argparse.Namespace, command: list[str], console: Console) -> dict:
    """Play, print and store; returns the JSON document. `command` starts a simulator process."""
    with Pool(command, arguments.workers, console.print) as pool:
        ready = pool.greeting()
        tasks = {task: ready.tasks[task].inits for task in checked_tasks(ready, arguments.tasks)}
        actor = Actor(arguments.checkpoint, arguments.device, arguments.n_action_steps, arguments.flow_steps)
        actor.check_cameras(CAMERAS)
        settings = settings_of(arguments, actor, ready)
        output = arguments.output or actor.directory.parent / "evaluation" / ready.suite
        check_inits(tasks, arguments.first_init, arguments.episodes, console)
        trials = plan(tasks, arguments.episodes, arguments.first_init, arguments.seed)
        languages = [task.language for task in ready.tasks]
        drivers, shown = rivals(arguments, actor, languages, list(tasks))

        def contest(name: str, driver: Driver, directory: Path, settings: Settings) -> dict:
            console.print(f"{name}: {len(trials)} episodes")
            records, crashes = Records(directory, settings), pool.crashes.total()
            counter = Counter(console, trials, records)
            outcomes = play(trials, driver, records, pool, arguments.max_steps, arguments.videos, counter.show)
            return report.document(name, settings, languages, outcomes, pool.crashes.total() - crashes)

        result = contest(str(arguments.checkpoint), Sighted(actor, languages), output, settings)
        result["against"] = {
            name: contest(
                name,
                driver,
                output / name,
                msgspec.structs.replace(settings, policy=name, demonstrations=shown if driver.blind else ""),
            )
            for name, driver in drivers.items()
        }
    report.show(console, result)
    path = arguments.json or output / "result.json"
    write_bytes(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    console.print(f"stored in {path}; episodes and videos in {output}")
    return result


def settings_of(arguments: argparse.Namespace, actor: Actor, ready: Ready) -> Settings:
    return Settings(
        suite=ready.suite,
        checkpoint_sha256=fingerprint(actor.directory),
        policy=actor.config.type,
        n_action_steps=actor.n_action_steps,
        chunk_size=actor.chunk_size,
        flow_steps=actor.flow_steps,
        max_steps=arguments.max_steps,
        seed=arguments.seed,
        first_init=arguments.first_init,
        versions={name: importlib.metadata.version(name) for name in PACKAGES} | ready.versions,
        rendering=ready.rendering,
    )


class Sighted:
    """A policy as a driver: it is given the images, the state and the instruction."""

    blind = False

    def __init__(self, actor: Actor, languages: list[str]) -> None:
        self._actor, self._languages = actor, languages

    def act(self, task: int, seen: Observation, seed: int) -> np.ndarray:
        return self._actor.act(seen.images, seen.state, self._languages[task], seed)


def check_inits(tasks: Mapping[int, int], first: int, episodes: int, console: Console) -> None:
    """Raise DataError when a task has no initial state number `first`; say so when the episodes use states again."""
    least = min(tasks.values())
    if first >= least:
        raise DataError(f"--first-init {first}: there are {least} stored initial states, 0 to {least - 1}.")
    if first + episodes > least:
        console.print(f"after initial state {least - 1} they begin again at 0, with other seeds")


def rivals(
    arguments: argparse.Namespace, actor: Actor, languages: list[str], tasks: list[int]
) -> tuple[dict[str, Driver], str]:
    """The drivers of `--against`, by name, and what demonstrations the blind ones know."""
    drivers: dict[str, Driver] = {}
    shown = ""
    if "untrained" in arguments.against:
        drivers["untrained"] = Sighted(actor.untrained(), languages)
    if BLIND.keys() & set(arguments.against):
        reader = ShardReader(arguments.shards, "size")
        demonstrations = Demonstrations(reader, {task: languages[task] for task in tasks}, actor.n_action_steps)
        drivers |= {name: driver(demonstrations) for name, driver in BLIND.items() if name in arguments.against}
        shown = reader.manifest.source.fingerprint
    return drivers, shown


class Counter:
    """A line per finished episode, with the success so far."""

    def __init__(self, console: Console, trials: list[Trial], records: Records) -> None:
        self._console, self._total = console, len(trials)
        there = [records.outcomes[key] for t in trials if (key := (t.task, t.episode)) in records.outcomes]
        self._done, self._successes = len(there), sum(outcome.success for outcome in there)
        if there:
            console.print(f"resumed: {self._done} of {len(trials)} episodes were played before")

    def show(self, outcome: Outcome) -> None:
        self._done += 1
        self._successes += outcome.success
        self._console.print(
            f"{self._done:>4}/{self._total}  task {outcome.task} episode {outcome.episode}: "
            f"{'success' if outcome.success else 'failure'} in {outcome.steps} steps, {outcome.seconds:.0f} s;  "
            f"so far {self._successes / self._done:.0%}"
        )


if __name__ == "__main__":
    sys.exit(main())
