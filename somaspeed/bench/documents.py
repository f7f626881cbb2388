"""The two published documents as types: `comparisons.json` and `scaling.json`, and the figures derived in them.

Keys are the published ones; keys beside them (commands, variants, phase seconds) are ours and optional, so that the
same types read a published document and one of our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dataio.atomic import write_bytes
from dataio.manifest import DataError
from somaspeed.config import ConfigError

AGGREGATION = "sum(global_batch) / sum(max_rank_step_seconds), after warmup"


class PhaseSummary(msgspec.Struct, omit_defaults=True):
    """What one run reports of itself, from its `summary.json`. `setup_…` is before the first update."""

    completed_steps: int
    target_steps: int
    setup_seconds: float
    setup_peak_allocated_gib: float
    wall_seconds: float
    samples_per_second_end_to_end: float
    samples_per_second_steady: float
    measured_steps: int
    bounded_early_stop: bool
    stop_reason: str | None = None


class Phase(msgspec.Struct):
    """One run of one trainer, or why there is none (`error`; then the measured values are null)."""

    config: str
    backend: str
    microbatch_per_gpu: int | None
    global_batch: int | None
    gradient_accumulation: int | None
    summary: PhaseSummary | None
    finite_loss_updates: int | None
    measured_samples: int | None
    measured_seconds: float | None
    peak_allocated_gib: float | None
    error: str | None = None
    warning: str | None = None  # why its rate is to be taken with care
    variant: str | None = None  # of native: which of its configurations
    command: list[str] = []
    log: str | None = None
    seconds: dict[str, float] = {}  # mean seconds per update, by phase of the update
    losses: list[tuple[int, float]] = []  # (update, loss) of the logged updates
    versions: dict[str, str] = {}

    @property
    def rate(self) -> float | None:
        """Steady samples per second, None where there are none."""
        return (self.summary.samples_per_second_steady or None) if self.summary else None


class EqualBatch(msgspec.Struct):
    """Our trainer at native's batch: the part of the speed-up that is not the larger batch."""

    somaspeed: Phase
    speedup: float | None


class Comparison(msgspec.Struct, omit_defaults=True):
    """Native and somaspeed, one after the other on the same devices. `native` is native's fastest configuration."""

    model: str
    world_size: int
    native: Phase
    somaspeed: Phase
    driver_version: str | None
    gpu_links: list[list[str]]
    parameters: int | None
    trainable_parameters: int | None
    speedup: float | None
    native_published: Phase | None = None  # the published recipe, where another configuration is faster
    native_variants: list[Phase] = []  # the short runs that chose the fastest
    equal_batch: EqualBatch | None = None


class Hardware(msgspec.Struct):
    """The machine. `gpus` is 0 on a CPU; `gpu` then names the processor."""

    gpus: int
    gpu: str
    memory_mib_per_gpu: int | None
    single_node: bool
    allocated_cpu_threads: int
    allocated_host_memory_gib: int


class Measurement(msgspec.Struct):
    """How the comparison was measured."""

    phase_order: list[str]
    same_gpus_within_each_comparison: bool
    phase_budget_seconds: float
    budget_includes_setup: bool
    discard_first_updates: int
    aggregation: str
    scope: str


class Comparisons(msgspec.Struct):
    """`comparisons.json`."""

    hardware: Hardware
    measurement: Measurement
    comparisons: list[Comparison]


class ScalingRow(msgspec.Struct, omit_defaults=True):
    """One device count. Counts are floats and `complete` is text in the published form."""

    model: str
    system: str
    gpus: float
    per_gpu_batch: float
    global_batch: float
    trials: float
    complete: str
    samples_per_second: float
    minimum_samples_per_second: float
    maximum_samples_per_second: float
    measured_training_seconds: float
    efficiency_percent: float
    trial_samples_per_second: list[float] = []
    errors: list[str] = []
    command: list[str] = []


class Scaling(msgspec.Struct, omit_defaults=True):
    """`scaling.json`."""

    system: str
    task: str
    measurement: str
    models: dict[str, list[ScalingRow]]
    hardware: Hardware | None = None


Document = Comparisons | Scaling


class Derived(NamedTuple):
    """A figure of a document and the value that its inputs give."""

    where: str
    stated: float | None
    computed: float | None

    @property
    def deviation(self) -> float:
        """Relative; infinite where one of the two is missing or not a number."""
        if self.stated is None and self.computed is None:
            return 0.0
        if self.stated is None or self.computed is None:
            return float("inf")
        scale = max(abs(self.stated), abs(self.computed))
        distance = abs(self.stated - self.computed) / scale if scale else 0.0
        return distance if distance == distance else float("inf")


def read_document(path: Path) -> Document:
    """Read a comparison or scaling document, published or our own. Raises DataError saying what is wrong in it."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such document; `somaspeed-bench compare` and `scaling` write them.") from None
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    kind: Any = Comparisons if isinstance(raw, dict) and "comparisons" in raw else Scaling
    if kind is Scaling and not (isinstance(raw, dict) and "models" in raw):
        raise DataError(f"{path}: neither a comparison (key 'comparisons') nor a scaling document (key 'models').")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}") from None


def write_document(path: Path, document: Document) -> None:
    """Write a document atomically."""
    try:
        write_bytes(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {error}") from None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient; None where either is missing or the denominator is zero."""
    return numerator / denominator if numerator is not None and denominator else None


def speedup(native: Phase, somaspeed: Phase) -> float | None:
    """How many times native's steady rate ours is."""
    return ratio(somaspeed.rate, native.rate)


def efficiency_percent(row: ScalingRow, base: ScalingRow) -> float:
    """Rate per device relative to the smallest device count's, in percent."""
    return 100 * (row.samples_per_second / row.gpus) / (base.samples_per_second / base.gpus)


def derived(document: Document) -> Iterator[Derived]:
    """Every figure of `document` that follows from others in it."""
    if isinstance(document, Comparisons):
        for comparison in document.comparisons:
            yield from derived_comparison(comparison, document.measurement.discard_first_updates)
        return
    for model, rows in document.models.items():
        base = min(rows, key=lambda row: row.gpus, default=None)
        for row in rows:
            assert base is not None
            where = f"{model}.{row.gpus:g}"
            yield Derived(f"{where}.efficiency_percent", row.efficiency_percent, efficiency_percent(row, base))
            yield Derived(f"{where}.global_batch", row.global_batch, row.gpus * row.per_gpu_batch)
            if trials := row.trial_samples_per_second:
                yield Derived(f"{where}.samples_per_second", row.samples_per_second, sum(trials) / len(trials))
                yield Derived(f"{where}.minimum_samples_per_second", row.minimum_samples_per_second, min(trials))
                yield Derived(f"{where}.maximum_samples_per_second", row.maximum_samples_per_second, max(trials))


def derived_comparison(comparison: Comparison, discarded: int) -> Iterator[Derived]:
    """The derived figures of one comparison: both phases' and the speed-up."""
    phases = {"native": comparison.native, "somaspeed": comparison.somaspeed}
    if comparison.native_published:
        phases["native_published"] = comparison.native_published
    if comparison.equal_batch:
        phases["equal_batch.somaspeed"] = comparison.equal_batch.somaspeed
    for name, phase in phases.items():
        yield from derived_phase(f"{comparison.model}.{name}", phase, comparison.world_size, discarded)
    yield Derived(f"{comparison.model}.speedup", comparison.speedup, speedup(comparison.native, comparison.somaspeed))
    if equal := comparison.equal_batch:
        equal_speedup = speedup(comparison.native, equal.somaspeed)
        yield Derived(f"{comparison.model}.equal_batch.speedup", equal.speedup, equal_speedup)


def derived_phase(where: str, phase: Phase, world: int, discarded: int) -> Iterator[Derived]:
    """The derived figures of one phase that has run."""
    summary = phase.summary
    if summary is None:
        return
    batch: Any = phase.global_batch
    computed = {
        "summary.samples_per_second_steady": (
            summary.samples_per_second_steady,
            ratio(phase.measured_samples, phase.measured_seconds) or 0.0,
        ),
        "summary.samples_per_second_end_to_end": (
            summary.samples_per_second_end_to_end,
            summary.completed_steps * batch / summary.wall_seconds,
        ),
        "summary.measured_steps": (summary.measured_steps, max(0, summary.completed_steps - discarded)),
        "measured_samples": (phase.measured_samples, summary.measured_steps * batch),
        "global_batch": (batch, (phase.microbatch_per_gpu or 0) * world * (phase.gradient_accumulation or 0)),
    }
    for name, (stated, value) in computed.items():
        yield Derived(f"{where}.{name}", stated, value)
