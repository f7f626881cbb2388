"""`somaspeed-train`: fine-tune a policy's action expert on shards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dataio.batch import Batch
from dataio.loader import Loader, batches
from dataio.manifest import DataError
from dataio.reader import ShardReader
from dataio.split import split_episodes
from somaspeed import checkpoint, preflight
from somaspeed.config import Config, ConfigError, load_config, to_builtins
from somaspeed.data import decode_device, frame_cache_place_of, open_data, shards_in_flight
from somaspeed.draws import draw_batch
from somaspeed.evaluate.during import check_evaluation
from somaspeed.hub import Hub, HubError, UploadError
from somaspeed.loop import NonFiniteError, Trainer
from somaspeed.metrics import PhaseTimer, Summary, check_tracker
from somaspeed.optim import ArenaAdamW, make_arenas
from somaspeed.parallel import Ranks
from somaspeed.policies import policy_class
from somaspeed.policies.base import Policy, PolicyError
from somaspeed.prefix import PrefixStage, open_cached_prefix
from somaspeed.progress import closing_report
from somaspeed.reduction import Layout, Reduction
from somaspeed.rundir import make_way, process_started

EPILOG = """\
Everything is checked before weights are read. Under torchrun every rank takes part:
  torchrun --nproc-per-node 8 -m somaspeed.train --config FILE --shards DIR
Overrides follow the options:
  somaspeed-train --config FILE --shards DIR training.steps=1000 training.lr=1e-4
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="somaspeed-train",
        description="Fine-tune a vision-language-action policy's action expert on shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="TOML configuration, see configs/")
    parser.add_argument("--shards", required=True, metavar="DIR", help="what scripts/shard_dataset.py wrote")
    parser.add_argument("--resume", action="store_true", help="go on from the output's newest checkpoint")
    parser.add_argument("--check", action="store_true", help="check data, policy and configuration, then stop")
    parser.add_argument(
        "--push-to-hub",
        metavar="USER/NAME",
        help="at the end, upload the checkpoint's LeRobot policy directory to the Hugging Face Hub",
    )
    parser.add_argument("--private", action="store_true", help="make that repository private")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change one configuration key")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.private and not arguments.push_to_hub:
        parser.error("--private says how --push-to-hub makes its repository; give that too")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0, 2 after an error that the user can mend, 3 when a rank died, 4 when only the push
    to the Hub failed.
    """
    arguments = parse_arguments(argv)
    ranks = None
    hub = Hub(arguments.push_to_hub, arguments.private) if arguments.push_to_hub else None
    try:
        config = load_config(arguments.config, arguments.overrides)
        if config.training.threads:
            torch.set_num_threads(config.training.threads)
        ranks = Ranks(config.parallel)
        train(config, arguments.shards, ranks, resume=arguments.resume, check_only=arguments.check, hub=hub)
    except UploadError as error:
        print(f"somaspeed-train: error: {error}", file=sys.stderr)
        return 4
    except (ConfigError, DataError, PolicyError, checkpoint.CheckpointError, NonFiniteError, HubError) as error:
        print(f"somaspeed-train: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if ranks is None or ranks.world == 1:
            raise
        silent = ", ".join(map(str, ranks.missing())) or "none"
        print(
            f"somaspeed-train: error on rank {ranks.rank}: {error}\n"
            f"ranks that no longer answer: {silent}. See what they printed; --resume goes on from the last checkpoint.",
            file=sys.stderr,
        )
        return 3
    finally:
        if ranks:
            ranks.close()
    return 0


def train(
    config: Config, shards: str, ranks: Ranks, resume: bool, check_only: bool, hub: Hub | None = None
) -> Summary | None:
    """Check everything, then train, and push the last checkpoint where `hub` is given. Raises what `main` reports."""
    if config.backend != "somaspeed":
        raise ConfigError(f"backend = {config.backend!r} is not run by this command; it trains with 'somaspeed'.")
    config.accumulation(ranks.world)
    layout = Layout(ranks, config.parallel)
    reader = open_data(config, shards)
    block = shards_in_flight(config, reader, shards)
    training, held_out = split_episodes(reader, config.data.held_out, config.training.seed)
    policy = policy_class(config.model.name)(config, reader.manifest, ranks.device)
    output = Path(config.output)
    identity = run_identity(config, reader)
    resumed = checkpoint.load_state(output, identity) if resume else None
    if ranks.main:
        check_tracker(config.training.tracker)
        check_evaluation(config.evaluate)
        preflight.report(config, reader, policy, training, len(held_out), block, ranks.world)
        if hub:
            hub.check(create=not check_only)
    if check_only:
        return None
    if ranks.main and not resume:
        make_way(output)
    ranks.barrier()

    policy.load()
    arenas = make_arenas(policy.live_parameters(), policy.group_of, layout.shards)
    optimizer = ArenaAdamW(arenas, config.training, layout.shard, layout.shards, layout.total)
    if resumed:
        checkpoint.load_tensors(*resumed, optimizer)
    for arena in arenas:
        arena.check()
    if ranks.main:
        print(trained(policy), flush=True)
    loading: dict[str, Any] = {
        "windows": policy.windows,
        "cameras": policy.cameras,
        "microbatch": config.training.microbatch,
        "workers": config.training.workers,
        "prefetch": config.data.prefetch,
        "device": decode_device(ranks.device),
    }
    place = frame_cache_place_of(config, reader, policy.cameras, loading["device"])
    frames = loading["frame_cache"] = place.open() if place else None
    if frames and ranks.main:
        print(frames.describe(), flush=True)
    seed = config.training.seed

    cached = open_cached_prefix(config, ranks, reader, policy) if config.prefix.cache != "off" else None

    def host(batch: Batch, fixed: bool) -> dict[str, Any]:
        slots = cached.host(batch) if cached and not fixed else {}
        return policy.host(batch) | draw_batch(seed, batch, policy.draw, fixed) | slots

    def held_out_batches() -> Iterable[Batch]:
        mine = held_out[ranks.rank :: ranks.world]
        return batches(reader, mine, transform=lambda batch: host(batch, fixed=True), **loading)

    loader = Loader(
        reader,
        training,
        seed=seed,
        rank=ranks.rank,
        ranks=ranks.world,
        transform=lambda batch: host(batch, fixed=False),
        skip=cached.skip if cached else None,
        block=block,
        **loading,
    )
    if resumed:
        loader.load_state_dict(resumed[1].loader)
    timer = PhaseTimer(ranks.device)
    trainer = Trainer(
        config,
        ranks,
        policy,
        optimizer,
        Reduction(layout, optimizer, config.parallel.wire),
        PrefixStage(loader, policy, ranks.device, timer, cached),
        timer,
        held_out_batches if len(held_out) else None,
        identity,
        resumed,
        process_started(),
    )
    try:
        summary = trainer.run()
    finally:
        loader.close()
        if cached:
            cached.close()
        if frames:
            frames.close()
        reader.close()
    if ranks.main:
        closing_report(output, summary)
        if hub:
            push(hub, output, summary, reader)
    return summary


def push(hub: Hub, output: Path, summary: Summary, reader: ShardReader) -> None:
    """Upload the last checkpoint, unless the run was told to end: then there is no time. Raises UploadError."""
    hub.dataset = reader.manifest.source.dataset
    directory = (output / "checkpoints" / checkpoint.LAST / checkpoint.PRETRAINED).resolve()
    if summary.stop_reason == "signal":
        print(f"not pushed, the run is not finished. To push this checkpoint: {hub.command(directory)}")
    else:
        print(f"pushed      {hub.push(directory)}")


def trained(policy: Policy) -> str:
    """One line: how many parameters train, and which trainable ones are left out because no gradient reaches them."""
    live = policy.live_parameters()
    total = sum(parameter.numel() for parameter in live.values())
    line = f"{total:,} parameters in {len(live)} tensors train"
    left_out = policy.left_out()
    if left_out:
        names = ", ".join(f"{name} ({elements:,})" for name, elements in left_out.items())
        line += f"; left out, as no gradient reaches them: {names}"
    return line


def run_identity(config: Config, reader: ShardReader) -> dict[str, object]:
    """What makes a run the same run: data, order, policy."""
    return {
        "shards": reader.manifest.source.fingerprint,
        "samples": reader.manifest.samples,
        "training.seed": config.training.seed,
        "data.held_out": config.data.held_out,
        "data.map": config.data.map,
        **{f"model.{key}": value for key, value in to_builtins(config)["model"].items()},
    }


if __name__ == "__main__":
    sys.exit(main())
