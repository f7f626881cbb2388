"""`somaspeed-bench`: every measurement behind the project's claims, one sub-command each."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dataio.atomic import write_bytes
from dataio.manifest import DataError
from somaspeed.bench import compare, kernels, loader, operations, report, scaling, step, verify
from somaspeed.config import ConfigError
from somaspeed.policies import POLICIES
from somaspeed.policies.base import PolicyError

SIZES = ("tiny", "mid", "full")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="somaspeed-bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    flops = commands.add_parser("flops", help="TFLOP per sample of native and of this trainer, counted")
    flops.add_argument("--size", choices=SIZES, default="full")
    flops.set_defaults(run=run_flops)

    timed = commands.add_parser("step", help="forward and backward of native and of this trainer, timed in turn")
    timed.add_argument("--size", choices=SIZES, default="tiny")
    timed.add_argument("--batch", type=int, default=2, metavar="B")
    timed.add_argument("--cached", action="store_true", help="take the prefix as read from the cache")
    timed.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    timed.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    timed.add_argument("--shards", default="shards/libero_spatial_sample", metavar="DIR", help="where frames come from")
    timed.add_argument("--repeats", type=int, default=3, metavar="N", help="timed turns after the warm-up")
    timed.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads")
    timed.set_defaults(run=run_step)

    for command in (flops, timed):
        command.add_argument("--policy", required=True, choices=sorted(POLICIES))
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    for module in (compare, kernels, loader, operations, report, scaling, verify):
        module.add_command(commands)
    return parser.parse_args(argv)


def run_flops(arguments: argparse.Namespace) -> dict[str, Any]:
    case = importlib.import_module(f"somaspeed.policies.{arguments.policy}.bench")
    document = case.flops(arguments.size)
    print(f"{'TFLOP per sample':<34}{'':>10}{'× fewer':>10}")
    ours = document["somaspeed"]
    for name, value in document["native_variants"].items():
        print(f"native, {name:<26}{value:>10.4g}{value / ours:>10.2f}")
    for name in ("somaspeed", "somaspeed_cached"):
        print(f"{name:<34}{document[name]:>10.4g}{document['native'] / document[name]:>10.2f}")
    return document


def run_step(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.batch < 1 or arguments.repeats < 1:
        raise ConfigError("--batch and --repeats must be at least 1")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    problem = step.build(
        arguments.policy, arguments.size, arguments.batch, device, arguments.shards, arguments.precision
    )
    document = {
        "policy": arguments.policy,
        "size": arguments.size,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "batch": arguments.batch,
        "cached": arguments.cached,
        "precision": arguments.precision,
        "threads": arguments.threads,
        **step.measure(problem, arguments.cached, arguments.repeats),
    }
    print(f"{'seconds per sample':<34}{'median':>10}{'min':>10}{'max':>10}{'ratio':>8}")
    for name, row in document["variants"].items():
        label = name if name == step.OURS else f"native, {name}"
        print(
            f"{label:<34}{row['seconds_per_sample']:>10.4g}{row['minimum']:>10.4g}{row['maximum']:>10.4g}"
            f"{row['ratio']:>8.2f}"
        )
    print(
        f"relative difference from native: loss {document['loss_difference']:.1e}, "
        f"gradients {document['gradient_difference']:.1e}"
    )
    if "preparation" in document:
        native, ours = (document["preparation"][name]["seconds_per_sample"] for name in ("native", step.OURS))
        print(
            f"preparation from decoded frames: native {native * 1e3:.2f} ms per sample, somaspeed {ours * 1e3:.2f}; "
            f"ratio with it {document['ratio_with_preparation']:.2f}"
        )
    return document


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0, 2 after an error that the user can mend, or the status the sub-command documents."""
    arguments = parse_arguments(argv)
    try:
        document = arguments.run(arguments)
        if isinstance(document, int):
            return document
    except (ConfigError, DataError, PolicyError) as error:
        print(f"somaspeed-bench: error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        write_bytes(arguments.json, json.dumps(document, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
