#!/usr/bin/env python
"""Turn shards back into a LeRobot v3 dataset, through LeRobot's own writer.

State, action, their statistics, task and timestamps are equal to the shards'; images are stored as PNG of the shards'
images. The dataset appears when it is complete: an interrupted export is begun anew by the same command.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.progress import Progress

from dataio.export import export_dataset
from dataio.manifest import DataError

EPILOG = """exit codes:
  0    complete (also when it was so before)
  1    failed; the message says why
  130  interrupted

example:
  python scripts/export_dataset.py --shards shards/libero_spatial_sample --out datasets/libero_spatial_sample
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", required=True, type=Path, metavar="DIR", help="what shard_dataset.py wrote")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the dataset goes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        with Progress(transient=True) as bar:
            task = bar.add_task("episodes", total=None)
            done = export_dataset(
                arguments.shards,
                arguments.out,
                lambda number, total: bar.update(task, completed=number, total=total),
            )
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        return 130
    state = "was complete already" if done.was_complete else "written"
    print(f"{arguments.out}: {done.episodes} episodes, {done.frames} frames, {state}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as by Ctrl-C
    sys.exit(main())
