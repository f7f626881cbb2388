#!/usr/bin/env python
"""Turn a LeRobot dataset (v3 or v2.1) into WebDataset shards with an index, for somaspeed-train.

Frames are decoded once, stored as JPEG or PNG, and checked; episodes whose bytes are corrupt are left out and
named in the manifest. An interrupted run is resumed by the same command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dataio.claim import Options, parse_part
from dataio.encode import SUBSAMPLINGS, make_codec
from dataio.manifest import DataError
from dataio.sharding import Outcome, shard_dataset

EXIT_CODES = """exit codes:
  0    complete
  3    complete, but episodes with corrupt bytes were left out; they are listed, and named in manifest.json
  1    failed; the message says why
  130  interrupted; the same command resumes

examples:
  python scripts/shard_dataset.py --dataset ~/data/my_robot --out shards/my_robot
  python scripts/shard_dataset.py --dataset old/set --out shards/set --map observation.images.top=image
  python scripts/shard_dataset.py --dataset big/set --out shards/big --part 3/16   # on any machine that sees both
  python scripts/shard_dataset.py --dataset lerobot/pusht --out shards/pusht --episodes 0:50 --codec png
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", required=True, metavar="DIR_OR_HUB_ID", help="a LeRobot dataset, image or video kind")
    add(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="where the shards go; the same command resumes there",
    )
    add("--episodes", metavar="LIST", help="which episodes, e.g. 0:10 (0 to 9) or 0,3,6:8 (default: all)")
    add("--codec", choices=("jpeg", "png"), default="jpeg", help="png is lossless, about three times as large")
    add("--quality", type=int, default=95, help="of JPEG, 1 to 100 (default: %(default)s)")
    add(
        "--subsampling",
        choices=SUBSAMPLINGS,
        default="4:4:4",
        help="of JPEG's colours (default: %(default)s)",
    )
    add(
        "--samples-per-shard",
        type=int,
        default=1024,
        metavar="N",
        help="frames per tar (default: %(default)s)",
    )
    add(
        "--order",
        choices=("episode", "shuffled"),
        default="episode",
        help="shuffled permutes the frames over all shards, for sequential streaming, and needs twice the "
        "disk space while it runs (default: %(default)s)",
    )
    add(
        "--rotate",
        type=int,
        choices=(0, 180),
        default=0,
        help="turn every frame by this many degrees; the manifest records it (default: %(default)s)",
    )
    add(
        "--map",
        action="append",
        default=[],
        metavar="KEY=NAME",
        help="another name for a feature: a camera's name, or a column's key (repeat for more)",
    )
    add(
        "--part",
        metavar="K/N",
        help="make only the K-th of N parts of the shards; parts are independent jobs, and the last one to end, or the "
        "command without --part, writes the manifest",
    )
    add("--name", help="the shard set's name in the manifest (default: the dataset's)")
    cores = len(os.sched_getaffinity(0))
    add(
        "--workers",
        type=int,
        default=cores,
        metavar="N",
        help="processes (default: one per core, %(default)s)",
    )
    return parser.parse_args(argv)


def parse_map(entries: list[str]) -> dict[str, str]:
    """The --map options as a dictionary. Raises DataError for one that is no pair, or a key given twice."""
    names: dict[str, str] = {}
    for entry in entries:
        key, equals, name = entry.partition("=")
        if not (key and equals and name) or key in names:
            raise DataError(f"--map {entry!r}: give the dataset's key and its new name once, as in KEY=NAME.")
        names[key] = name
    return names


class ProgressBar:
    """A bar with rates for every stage; without a terminal, a line every half minute."""

    def __init__(self, console: Console):
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("images, {task.fields[rates]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, images: int) -> None:
        """See dataio.jobs.Meter."""
        self._name, self._images, self._done, self._new, self._bytes = name, images, 0, 0, 0
        self._start = self._printed = time.monotonic()
        self._task = self._progress.add_task(name, total=images, rates="")

    def advance(self, images: int, written: int) -> None:
        """See dataio.jobs.Meter."""
        self._done += images
        self._new += images if written else 0
        self._bytes += written
        self._progress.update(self._task, advance=images, rates=self._rates())
        now = time.monotonic()
        if self._done == self._images or now - self._printed > 30:
            self._printed = now
            if not self._console.is_terminal:
                self._console.print(f"{self._name}: {self._done} of {self._images} images, {self._rates()}")

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{self._new / seconds:,.0f} images/s, {self._bytes / 1e6 / seconds:.1f} MB/s"


def summarise(console: Console, out: Path, outcome: Outcome) -> None:
    """Print what was left out, and what is in the shards."""
    manifest = outcome.manifest
    if manifest is None:
        console.print(f"{out}: this part is complete; {outcome.shards_left} shards of other parts are not there yet")
        return
    for new, old in outcome.renamed.items():
        console.print(f"feature {old} → {new}", markup=False)
    for line in outcome.skipped:
        console.print(f"skipped feature {line}", markup=False)
    for entry in manifest.quarantined:
        console.print(f"left out episode {entry.episode}: {entry.reason}", markup=False, style="yellow")
    if outcome.was_complete:
        console.print(f"{out} is complete already.")
    megabytes = sum(shard.tar_bytes for shard in manifest.shards) / 1e6
    images = "" if outcome.psnr is None else f"; stored images have a PSNR of {outcome.psnr:.1f} dB"
    console.print(
        f"{out}: {manifest.samples:,} samples of {len(manifest.episodes)} episodes, "
        f"{len(manifest.cameras)} cameras, {len(manifest.shards)} shards, {megabytes:,.1f} MB; "
        f"{len(manifest.quarantined)} episodes left out{images}"
    )


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(soft_wrap=True)
    try:
        options = Options(
            codec=make_codec(arguments.codec, arguments.quality, arguments.subsampling),
            name=arguments.name,
            samples_per_shard=arguments.samples_per_shard,
            order=arguments.order,
            rotation=arguments.rotate,
            map=parse_map(arguments.map),
        )
        part = parse_part(arguments.part) if arguments.part else None
        with ProgressBar(console) as bar:
            outcome = shard_dataset(
                arguments.dataset, arguments.out, options, arguments.episodes, arguments.workers, bar, part
            )
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {arguments.out}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    summarise(console, arguments.out, outcome)
    return 3 if outcome.manifest and outcome.manifest.quarantined else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as by Ctrl-C
    sys.exit(main())
