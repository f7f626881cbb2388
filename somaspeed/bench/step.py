"""`somaspeed-bench step`: native and somaspeed in turn, same weights, inputs, noise and time, in one process."""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataio.batch import Batch
from dataio.reader import ShardReader
from somaspeed.bench.stills import still_batch
from somaspeed.bench.variants import Variant
from somaspeed.config import parse_config
from somaspeed.policies import policy_class
from somaspeed.policies.base import Policy

OURS = "somaspeed"
PREPARATIONS = 5  # timed turns of the preparation for one of the step, which takes a hundred times as long


class Problem(NamedTuple):
    """What every contestant works on."""

    case: ModuleType  # the policy's bench module
    policy: Policy
    inputs: Any
    noise: Tensor
    time: Tensor
    batch: Batch  # what the loader delivered, on the device


class Outcome(NamedTuple):
    """One forward and backward."""

    seconds: float
    loss: Tensor


def build(
    policy_name: str,
    size: str,
    batch: int,
    device: torch.device,
    shards: str,
    precision: str,
    model: dict[str, Any] | None = None,
) -> Problem:
    """The policy at `size` with random weights, and `batch` frames spread over the shards.

    `model` adds keys to `[model]`, or replaces them.
    """
    case = importlib.import_module(f"somaspeed.policies.{policy_name}.bench")
    reader = ShardReader(shards)
    raw = {
        "output": "unused",
        "model": {"name": policy_name, "size": size, "dtype": precision, **case.MODEL, **(model or {})},
        "training": {"steps": 1, "microbatch": batch, "precision": precision},
    }
    config = parse_config(raw, "bench")
    policy = policy_class(policy_name)(config, reader.manifest, device)
    policy.load()
    loaded = still_batch(reader, policy, batch, config.training.seed).to(device)
    return Problem(case, policy, policy.prepare(loaded), loaded.extra["noise"], loaded.extra["time"], loaded)


def run_ours(problem: Problem, frozen: Tensor | None) -> Outcome:
    """Our step; with `frozen` given, that is taken as read from the cache."""
    policy, inputs = problem.policy, problem.inputs
    started = clock(policy.device)
    prefix = policy.prefix(inputs, policy.frozen(inputs) if frozen is None else frozen)
    loss = policy.expert_loss(prefix, inputs, problem.noise, problem.time)
    loss.backward()
    return Outcome(clock(policy.device) - started, loss.detach())


def run_native(problem: Problem, variant: Variant) -> Outcome:
    """LeRobot's own forward and backward."""
    policy = problem.policy
    with problem.case.native_mode(policy, variant):
        started = clock(policy.device)
        loss = problem.case.native_loss(policy, variant, problem.inputs, problem.noise, problem.time)
        loss.backward()
        return Outcome(clock(policy.device) - started, loss.detach())


def measure(problem: Problem, cached: bool, repeats: int) -> dict[str, Any]:
    """Every native variant and ours, in turn, `repeats` times after a first turn that warms up and is compared."""
    live = problem.policy.live_parameters()
    frozen = problem.policy.frozen(problem.inputs) if cached else None
    variants = {variant.name: variant for variant in problem.case.VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in (*variants, OURS)}
    losses: dict[str, float] = {}
    gradients: dict[str, list[Tensor]] = {}
    for turn in range(repeats + 1):
        for name in seconds:
            for parameter in live.values():
                parameter.grad = None
            outcome = run_ours(problem, frozen) if name == OURS else run_native(problem, variants[name])
            if turn:
                seconds[name].append(outcome.seconds / len(problem.noise))
                continue
            losses[name] = outcome.loss.item()
            gradients[name] = [gradient.grad.float() for gradient in live.values() if gradient.grad is not None]
            assert len(gradients[name]) == len(live), f"{name}: a live parameter has no gradient"
    document = compare(variants, seconds, losses, gradients)
    return document | measure_preparation(problem, document, cached, repeats)


def measure_preparation(problem: Problem, document: dict[str, Any], cached: bool, repeats: int) -> dict[str, Any]:
    """Seconds per sample from decoded frames to inputs, LeRobot's pre-processor and ours in turn, and the whole step's.

    `cached`: ours gets a batch without images, as the loader delivers samples whose prefix it reads from the cache.
    Reading the cache is left out, as decoding is. Empty for a policy whose case has no `native_prepare`.
    """
    if not hasattr(problem.case, "native_prepare"):
        return {}
    policy, batch = problem.policy, problem.batch
    native_prepare = problem.case.native_prepare(policy, batch)
    if cached:
        none = {camera: frames[:0] for camera, frames in batch.images.items()}
        batch = dataclasses.replace(batch, images=none, image_rows=batch.image_rows[:0])
    on_host = batch.to("cpu")

    def our_prepare() -> None:
        policy.host(on_host)
        policy.prepare(batch)

    seconds: dict[str, list[float]] = {"native": [], OURS: []}
    for turn in range(PREPARATIONS * repeats + 1):
        for name, prepare in (("native", native_prepare), (OURS, our_prepare)):
            started = clock(policy.device)
            prepare()
            if turn:
                seconds[name].append((clock(policy.device) - started) / len(problem.noise))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    whole = {name: median[name] + document[name]["seconds_per_sample"] for name in median}
    return {
        "preparation": {name: {"seconds_per_sample": value} for name, value in median.items()},
        "preparation_ratio": median["native"] / median[OURS],
        "ratio_with_preparation": whole["native"] / whole[OURS],
    }


def compare(
    variants: dict[str, Variant],
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    gradients: dict[str, list[Tensor]],
) -> dict[str, Any]:
    """The document's figures: medians, ratios, and our relative difference from the published variant."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    published = next(name for name, variant in variants.items() if variant.published)
    fastest = min(variants, key=lambda name: median[name])
    squared = sum(
        ((a - b).double().square().sum() for a, b in zip(gradients[published], gradients[OURS], strict=True)),
        start=torch.zeros((), dtype=torch.float64),
    )
    reference = sum(
        (a.double().square().sum() for a in gradients[published]), start=torch.zeros((), dtype=torch.float64)
    )
    return {
        "native": {"seconds_per_sample": median[published], "variant": published},
        "native_fastest": {"seconds_per_sample": median[fastest], "variant": fastest},
        OURS: {"seconds_per_sample": median[OURS]},
        "ratio": median[published] / median[OURS],
        "ratio_to_fastest": median[fastest] / median[OURS],
        "loss_difference": abs(losses[OURS] - losses[published]) / abs(losses[published]),
        "gradient_difference": (squared / reference).sqrt().item(),
        "variants": {
            name: {
                "seconds_per_sample": median[name],
                "minimum": min(seconds[name]),
                "maximum": max(seconds[name]),
                "ratio": median[name] / median[OURS],
            }
            for name in seconds
        },
        "scope": "forward and backward; no data loading, preprocessing or optimizer; CPU seconds on the CPU",
    }


def clock(device: torch.device) -> float:
    """Seconds: of the clock on a CUDA device, after all work so far; of this process on the CPU, which is shared."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()
