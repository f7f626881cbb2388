"""`somaspeed-bench verify`: recompute every derived figure of comparison and scaling documents."""

from __future__ import annotations

import argparse
from pathlib import Path

from somaspeed.bench.documents import Comparisons, derived, read_document

TOLERANCE = 1e-9


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("verify", help="recompute every derived figure of documents; exit 1 above 1e-9")
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="comparison or scaling documents")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the largest relative deviation of every file. Returns 0, or 1 where one is above 1e-9.

    Raises DataError for a file that is no such document.
    """
    status = 0
    for path in arguments.files:
        document = read_document(path)
        figures = sorted(derived(document), key=lambda figure: -figure.deviation)
        failed = [figure for figure in figures if not figure.deviation <= TOLERANCE]
        largest = figures[0].deviation if figures else 0.0
        print(f"{path}: {len(figures)} derived figures, largest relative deviation {largest:.1e}")
        for figure in failed:
            print(f"  {figure.where}: says {figure.stated}, its inputs give {figure.computed}")
        if isinstance(document, Comparisons):
            for comparison in document.comparisons:
                for name in ("native", "somaspeed"):
                    phase = getattr(comparison, name)
                    if phase.error:
                        print(f"  {comparison.model} {name} did not run: {phase.error}")
                    elif phase.warning:
                        print(f"  {comparison.model} {name}: {phase.warning}")
        if failed or not figures:
            status = 1
    return status
