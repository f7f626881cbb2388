"""`somaspeed-bench loader`: how far the loader is from its ceiling, and from other loaders on the same frames.

Every feed runs in a process of its own and all take turns, so that a busy machine slows all of them. The figure to
trust on shared cores is the CPU time per sample over the feed's whole process tree.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from dataio.manifest import DataError, did_you_mean
from dataio.reader import ShardReader
from somaspeed.bench.feeds import OURS, PEERS, Task, open_feed, samples_of_first_episodes
from somaspeed.config import ConfigError

# Samples per second of 8 A40 that each policy's arithmetic allows.
TARGETS = {"pi05": 265.0, "pi05, cached prefix": 670.0, "groot": 690.0, "molmoact2": 137.0}
HOST_THREADS = 48  # of the machine with 8 devices that the targets belong to
FRAMES = 512  # that take part, at least, where the set has them
START_SECONDS = 600


def add_command(commands: Any) -> None:
    """Add `loader` to the parser's sub-commands."""
    parser = commands.add_parser("loader", help="samples per second and CPU time per sample, ours and others'")
    parser.add_argument("--shards", default="shards/libero_spatial_sample", metavar="DIR")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of every turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument(
        "--against", default="", metavar="LIST", help=f"other loaders, of {', '.join(PEERS)} (default: none)"
    )
    parser.add_argument("--batch", type=int, default=32, metavar="B")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, metavar="N", help="of each (default: %(default)s)")
    device = "mixed" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "mixed"), default=device, help="of our decoder (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    parser.set_defaults(run=run_loader)


class Turn(msgspec.Struct, frozen=True):
    """One turn of one feed."""

    samples: int
    seconds: float
    cpu_seconds: float


def run_loader(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sub-command: measure, print, and return the document."""
    against = [name.strip() for name in arguments.against.split(",") if name.strip()]
    for name in against:
        if name not in PEERS:
            raise ConfigError(f"--against {name!r}{did_you_mean(name, PEERS)}")
    for flag in ("batch", "workers", "repeats", "seconds"):
        if getattr(arguments, flag) <= 0:
            raise ConfigError(f"--{flag} must be above 0")
    reader = ShardReader(arguments.shards)
    samples = samples_of_first_episodes(reader, FRAMES)
    with tempfile.TemporaryDirectory(prefix="somaspeed-bench-") as scratch:
        task = Task(str(Path(arguments.shards).absolute()), samples, arguments.batch, arguments.workers,
                    arguments.device, scratch)  # fmt: skip
        rows = summarise(measure([*OURS, *against], task, arguments.seconds, arguments.repeats))
    document = {
        "shards": reader.manifest.name,
        "frames": samples,
        "cameras": [[camera.name, camera.height, camera.width] for camera in reader.manifest.cameras],
        "batch": arguments.batch,
        "workers": arguments.workers,
        "device": arguments.device,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": arguments.seconds,
        "repeats": arguments.repeats,
        "somaspeed": rows["somaspeed"],
        "ceiling": {**rows["decode"], "decode": rows["decode"], "read": rows["read"]},
        "frame_cache": rows["frame_cache"],
        "headspace": rows["headspace"],
        "against": {name: rows[name] for name in against},
        "of_ceiling": rows["somaspeed"]["samples_per_second"] / rows["decode"]["samples_per_second"],
        "projection": project(rows),
    }
    show(rows, document)
    return document


def measure(names: list[str], task: Task, seconds: float, repeats: int) -> dict[str, list[Turn]]:
    """`repeats` turns of each feed, all feeds open from the start and taking turns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["somaspeed.bench.feeds"])  # imported once, for all feeds
    feeds: dict[str, tuple[Any, Connection]] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    try:
        for name in names:
            print(f"preparing {name}", file=sys.stderr)
            ours, theirs = context.Pipe()
            process = context.Process(target=take_turns, args=(name, task, theirs))  # it has children of its own
            process.start()
            theirs.close()
            feeds[name] = process, ours
            receive(name, ours)
        for number in range(repeats):
            print(f"turn {number + 1} of {repeats}", file=sys.stderr)
            for name, (_, connection) in feeds.items():
                connection.send(seconds)
                turns[name].append(msgspec.convert(receive(name, connection), Turn))
    finally:
        for _, connection in feeds.values():
            connection.close()  # the feed reads the end of its orders and stops
        for process, _ in feeds.values():
            process.join(30)
            if process.is_alive():
                end_tree(process.pid)
                process.join()
    return turns


def receive(name: str, connection: Connection) -> Any:
    """A feed's next word. Raises DataError with what went wrong in it."""
    if not connection.poll(START_SECONDS):
        raise DataError(f"{name}: no answer in {START_SECONDS} s.")
    try:
        word = connection.recv()
    except EOFError:
        raise DataError(f"{name}: its process ended without a word; see what it printed.") from None
    if isinstance(word, str):
        raise DataError(f"{name}: {word}")
    return word


def take_turns(name: str, task: Task, connection: Connection) -> None:
    """The process of one feed: open it, then take a turn per order until the orders end."""
    try:
        with open_feed(name, task) as feed:
            for _ in range(3 * task.workers + 3):  # buffers are allocated and queues reach their usual level
                feed()
            connection.send(None)
            while True:
                try:
                    seconds = connection.recv()
                except EOFError:
                    return
                for _ in range(2 * task.workers + 2):  # what was queued while others had their turn
                    feed()
                connection.send(msgspec.to_builtins(turn(feed, seconds)))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def turn(feed: Any, seconds: float) -> Turn:
    """Batches for at least `seconds`, from one delivery to another, so that work in progress is alike at both ends."""
    samples, cpu, started = 0, cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        samples += feed()
    elapsed = time.perf_counter() - started
    return Turn(samples, elapsed, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """CPU seconds, user and system, of this process and all below it, those that have ended included."""
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def end_tree(pid: int) -> None:
    """Kill a process that we started, and its children."""
    process = psutil.Process(pid)
    for each in [*process.children(recursive=True), process]:
        each.kill()


def summarise(turns: dict[str, list[Turn]]) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum over the turns of each feed."""
    rows = {}
    for name, each in turns.items():
        rates = [turn.samples / turn.seconds for turn in each]
        costs = [1e3 * turn.cpu_seconds / turn.samples for turn in each]
        rows[name] = {
            "samples_per_second": statistics.median(rates),
            "minimum_samples_per_second": min(rates),
            "maximum_samples_per_second": max(rates),
            "cpu_ms_per_sample": statistics.median(costs),
            "minimum_cpu_ms_per_sample": min(costs),
            "maximum_cpu_ms_per_sample": max(costs),
        }
    return rows


def project(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """CPU threads that 8 devices need at each policy's target rate: rate × CPU seconds per sample."""
    feeds = [name for name in rows if name not in ("decode", "read", "headspace")]
    return {
        policy: {"samples_per_second": rate} | {name: rate * rows[name]["cpu_ms_per_sample"] / 1e3 for name in feeds}
        for policy, rate in TARGETS.items()
    }


def show(rows: dict[str, dict[str, float]], document: dict[str, Any]) -> None:
    """Print the document as tables."""
    labels = {"decode": "ceiling, decode only", "read": "ceiling, read only", "frame_cache": "somaspeed, frame cache"}
    ours = rows["somaspeed"]["cpu_ms_per_sample"]
    print(f"{'':<26}{'samples/s':>10}{'min':>9}{'max':>9}{'CPU ms/sample':>15}{'min':>8}{'max':>8}{'× ours':>9}")
    for name, row in rows.items():
        rate = [row[f"{kind}samples_per_second"] for kind in ("", "minimum_", "maximum_")]
        cost = [row[f"{kind}cpu_ms_per_sample"] for kind in ("", "minimum_", "maximum_")]
        print(
            f"{labels.get(name, name):<26}{rate[0]:>10.0f}{rate[1]:>9.0f}{rate[2]:>9.0f}"
            f"{cost[0]:>15.3f}{cost[1]:>8.3f}{cost[2]:>8.3f}{cost[0] / ours:>9.2f}"
        )
    print(f"the loader runs at {document['of_ceiling']:.0%} of its decoding ceiling")
    print(f"CPU threads that 8 devices need, of {HOST_THREADS}:")
    for policy, row in document["projection"].items():
        needs = ", ".join(f"{name} {need:.2f}" for name, need in row.items() if name != "samples_per_second")
        print(f"  {policy} at {row['samples_per_second']:.0f} samples/s: {needs}")
