"""`somaspeed-bench operations`: what one forward and backward dispatches, and where the host would wait for the device.

Counted by a dispatch mode, so no device is needed: every operator that computes is about one kernel, and whatever
reads a value back (`item`, `nonzero`, a boolean index) stalls the launch queue on a device.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from somaspeed.bench import step
from somaspeed.config import ConfigError
from somaspeed.policies import POLICIES

VIEWS = frozenset(
    "view _unsafe_view transpose permute t expand slice select unsqueeze squeeze detach alias split split_with_sizes "
    "unbind as_strided lift_fresh reshape _reshape_alias diagonal narrow".split()
)
SCALARS = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal"))
SIZES_FROM_DATA = frozenset(("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive"))


class Counter(TorchDispatchMode):
    """Counts operators by name. A boolean index reads its number of rows back, and is counted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.boolean_indices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name in ("index", "index_put", "index_put_"):
            self.boolean_indices += any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        return func(*args, **(kwargs or {}))

    def summary(self) -> dict[str, int]:
        return {
            "kernels": sum(count for name, count in self.calls.items() if name not in VIEWS),
            "scalar_syncs": sum(self.calls[name] for name in SCALARS),
            "size_syncs": sum(self.calls[name] for name in SIZES_FROM_DATA) + self.boolean_indices,
            "attention_calls": sum(
                count for name, count in self.calls.items() if "scaled_dot" in name and "backward" not in name
            ),
        }


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("operations", help="operators dispatched by a step and reads that stall the host")
    command.add_argument("--policy", required=True, choices=sorted(POLICIES))
    command.add_argument("--size", choices=("tiny", "mid", "full"), default="tiny")
    command.add_argument("--batch", type=int, default=8, metavar="B")
    command.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    command.add_argument(
        "--shards", default="shards/libero_spatial_sample", metavar="DIR", help="where frames come from"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    command.set_defaults(run=run)


def counted(function: Callable[[], Any]) -> dict[str, int]:
    with Counter() as counter:
        function()
    return counter.summary()


def measure(problem: step.Problem) -> dict[str, dict[str, int]]:
    """Counts of the published native step and of ours, each after a first step that fills caches."""
    variant = next(variant for variant in problem.case.VARIANTS if variant.published)
    contestants: dict[str, Callable[[], Any]] = {
        "native": lambda: step.run_native(problem, variant),
        step.OURS: lambda: step.run_ours(problem, None),
    }
    found = {}
    for name, run_once in contestants.items():
        run_once()
        for parameter in problem.policy.live_parameters().values():
            parameter.grad = None
        found[name] = counted(run_once)
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print and return the counts. Raises ConfigError for a batch below 1."""
    if arguments.batch < 1:
        raise ConfigError("--batch must be at least 1")
    torch.set_num_threads(1)
    problem = step.build(
        arguments.policy, arguments.size, arguments.batch, torch.device("cpu"), arguments.shards, arguments.precision
    )
    document = {
        "policy": arguments.policy,
        "size": arguments.size,
        "batch": arguments.batch,
        "precision": arguments.precision,
        **measure(problem),
    }
    columns = list(document[step.OURS])
    print(f"{'':<12}" + "".join(f"{column.replace('_', ' '):>18}" for column in columns))
    for name in ("native", step.OURS):
        print(f"{name:<12}" + "".join(f"{document[name][column]:>18}" for column in columns))
    return document
