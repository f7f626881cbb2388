"""`somaspeed-bench scaling`: our trainer on growing numbers of devices, at a fixed batch per device."""

from __future__ import annotations

import argparse
from pathlib import Path

from somaspeed.bench import hardware
from somaspeed.bench.compare import DISCARDED_UPDATES, add_common, chosen_policies
from somaspeed.bench.documents import Phase, Scaling, ScalingRow, efficiency_percent, write_document
from somaspeed.bench.launch import Job, run_phase
from somaspeed.config import ConfigError, load_config

SECONDS = 480.0
SETUP_ALLOWANCE_SECONDS = 900.0  # for set-up, on top of the measured seconds, before a run counts as stuck


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "scaling",
        help="our trainer on growing numbers of devices, fixed batch per device",
        description="Exit status: 0 when every run was complete, 1 when one was not (its row says why), 2 for a usage "
        "error. The document is written after every run.",
    )
    add_common(command)
    add = command.add_argument
    add("--devices", default="", metavar="LIST", help="e.g. 1,2,4,8 (default: powers of two up to every GPU)")
    add("--seconds", type=float, default=SECONDS, metavar="S", help="training time of each run (default: %(default)g)")
    add("--trials", type=int, default=1, metavar="N", help="runs per device count (default: %(default)s)")
    command.set_defaults(run=run)


def device_counts(text: str) -> list[int]:
    """The device counts of a comma-separated list, ascending. Raises ConfigError."""
    if not text:
        most = hardware.devices()
        return [count for count in (2**power for power in range(16)) if count <= most]
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--devices {text!r}: expected numbers separated by commas, e.g. 1,2,4") from None
    if counts[0] < 1:
        raise ConfigError("--devices: a run needs at least one device.")
    return counts


def run(arguments: argparse.Namespace) -> int:
    """Run every policy on every device count. Returns 0, or 1 when a run was not complete."""
    policies, counts = chosen_policies(arguments.policies), device_counts(arguments.devices)
    if arguments.seconds <= 0 or arguments.trials < 1:
        raise ConfigError("--seconds and --trials must be positive.")
    suffix = f"-{arguments.configs_suffix}" if arguments.configs_suffix else ""
    configs = {policy: arguments.configs / policy / f"somaspeed{suffix}.toml" for policy in policies}
    for file in configs.values():
        load_config(file, arguments.overrides)
    trials = "One trial" if arguments.trials == 1 else f"{arguments.trials} trials, their mean,"
    document = Scaling(
        system="SomaSpeed",
        task="supervised fine-tuning",
        measurement=f"{trials} per GPU count; at most {arguments.seconds:g} training seconds, the first "
        f"{DISCARDED_UPDATES} updates discarded; fixed batch per GPU; one node.",
        models={policy: [] for policy in policies},
        hardware=hardware.hardware(max(counts)),
    )
    runs = arguments.runs or arguments.out.with_suffix("").with_name(arguments.out.stem + "_runs")
    for policy in policies:
        rows = document.models[policy]
        for count in counts:
            phases = []
            for trial in range(arguments.trials):
                output = runs / policy / f"{count}-devices-{trial + 1}"
                print(f"{policy} on {count}: trial {trial + 1} of {arguments.trials} …", flush=True)
                phases.append(run_phase(job(arguments, configs[policy], count, output)))
            row = summarise(policy, count, phases)
            rows.append(row)
            row.efficiency_percent = efficiency_percent(row, rows[0]) if rows[0].samples_per_second else 0.0
            write_document(arguments.out, document)
            print(
                f"{policy} on {count}: {row.samples_per_second:.4g} samples/s, {row.efficiency_percent:.1f} %"
                + "".join(f"\n  {error}" for error in row.errors),
                flush=True,
            )
    return int(any(row.complete != "True" for rows in document.models.values() for row in rows))


def job(arguments: argparse.Namespace, config_file: Path, count: int, output: Path) -> Job:
    """One run on `count` devices."""
    overrides = [
        "data.held_out=0",
        f"training.warmup_measurement={DISCARDED_UPDATES}",
        *arguments.overrides,
        f"training.max_training_seconds={arguments.seconds}",
        f"output={output}",
    ]
    return Job(
        module="somaspeed.train",
        arguments=["--config", str(config_file), "--shards", str(arguments.shards), *overrides],
        config=load_config(config_file, overrides),
        config_name=str(config_file),
        world=count,
        output=output,
        log=output.with_name(f"{output.name}.log"),
        budget_seconds=arguments.seconds + SETUP_ALLOWANCE_SECONDS,
    )


def summarise(policy: str, count: int, phases: list[Phase]) -> ScalingRow:
    """The row of one device count; its efficiency is filled in by the caller."""
    rates = [phase.rate for phase in phases if phase.error is None and phase.rate]
    measured = sum(phase.measured_seconds or 0.0 for phase in phases if phase.error is None)
    batch = phases[0].microbatch_per_gpu or 0
    return ScalingRow(
        model=policy,
        system="somaspeed",
        gpus=float(count),
        per_gpu_batch=float((phases[0].global_batch or 0) / count),
        global_batch=float(phases[0].global_batch or batch * count),
        trials=float(len(phases)),
        complete=str(len(rates) == len(phases)),
        samples_per_second=sum(rates) / len(rates) if rates else 0.0,
        minimum_samples_per_second=min(rates, default=0.0),
        maximum_samples_per_second=max(rates, default=0.0),
        measured_training_seconds=measured / len(rates) if rates else 0.0,
        efficiency_percent=0.0,
        trial_samples_per_second=rates,
        errors=[phase.error for phase in phases if phase.error],
        command=phases[0].command,
    )
