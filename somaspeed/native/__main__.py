"""`python -m somaspeed.native`: train with an upstream trainer under our stopwatch."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

from dataio.manifest import DataError, did_you_mean
from somaspeed.config import Config, ConfigError, load_config
from somaspeed.metrics import check_tracker
from somaspeed.native import BACKENDS
from somaspeed.parallel import Ranks
from somaspeed.policies.base import PolicyError
from somaspeed.rundir import make_way, process_started

EPILOG = """\
Under torchrun every rank takes part:
  torchrun --nproc-per-node 8 -m somaspeed.native --config configs/pi05/native.toml --dataset DIR
The dataset is a LeRobot v3 dataset; scripts/export_dataset.py makes one from shards.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m somaspeed.native",
        description="Train with the upstream trainer that the configuration's backend names, under our stopwatch.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="configs/<policy>/native.toml")
    parser.add_argument("--dataset", required=True, type=Path, metavar="DIR", help="a LeRobot v3 dataset")
    parser.add_argument(
        "--order",
        choices=("upstream", "somaspeed"),
        default="upstream",
        help="somaspeed: the order of our loader, to compare losses batch by batch (default: %(default)s)",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change one configuration key")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 after an error that the user can mend."""
    arguments = parse_arguments(argv)
    ranks = None
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_backend(config)
        check_tracker(config.training.tracker)
        if not (arguments.dataset / "meta" / "info.json").is_file():
            raise DataError(
                f"{arguments.dataset}: no meta/info.json: not a LeRobot dataset's directory. "
                "scripts/export_dataset.py makes one from shards."
            )
        if config.training.threads:
            torch.set_num_threads(config.training.threads)
        ranks = Ranks(config.parallel)
        train(config, arguments.dataset, ranks, arguments.order)
    except (ConfigError, DataError, PolicyError) as error:
        print(f"somaspeed.native: error: {error}", file=sys.stderr)
        return 2
    finally:
        if ranks:
            ranks.close()
    return 0


def check_backend(config: Config) -> None:
    """Raise ConfigError unless `backend` is a baseline of `model.name`, and for what no baseline does."""
    known = [name for name, backend in BACKENDS.items() if backend.policy == config.model.name]
    if config.backend not in known:
        raise ConfigError(
            f"backend = {config.backend!r} is no baseline of model.name = {config.model.name!r}"
            f"{did_you_mean(config.backend, known)}"
        )
    if config.data.held_out:
        raise ConfigError("data.held_out: the native baselines train on every episode; leave it out.")


def train(config: Config, dataset: Path, ranks: Ranks, order: str) -> None:
    """Run the baseline and write its files. Raises the errors that `main` reports."""
    from lerobot.datasets import LeRobotDatasetMetadata

    from somaspeed.native.stopwatch import Stopwatch

    backend = BACKENDS[config.backend]
    output = Path(config.output)
    if ranks.main:
        make_way(output)
    ranks.barrier()
    policy = importlib.import_module(f"somaspeed.native.{backend.policy}")
    trainer = importlib.import_module(f"somaspeed.native.{backend.trainer}")
    meta = LeRobotDatasetMetadata("local/dataset", root=dataset)
    stopwatch = Stopwatch(config, ranks, process_started())
    stopwatch.open()
    trainer.run(config, meta, policy.prepared(config, meta, ranks.device.type), stopwatch, order)
    summary = stopwatch.finish()
    if ranks.main:
        print(
            f"{summary.backend}: {summary.stop_reason} after {summary.completed_steps} of {summary.target_steps} "
            f"steps, {summary.wall_seconds:.0f} s ({summary.setup_seconds:.0f} s set-up), "
            f"{summary.samples_per_second_steady:.4g} samples/s steady over {summary.measured_steps} steps; "
            f"summary.json and metrics.jsonl in {output}"
        )


if __name__ == "__main__":
    sys.exit(main())
