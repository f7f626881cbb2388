#!/usr/bin/env python
"""Measure everything that needs a device in one bounded run: correctness first, then rates, a short table last.

The three policies run at full size with random weights, native and somaspeed in turn on the same inputs. Each part is
skipped when its turn comes too late, and a part that fails is recorded and the rest goes on. Nothing is downloaded:
torch, Triton, LeRobot and this repository suffice; the loader part also needs DALI.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dataio.atomic import write_bytes  # noqa: E402 (the repository is found only after the line above)
from dataio.reader import ShardReader  # noqa: E402
from somaspeed.bench import hardware, step  # noqa: E402
from somaspeed.kernels.adamw import adamw, adamw_reference  # noqa: E402
from somaspeed.policies.tokenizer import train_tokenizer  # noqa: E402
from somaspeed.versions import installed_versions  # noqa: E402

POLICIES = ("pi05", "molmoact2", "groot")
BATCH = {"pi05": 8, "molmoact2": 8, "groot": 16}
PART_SECONDS = 45.0  # a part is not begun with less than this left on a device
MAXIMUM_LOSS, MAXIMUM_GRADIENT = 1e-3, 1e-2  # relative, in float32 on the device; TF32 is off
UPDATE = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--seconds", type=float, default=360.0, metavar="S", help="no part begins after this (default: %(default)g)")
    add("--size", choices=("tiny", "mid", "full"), default="full" if cuda else "tiny", help="default: %(default)s")
    add("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu", help="default: %(default)s")
    add("--policies", default=",".join(POLICIES), metavar="LIST", help="default: %(default)s")
    add("--batch", type=int, metavar="B", help="of every policy (default: one each)")
    add("--repeats", type=int, default=5, metavar="N", help="timed turns (default: %(default)s)")
    add("--shards", type=Path, default=ROOT / "shards/libero_spatial_sample", metavar="DIR")
    add("--json", type=Path, metavar="FILE", help="also write the record here, after every part")
    return parser.parse_args(argv)


class Record:
    """What was measured so far, and the clock."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.started = arguments, time.perf_counter()
        self.parts: dict[str, dict[str, Any]] = {}

    def left(self) -> float:
        return self.arguments.seconds - (time.perf_counter() - self.started)

    def part(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Run one part, unless it is too late for it; keep its result or why there is none."""
        needed = PART_SECONDS if self.arguments.device == "cuda" else 0.0
        if self.left() < needed:
            self.parts[name] = {"skipped": f"{max(0.0, self.left()):.0f} s left"}
            return
        begun = time.perf_counter()
        try:
            result = measure()
        except Exception as error:  # one part's failure, whatever it is, must not lose the others
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        self.parts[name] = {**result, "part_seconds": time.perf_counter() - begun}
        print(f"{name}: {line(self.parts[name])}", flush=True)
        if self.arguments.device == "cuda":
            torch.cuda.empty_cache()
        self.write()

    def document(self) -> dict[str, Any]:
        return {
            "date": datetime.date.today().isoformat(),
            "hardware": msgspec.to_builtins(hardware.hardware(1)),
            "driver_version": hardware.driver_version(),
            "versions": installed_versions(),
            "command": ["python", "scripts/gpu_record.py", *sys.argv[1:]],
            "parts": self.parts,
        }

    def write(self) -> None:
        if self.arguments.json:
            write_bytes(self.arguments.json, json.dumps(self.document(), indent=1).encode() + b"\n")


def line(part: dict[str, Any]) -> str:
    """A part's result in one line of the table."""
    if "skipped" in part or "error" in part:
        return part.get("error") or f"skipped: {part['skipped']}"
    return part["line"]


def update_correctness(device: str) -> dict[str, Any]:
    """The update kernel (on the CPU its reference) against torch's AdamW in float32, three steps."""
    torch.manual_seed(0)
    size = 1 << 20
    master = torch.randn(size, device=device)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, **UPDATE)
    moments = torch.zeros(2, size, device=device)
    compute = master.to(torch.bfloat16)
    function = adamw if device == "cuda" else adamw_reference
    for number in range(1, 4):
        grad = torch.randn(size, device=device)
        parameter.grad = grad * 0.5
        optimizer.step()
        scalars = torch.tensor([0.5, 1e-3, number, 0.0], device=device)
        function(grad, master, moments[0], moments[1], compute, scalars, **UPDATE)
    difference = ((master - parameter).abs().max() / parameter.abs().max()).item()
    copied = torch.equal(compute, master.to(torch.bfloat16))
    if difference > 1e-6 or not copied:
        raise AssertionError(f"the update differs from torch's by {difference:.1e}; copy equal: {copied}")
    return {"difference": difference, "line": f"equal to torch's AdamW within {difference:.1e}"}


def step_correctness(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Loss and gradients of the tiny model on the device against LeRobot's, in float32."""
    problem = step.build(policy, "tiny", 4, torch.device(arguments.device), str(arguments.shards), "float32")
    found = step.measure(problem, cached=False, repeats=1)
    loss, gradient = found["loss_difference"], found["gradient_difference"]
    if not (loss <= MAXIMUM_LOSS and gradient <= MAXIMUM_GRADIENT):
        raise AssertionError(f"differs from native: loss {loss:.1e}, gradients {gradient:.1e}")
    return {"loss": loss, "gradient": gradient, "line": f"loss {loss:.1e}, gradients {gradient:.1e} from native"}


def step_rates(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Native's variants and ours in turn at `size`, uncached and with the frozen part as read from the cache."""
    device = torch.device(arguments.device)
    batch = arguments.batch or (BATCH[policy] if arguments.size == "full" else 2)
    precision = "bfloat16" if arguments.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as directory, random_on(device):
        model = {"tokenizer": make_tokenizer(arguments.shards, directory)} if policy == "pi05" else {}
        problem = step.build(policy, arguments.size, batch, device, str(arguments.shards), precision, model)
    reset_peak(device)
    found = step.measure(problem, cached=False, repeats=arguments.repeats)
    cached = step.measure(problem, cached=True, repeats=1)["somaspeed"]["seconds_per_sample"]
    native, ours = found["native_fastest"]["seconds_per_sample"], found["somaspeed"]["seconds_per_sample"]
    published = found["native"]["seconds_per_sample"]
    text = (
        f"batch {batch}: native {1 / published:.4g} (fastest {1 / native:.4g}), somaspeed {1 / ours:.4g}, "
        f"cached {1 / cached:.4g} samples/s; {published / ours:.2f}× (fastest {native / ours:.2f}×)"
    )
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {**found, "batch": batch, "cached_seconds_per_sample": cached, "peak_gib": peak, "line": text}


def make_tokenizer(shards: Path, directory: str) -> str:
    """A tokenizer trained on the tasks: random weights do not need the published one."""
    prompts = [f"Task: {task}, State: 0 1 2 3;\nAction: " for task in ShardReader(shards).manifest.tasks]
    train_tokenizer(prompts, 512).save_pretrained(directory)
    return directory


@contextlib.contextmanager
def random_on(device: torch.device) -> Iterator[None]:
    """Draw random weights on the device: billions of them take a minute from a CPU generator, and any will do here."""
    if device.type == "cpu":
        yield
        return
    real = torch.randn

    def drawn(*shape: Any, generator: Any = None, **options: Any) -> torch.Tensor:
        return real(*shape, **{"device": device, **options})

    with mock.patch.object(torch, "randn", drawn):
        yield


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def update_rate() -> dict[str, Any]:
    """The update kernel against torch's and the compiler's, and the bandwidth floor."""
    from somaspeed.bench import kernels

    found = kernels.measure(430_098_464, 10)
    found["chains"] = kernels.measure_chains(32, 10)
    names = ("floor", "triton", "torch_fused", "torch_compile", "eager")
    return {**found, "line": ", ".join(f"{name} {found[name]:.3g}" for name in names) + " ms"}


def loader_rate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples per second of the loader alone, decoding where training would."""
    try:
        from dataio.loader import Loader
    except ImportError as error:
        return {"skipped": f"no DALI here ({error.name})"}
    device: Any = "mixed" if arguments.device == "cuda" else "cpu"
    seconds = 10.0 if arguments.device == "cuda" else 1.0
    loader = Loader(ShardReader(arguments.shards), None, {}, None, 0, microbatch=32, workers=2, device=device)
    with loader as batches:
        for _ in range(4):
            next(batches)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            count += len(next(batches))
        if device == "mixed":
            torch.cuda.synchronize()
        rate = count / (time.perf_counter() - begun)
    return {"samples_per_second": rate, "decoding": device, "line": f"{rate:.4g} samples/s, decoding on {device}"}


def main(argv: list[str] | None = None) -> int:
    """Run every part. Returns 0, or 1 when one failed; parts skipped for lack of time are no failure."""
    arguments = parse_arguments(argv)
    record = Record(arguments)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    policies = [name for name in arguments.policies.split(",") if name]
    record.part("update, correct", lambda: update_correctness(arguments.device))
    for policy in policies:
        record.part(f"{policy}, correct", lambda policy=policy: step_correctness(policy, arguments))
    for policy in policies:
        record.part(f"{policy}, {arguments.size}", lambda policy=policy: step_rates(policy, arguments))
    if arguments.device == "cuda":
        record.part("update, rate", update_rate)
    record.part("loader", lambda: loader_rate(arguments))
    record.write()
    print(f"\n{hardware.hardware(1).gpu}, {time.perf_counter() - record.started:.0f} s")
    for name, part in record.parts.items():
        print(f"  {name:<18} {line(part)}")
    return int(any("error" in part for part in record.parts.values()))


if __name__ == "__main__":
    sys.exit(main())
