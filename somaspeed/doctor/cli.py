"""`somaspeed-doctor`: replay training frames open loop, and say in words what is wrong with a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a checkpoint is complete; read when the hub's client is imported

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from dataio.atomic import write_bytes  # noqa: E402
from dataio.manifest import Column, DataError  # noqa: E402
from dataio.reader import ShardReader  # noqa: E402
from somaspeed.actor import Actor  # noqa: E402
from somaspeed.arguments import device, natural, stop_when_terminated  # noqa: E402
from somaspeed.checkpoint import CheckpointError  # noqa: E402
from somaspeed.doctor import actions, images, inputs, replay  # noqa: E402
from somaspeed.doctor.findings import Dimension, Finding  # noqa: E402

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}

EPILOG = """\
exit codes: 0 nothing wrong, 1 problems were found, 2 the examination was not possible,
            130 interrupted
A policy that passes may still fail in closed loop: somaspeed-eval tells.
"""


class Examination(msgspec.Struct, frozen=True):
    """The whole result."""

    checkpoint: str
    shards: str
    frames: int
    steps: int
    seed: int
    dimensions: list[Dimension]
    findings: list[Finding]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="somaspeed-doctor",
        description="Replay training frames open loop through a checkpoint, and say in words what is wrong with it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="DIR", help="a LeRobot policy directory, or a run's output")
    add("--shards", required=True, metavar="DIR", help="the data it was trained on")
    add("--frames", type=int, default=48, metavar="N", help="training frames to replay (default: %(default)s)")
    add("--seed", type=natural, default=0, metavar="S", help="of choice of frames and noise (default: %(default)s)")
    add("--device", type=device, metavar="cpu|cuda", help="of the policy (default: cuda where there is one)")
    add("--json", type=Path, metavar="FILE", help="where the result goes as well")
    arguments = parser.parse_args(argv)
    if arguments.frames < 8:
        parser.error("--frames must be at least 8; fewer say nothing")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0 healthy, 1 problems, 2 not examined."""
    arguments = parse_arguments(argv)
    stop_when_terminated()
    console = Console(highlight=False, soft_wrap=True)
    try:
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
        reader = ShardReader(arguments.shards, "size")
        with console.status("loading the checkpoint") as status:
            actor = Actor(arguments.checkpoint, arguments.device)
            status.update(f"replaying {arguments.frames} frames, with the images as they are, turned and exchanged")
            dimensions, findings = examine(actor, reader, arguments.frames, arguments.seed)
    except (CheckpointError, DataError, OSError) as error:
        print(f"somaspeed-doctor: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    result = Examination(
        str(arguments.checkpoint),
        str(arguments.shards),
        min(arguments.frames, len(reader)),
        actor.n_action_steps,
        arguments.seed,
        dimensions,
        findings,
    )
    show(console, result)
    if arguments.json:
        write_bytes(arguments.json, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return int(any(finding.level == "problem" for finding in findings))


def examine(actor: Actor, reader: ShardReader, count: int, seed: int) -> tuple[list[Dimension], list[Finding]]:
    """All checks of a checkpoint against the shards. Without the policy's cameras and widths nothing is replayed."""
    manifest = reader.manifest
    processors = {"pre-processor": actor.preprocessor, "post-processor": actor.postprocessor}
    findings = inputs.check_keys(actor, manifest)
    findings += actions.check_statistics(processors, manifest, actor.origin.get("shards"))
    if any(finding.check == "key map" and finding.level == "problem" for finding in findings):
        return [], findings
    frames = replay.sample_frames(reader, actor.cameras, actor.n_action_steps, count, seed)
    names = dimension_names(manifest.column(replay.ACTION))
    findings += inputs.check_prompts(actor, frames)
    findings += actions.check_round_trip(actor, frames, names)
    predicted = replay.predict(actor.chunks, frames, frames.images, seed)
    if not np.isfinite(predicted).all():
        text = "the policy's actions are not all finite numbers: its weights or statistics are broken"
        return [], [*findings, Finding("error", "problem", text)]
    mean = np.array(manifest.statistics[replay.ACTION].mean)
    table = replay.dimensions(predicted, frames, mean, names)
    findings += actions.check_errors(table)
    findings += actions.check_signs(table, predicted, frames)
    findings += actions.check_reach(table, predicted, frames)
    findings += images.check_images(actor.chunks, frames, predicted, seed)
    return table, findings


def dimension_names(column: Column) -> list[str]:
    """The names of a column's dimensions, as LeRobot keeps them: a list, or one list under a heading."""
    width = column.shape[0]
    names: Any = column.names
    if isinstance(names, dict):
        names = [name for group in names.values() for name in group]
    return list(names) if names and len(names) == width else [str(dim) for dim in range(width)]


def show(console: Console, result: Examination) -> None:
    if result.dimensions:
        console.print(f"open loop over {result.frames} training frames, {result.steps} actions each: mean |error|")
        table = Table(box=None, pad_edge=False)
        for title in ("action", "policy", "constant mean", "ratio", "correlation"):
            table.add_column(title, justify="left" if title == "action" else "right")
        for dim, row in enumerate(result.dimensions):
            ratio = f"{row.error / row.constant:.2f}" if row.constant else "–"
            table.add_row(
                f"{dim} {row.name}", f"{row.error:.4f}", f"{row.constant:.4f}", ratio, f"{row.correlation:+.2f}"
            )
        console.print(table)
    for finding in result.findings:
        console.print(f"[{STYLES[finding.level]}]{finding.level:<8}[/] ", end="")
        console.print(f"{finding.check}: {finding.text}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
