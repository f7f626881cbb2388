"""`somaspeed-bench kernels`: the arena update against its rivals and the bandwidth floor, on a CUDA device."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from somaspeed.config import ConfigError
from somaspeed.kernels.adamw import adamw, adamw_reference

SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
BYTES = 4 * 4 + 3 * 4 + 2  # per parameter: gradient, master and moments read; the latter three and the copy written


def milliseconds(call: Callable[[], None], repeats: int) -> float:
    """Median time of `call` from device events, after three warm-ups."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(parameters: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of one update of `parameters` live parameters with a bf16 compute copy, by implementation."""
    device = "cuda"
    flat = {name: torch.randn(parameters, device=device) for name in ("grad", "master", "exp_avg")}
    flat["exp_avg_sq"] = torch.rand(parameters, device=device)
    compute = flat["master"].to(torch.bfloat16)
    scalars = torch.tensor([0.5, 1e-5, 10.0, 0.0], device=device)
    inputs: dict[str, Any] = {**flat, "compute": compute, "scalars": scalars, **SETTINGS}

    parameter = torch.nn.Parameter(flat["master"])
    parameter.grad = flat["grad"]
    fused: Any = torch.optim.AdamW([parameter], lr=1e-5, fused=True, **SETTINGS)
    fused.grad_scale, fused.found_inf = torch.tensor(2.0, device=device), torch.zeros((), device=device)

    def torch_fused() -> None:
        fused.step()
        compute.copy_(parameter.detach())

    source, target = torch.empty(1 << 28, device=device), torch.empty(1 << 28, device=device)
    copied = milliseconds(lambda: copy(source, target), repeats)
    bandwidth = 2 * source.nbytes / copied * 1e3
    compiled = torch.compile(adamw_reference)
    return {
        "device": torch.cuda.get_device_name(),
        "parameters": parameters,
        "floor": parameters * BYTES / bandwidth * 1e3,
        "triton": milliseconds(lambda: adamw(**inputs), repeats),
        "torch_fused": milliseconds(torch_fused, repeats),
        "torch_compile": milliseconds(lambda: compiled(**inputs), repeats),
        "eager": milliseconds(lambda: adamw_reference(**inputs), repeats),
        "copy_bandwidth_bytes_per_second": bandwidth,
    }


def copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def add_command(commands: Any) -> None:
    parser = commands.add_parser("kernels", help="the fused update against its rivals, on a CUDA device")
    parser.add_argument("--parameters", type=int, default=430_098_464, metavar="N", help="live (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    parser.set_defaults(run=run)


def run(arguments: Any) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise ConfigError("kernels are timed on a CUDA device, and there is none here; `make test` interprets them.")
    document = measure(arguments.parameters, arguments.repeats)
    print(f"{document['parameters']:,} parameters on {document['device']}, milliseconds per update")
    for name in ("floor", "triton", "torch_fused", "torch_compile", "eager"):
        print(f"{name:<16}{document[name]:>10.3f}{document[name] / document['floor']:>8.2f} × floor")
    return document
