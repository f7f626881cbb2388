"""`somaspeed-bench compare`: native, then somaspeed, on the same devices, in the published document's form."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from pathlib import Path
from typing import NamedTuple

from dataio.export import export_dataset
from dataio.manifest import MANIFEST_NAME, DataError, did_you_mean
from somaspeed.bench import hardware
from somaspeed.bench.documents import (
    AGGREGATION,
    Comparison,
    Comparisons,
    EqualBatch,
    Measurement,
    Phase,
    speedup,
    write_document,
)
from somaspeed.bench.launch import Job, raw_summary, run_phase
from somaspeed.config import Config, ConfigError, load_config
from somaspeed.native import faster_variants
from somaspeed.policies import POLICIES

BUDGET_SECONDS = 7080.0
DISCARDED_UPDATES = 5
# What a probe of a native variant gets after set-up: the most of these, within the budget.
PROBE_FRACTION, PROBE_LEAST_SECONDS, PROBE_UPDATES = 0.1, 15.0, 10
PUBLISHED = "published recipe"
SCOPE = (
    "action-expert fine-tuning; throughput only; batches are tuned per trainer (equal_batch, where present, is not), "
    "native is its fastest configuration that fits"
)


class Request(NamedTuple):
    """What to compare and how: the command's arguments, checked."""

    shards: Path
    dataset: Path | None
    configs: Path
    suffix: str
    budget_seconds: float
    world: int
    fastest: bool
    equal_batch: bool
    same_order: bool
    runs: Path
    overrides: list[str]


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "compare",
        help="native, then somaspeed, timed on the same devices",
        description="Exit status: 0 when every phase ran, 1 when one did not (the document says why), 2 for a usage "
        "error. The document is written after every phase.",
    )
    add_common(command)
    add = command.add_argument
    add("--dataset", type=Path, metavar="DIR", help="LeRobot dataset for native (default: exported from the shards)")
    add("--budget-seconds", type=float, default=BUDGET_SECONDS, metavar="S", help="per phase, set-up included")
    add("--devices", type=int, metavar="N", help="processes, one per device (default: every GPU, else one)")
    add(
        "--native",
        choices=("fastest", "published"),
        default="fastest",
        help="fastest: also try configurations that may be faster than the published recipe, and compare with the "
        "fastest (default); published: the recipe alone",
    )
    add("--equal-batch", action="store_true", help="also run somaspeed at native's batch")
    add("--same-order", action="store_true", help="give native the order of our loader, to overlay the losses")
    command.set_defaults(run=run)


def add_common(command: argparse.ArgumentParser) -> None:
    """The arguments that `compare` and `scaling` share."""
    add = command.add_argument
    add("--shards", required=True, type=Path, metavar="DIR", help="what scripts/shard_dataset.py wrote")
    add("--policies", default=",".join(POLICIES), metavar="LIST", help="default: %(default)s")
    add("--configs", type=Path, default=Path("configs"), metavar="DIR", help="default: %(default)s")
    add("--configs-suffix", default="", metavar="WORD", help="tiny: configs/<policy>/somaspeed-tiny.toml, …")
    add("--runs", type=Path, metavar="DIR", help="where runs and logs go (default: beside --out)")
    add("--out", required=True, type=Path, metavar="FILE", help="the document")
    add("overrides", nargs="*", metavar="section.key=value", help="change a configuration key of every phase")


def chosen_policies(text: str) -> list[str]:
    """The policies of a comma-separated list. Raises ConfigError with the closest match for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policies: {name!r} is no policy{did_you_mean(name, POLICIES)}")
    if not names:
        raise ConfigError("--policies names none.")
    return names


def run(arguments: argparse.Namespace) -> int:
    """Compare the policies one after the other. Returns 0, or 1 when a phase did not run."""
    policies = chosen_policies(arguments.policies)
    world = arguments.devices or hardware.devices()
    if arguments.budget_seconds <= 0 or world < 1:
        raise ConfigError("--budget-seconds and --devices must be positive.")
    request = Request(
        shards=arguments.shards,
        dataset=arguments.dataset,
        configs=arguments.configs,
        suffix=arguments.configs_suffix,
        budget_seconds=arguments.budget_seconds,
        world=world,
        fastest=arguments.native == "fastest",
        equal_batch=arguments.equal_batch,
        same_order=arguments.same_order,
        runs=arguments.runs or arguments.out.with_suffix("").with_name(arguments.out.stem + "_runs"),
        overrides=arguments.overrides,
    )
    for policy in policies:  # every configuration is read before the first hours are spent
        for backend in ("native", "somaspeed"):
            read_config(request, policy, backend, [])
    document = Comparisons(
        hardware=hardware.hardware(world),
        measurement=Measurement(
            phase_order=["native", "somaspeed"],
            same_gpus_within_each_comparison=True,
            phase_budget_seconds=request.budget_seconds,
            budget_includes_setup=True,
            discard_first_updates=DISCARDED_UPDATES,
            aggregation=AGGREGATION,
            scope=SCOPE,
        ),
        comparisons=[],
    )
    dataset = native_dataset(request)
    for policy in policies:
        compare(request, policy, dataset, document, arguments.out)
    return int(any(phase.error for c in document.comparisons for phase in phases(c)))


def phases(comparison: Comparison) -> list[Phase]:
    """The phases of one policy that were to run; probes of native's variants may fail."""
    found = [comparison.native, comparison.somaspeed]
    if comparison.native_published:
        found.append(comparison.native_published)
    if comparison.equal_batch:
        found.append(comparison.equal_batch.somaspeed)
    return found


def native_dataset(request: Request) -> Path | str:
    """The dataset that native reads, or why there is none."""
    try:
        if request.dataset:
            if not (request.dataset / "meta" / "info.json").is_file():
                raise DataError(f"{request.dataset}: no meta/info.json: not a LeRobot dataset's directory.")
            return request.dataset
        digest = hashlib.sha256((request.shards / MANIFEST_NAME).read_bytes()).hexdigest()[:12]
        root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "somaspeed" / "datasets"
        dataset = root / f"{request.shards.name}-{digest}"
        print(f"dataset of native: {dataset}", flush=True)
        export_dataset(request.shards, dataset)
        return dataset
    except (DataError, OSError) as error:
        return str(error)


def compare(request: Request, policy: str, dataset: Path | str, document: Comparisons, out: Path) -> None:
    """Run both phases of one policy, adding to `document` and writing it after each."""
    native, published, variants = run_native(request, policy, dataset)
    counts = raw_summary(request.runs / policy / "native")
    comparison = Comparison(
        model=policy,
        world_size=request.world,
        native=native,
        somaspeed=failed(request, policy, "somaspeed", "has not run yet"),
        driver_version=hardware.driver_version(),
        gpu_links=hardware.gpu_links(request.world),
        parameters=counts.get("parameters"),
        trainable_parameters=counts.get("trainable_parameters"),
        speedup=None,
        native_published=published,
        native_variants=variants,
    )
    document.comparisons.append(comparison)
    write_document(out, document)
    comparison.somaspeed = run_one(request, policy, "somaspeed", "somaspeed", request.budget_seconds, [])
    comparison.speedup = speedup(native, comparison.somaspeed)
    write_document(out, document)
    if request.equal_batch:
        batch = [f"training.microbatch={native.microbatch_per_gpu}", f"training.global_batch={native.global_batch}"]
        equal = run_one(request, policy, "somaspeed", "equal_batch", request.budget_seconds, batch)
        comparison.equal_batch = EqualBatch(equal, speedup(native, equal))
        write_document(out, document)
    ratio = f"{comparison.speedup:.2f}×" if comparison.speedup else "no ratio"
    print(f"{policy}: {ratio} of native ({native.variant})", flush=True)


def run_native(request: Request, policy: str, dataset: Path | str) -> tuple[Phase, Phase | None, list[Phase]]:
    """Native's fastest run, its run of the published recipe where that is another one, and the probes that chose."""
    if isinstance(dataset, str):
        return failed(request, policy, "native", dataset), None, []
    arguments = ["--dataset", str(dataset)] + (["--order", "somaspeed"] if request.same_order else [])

    def phase(name: str, variant: str, seconds: float, overrides: list[str]) -> Phase:
        return run_one(request, policy, "native", name, seconds, overrides, arguments, variant)

    published = phase("native", PUBLISHED, request.budget_seconds, [])
    if not request.fastest:
        return published, None, []
    seconds = probe_seconds(published, request.budget_seconds)
    candidates = faster_variants(read_config(request, policy, "native", []))
    probes = [
        phase(f"probe-{number}", name, seconds, overrides)
        for number, (name, overrides) in enumerate(candidates.items(), 1)
    ]
    best = max(probes, key=lambda probe: probe.rate or 0.0, default=None)
    if best is None or not best.rate or best.rate <= (published.rate or 0.0):
        return published, None, probes
    assert best.variant is not None
    fastest = phase("native-fastest", best.variant, request.budget_seconds, candidates[best.variant])
    if (fastest.rate or 0.0) > (published.rate or 0.0):
        return fastest, published, probes
    return published, None, [*probes, fastest]


def probe_seconds(published: Phase, budget: float) -> float:
    """How long a probe takes, after what the run of the published recipe needed for set-up and for an update."""
    summary = published.summary
    setup = summary.setup_seconds if summary else budget / 2
    update = published.global_batch / published.rate if published.rate and published.global_batch else 0.0
    updates = (DISCARDED_UPDATES + PROBE_UPDATES) * update
    return min(float(math.ceil(1.25 * setup + max(PROBE_LEAST_SECONDS, PROBE_FRACTION * budget, updates))), budget)


def run_one(
    request: Request,
    policy: str,
    backend: str,
    name: str,
    seconds: float,
    overrides: list[str],
    arguments: list[str] | None = None,
    variant: str | None = None,
) -> Phase:
    """Run one phase and say how it went."""
    output = request.runs / policy / name
    overrides = [
        "data.held_out=0",
        f"training.warmup_measurement={DISCARDED_UPDATES}",
        *request.overrides,
        *overrides,
        f"training.max_seconds={seconds}",
        f"output={output}",
    ]
    config_file = config_path(request, policy, backend)
    module = "somaspeed.native" if backend == "native" else "somaspeed.train"
    arguments = arguments or ["--shards", str(request.shards)]
    job = Job(
        module=module,
        arguments=["--config", str(config_file), *arguments, *overrides],
        config=read_config(request, policy, backend, overrides),
        config_name=str(config_file),
        world=request.world,
        output=output,
        log=output.with_name(f"{name}.log"),
        budget_seconds=seconds,
        variant=variant,
    )
    label = f"{policy} {name}" + (f" ({variant})" if variant else "")
    print(f"{label}: running, at most {seconds:.0f} s …", flush=True)
    phase = run_phase(job)
    if phase.error:
        print(f"{label}: {phase.error} (see {job.log})", flush=True)
    else:
        assert phase.summary is not None
        print(
            f"{label}: {phase.rate:.4g} samples/s steady over {phase.summary.measured_steps} updates of "
            f"{phase.global_batch}" + (f"\n{label}: warning: {phase.warning}" if phase.warning else ""),
            flush=True,
        )
    return phase


def config_path(request: Request, policy: str, backend: str) -> Path:
    suffix = f"-{request.suffix}" if request.suffix else ""
    return request.configs / policy / f"{backend}{suffix}.toml"


def read_config(request: Request, policy: str, backend: str, overrides: list[str]) -> Config:
    """The configuration of a phase. Raises ConfigError."""
    return load_config(config_path(request, policy, backend), [*request.overrides, *overrides])


def failed(request: Request, policy: str, backend: str, why: str) -> Phase:
    """A phase that could not be started."""
    config = read_config(request, policy, backend, [])
    return Phase(
        config=str(config_path(request, policy, backend)),
        backend=config.backend,
        microbatch_per_gpu=config.training.microbatch,
        global_batch=config.training.microbatch * request.world * config.accumulation(request.world),
        gradient_accumulation=config.accumulation(request.world),
        summary=None,
        finite_loss_updates=None,
        measured_samples=None,
        measured_seconds=None,
        peak_allocated_gib=None,
        error=why,
    )
