"""`somaspeed-bench kernels`: arena update and pointwise chains against their rivals, on a CUDA device."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from somaspeed.config import ConfigError
from somaspeed.kernels.adamw import adamw, adamw_reference
from somaspeed.kernels.pointwise import (
    FlowLoss,
    GatedNorm,
    GeGLU,
    flow_reference,
    gated_norm_reference,
    geglu_reference,
)

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


def measure_chains(batch: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds forward and backward of each of the expert's pointwise chains, at π0.5's published widths, bf16."""
    steps, width, hidden, dimensions = 50, 1024, 4096, 32

    def random(*shape: int, learned: bool = True) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(learned)

    x, y = random(batch, steps, width), random(batch, steps, width)
    noise, actions = (random(batch, steps, dimensions, learned=False) for _ in range(2))
    chains: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
        "gated norm": (GatedNorm.apply, gated_norm_reference, (x, y, *(random(batch, width) for _ in range(3)), 1e-6)),
        "geglu": (GeGLU.apply, geglu_reference, (random(batch, steps, hidden), random(batch, steps, hidden))),
        "flow loss": (FlowLoss.apply, flow_reference, (noise, actions, random(batch, steps, dimensions), 7)),
    }
    times = {}
    for name, (kernel, reference, inputs) in chains.items():
        compiled = torch.compile(reference)
        times[name] = {
            "triton": milliseconds(partial(both_ways, kernel, inputs), repeats),
            "torch_compile": milliseconds(partial(both_ways, compiled, inputs), repeats),
            "eager": milliseconds(partial(both_ways, reference, inputs), repeats),
        }
    return times


def both_ways(chain: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    outputs = chain(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    learned = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    torch.autograd.grad(outputs, learned, [torch.ones_like(output) for output in outputs])


def copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "kernels", help="fused update and pointwise chains against their rivals, on a CUDA device"
    )
    parser.add_argument("--parameters", type=int, default=430_098_464, metavar="N", help="live (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=32, metavar="N", help="samples of the chains (default: %(default)s)"
    )
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
    document["chains"] = measure_chains(arguments.batch, arguments.repeats)
    print(f"pointwise chains at batch {arguments.batch}, bf16, milliseconds forward and backward")
    for name, times in document["chains"].items():
        print(f"{name:<16}" + "".join(f"{rival} {time:.3f}  " for rival, time in times.items()))
    return document
