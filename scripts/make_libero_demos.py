#!/usr/bin/env python
"""Let a state-based oracle solve LIBERO Spatial in the real simulator, and keep its successes as a LeRobot dataset.

Every episode starts from one of LIBERO's stored initial states; only those that the simulator's own check calls solved
are kept. Frames are rendered afterwards. An interrupted run is resumed by the same command. `make sim` first.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dataio.manifest import DataError
from somaspeed.arguments import natural, positive, stop_when_terminated, task_list
from somaspeed.demos import DemoRecord, Stage, make_demos
from somaspeed.sim.pool import Pool, PoolError, default_workers, simulator_command
from somaspeed.sim.protocol import RENDERINGS

SUITE = "libero_spatial"
LINE_SECONDS = 30  # between lines where there is no terminal
DONE = {"solve": "solving", "render": "rendering", "write": "writing"}

EPILOG = """\
Time on one core: 3 to 5 s of physics an episode, and 0.3 s a frame to render both cameras; 2 GB of memory a worker.
example:
  python scripts/make_libero_demos.py --out data/libero_spatial_oracle --episodes-per-task 50
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="the dataset; the same command resumes there")
    add("--tasks", type=task_list, default=None, metavar="all|0,3", help="which of the ten tasks (default: all)")
    add("--episodes-per-task", type=positive, default=50, metavar="N", help="tried; solved ones are kept (default: 50)")
    add("--seed", type=natural, default=0, metavar="S", help="the same seed gives the same episodes (default: 0)")
    add("--noise", type=float, default=0.5, metavar="X", help="how much episodes differ, 0 to 1 (default: 0.5)")
    add("--store", choices=("image", "video"), default="image", help="frames as PNG, or AV1 (default: image)")
    add(
        "--rendering",
        choices=RENDERINGS,
        default="full",
        help="full: the simulator's own pixels; fast: no multi-sampling or mirrors, a third of the time",
    )
    add("--workers", type=positive, default=default_workers(), metavar="N", help="processes (default: one a core)")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.noise <= 1:
        parser.error("--noise must be between 0 and 1")
    return arguments


class ProgressBar:
    """A bar for every stage, with the oracle's success per task; without a terminal, a line every half minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: dict[str, int] = {}
        self._printed = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("episodes  {task.fields[score]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, stage: Stage, done: int, total: int, score: dict[int, tuple[int, int]]) -> None:
        """See make_demos."""
        text = "  ".join(f"{task}: {solved}/{tried}" for task, (solved, tried) in sorted(score.items()))
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(DONE[stage], total=total, score="")
        self._progress.update(self._bars[stage], completed=done, score=text if stage == "solve" else "")
        now = time.monotonic()
        if not self._console.is_terminal and (done == total or now - self._printed > LINE_SECONDS):
            self._printed = now
            self._console.print(f"{DONE[stage]}: {done} of {total} episodes; solved per task {text}")


def summarise(console: Console, out: Path, record: DemoRecord) -> None:
    for task, solved in record.solved.items():
        steps = [made.steps for made in record.episodes if made.task == task]
        mean = f", {sum(steps) / len(steps):.0f} steps on average" if steps else ""
        console.print(f"task {task}: solved {solved} of {record.tried[task]}{mean}")
    frames = sum(made.steps for made in record.episodes)
    console.print(f"{out}: {len(record.episodes)} episodes, {frames:,} frames (a LeRobot dataset)")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(soft_wrap=True, highlight=False)
    try:
        command = simulator_command(SUITE, arguments.rendering)
        with Pool(command, arguments.workers, console.print) as pool, ProgressBar(console) as bar:
            record = make_demos(
                arguments.out,
                SUITE,
                arguments.tasks,
                arguments.episodes_per_task,
                arguments.seed,
                arguments.noise,
                arguments.store,
                pool,
                bar.show,
            )
    except (DataError, PoolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    summarise(console, arguments.out, record)
    return 0


if __name__ == "__main__":
    stop_when_terminated()
    sys.exit(main())
