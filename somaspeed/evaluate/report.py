"""What an evaluation says: success per task with its uncertainty, and everything that makes it comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from somaspeed.evaluate.blind import BLIND
from somaspeed.evaluate.interval import wilson
from somaspeed.evaluate.trials import Outcome, Settings

RIVALS = {
    "untrained": "with random weights",
    "replay": "blind replay of one demo",
    "regressor": "state-only regressor",
}


class Rate(msgspec.Struct, frozen=True):
    """A success rate with its 95 % Wilson interval."""

    successes: int
    episodes: int
    success_rate: float
    interval: tuple[float, float]
    mean_steps_of_successes: float | None


def rate_of(outcomes: Sequence[Outcome]) -> Rate:
    steps = [outcome.steps for outcome in outcomes if outcome.success]
    return Rate(
        len(steps),
        len(outcomes),
        len(steps) / len(outcomes) if outcomes else 0.0,
        wilson(len(steps), len(outcomes)),
        sum(steps) / len(steps) if steps else None,
    )


def document(
    checkpoint: str, settings: Settings, languages: Sequence[str], outcomes: Sequence[Outcome], crashes: int
) -> dict[str, Any]:
    """The JSON of an evaluation."""
    by_task: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_task.setdefault(outcome.task, []).append(outcome)
    return {
        "checkpoint": checkpoint,
        "settings": msgspec.to_builtins(settings),
        **msgspec.to_builtins(rate_of(outcomes)),
        "tasks": [
            {"task": task, "language": languages[task], **msgspec.to_builtins(rate_of(part))}
            for task, part in sorted(by_task.items())
        ],
        "simulator_crashes": crashes,
        "against": {},
        "outcomes": msgspec.to_builtins(list(outcomes)),
    }


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the table and the settings beneath it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True, max_width=40)
    for title in ("success", "rate", "95 % interval", "steps"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in report["tasks"]:
        table.add_row(f"{row['task']}  {row['language']}", *cells(row))
    table.add_row("all", *cells(report), style="bold")
    for name, rival in report["against"].items():
        table.add_row(f"all, {RIVALS[name]}", *cells(rival))
    console.print(table)
    settings = report["settings"]
    flow = f"{settings['flow_steps']} flow steps" if settings["flow_steps"] else "its own flow steps"
    console.print(
        f"{settings['suite']}, {settings['policy']}: {settings['n_action_steps']} actions of chunks of "
        f"{settings['chunk_size']}, {flow}, at most {settings['max_steps']} control "
        f"steps, seed {settings['seed']}, initial states from {settings['first_init']}"
    )
    console.print(", ".join(f"{name} {version}" for name, version in settings["versions"].items()))
    if report["simulator_crashes"]:
        console.print(f"simulator processes died {report['simulator_crashes']} times; their episodes were run again")
    if not BLIND.keys() & set(report["against"]):
        console.print("Success alone does not prove vision: blind drivers solve some of LIBERO Spatial; see --against.")


def cells(row: dict[str, Any]) -> list[str]:
    low, high = row["interval"]
    steps = row["mean_steps_of_successes"]
    return [
        f"{row['successes']}/{row['episodes']}",
        f"{row['success_rate']:.1%}",
        f"{low:.1%} – {high:.1%}",
        "" if steps is None else f"{steps:.0f}",
    ]
