"""`somaspeed.train` with every collective counted."""

from __future__ import annotations

import collections

import torch
import torch.distributed as dist

from somaspeed.train import main

SENT = {  # collective → place of the tensor that a rank sends
    "all_reduce": 0,
    "broadcast": 0,
    "reduce_scatter_tensor": 1,
    "all_gather_into_tensor": 1,
    "all_to_all_single": 1,
    "all_gather": 1,
    "send": 0,
}
UNUSED = ("broadcast_object_list", "all_gather_object", "gather", "scatter", "reduce", "reduce_scatter", "all_to_all")


def run(arguments: list[str]) -> collections.Counter[str]:
    """Train on this rank; the bytes it sent, by collective."""
    sent = count()
    assert main(arguments) == 0
    return sent


def count() -> collections.Counter[str]:
    sent: collections.Counter[str] = collections.Counter()

    def counted(name: str, place: int):
        collective = getattr(dist, name)

        def call(*arguments, **keywords):
            tensor = arguments[place]
            assert isinstance(tensor, torch.Tensor)
            sent[name] += tensor.nbytes
            return collective(*arguments, **keywords)

        return call

    def refused(name: str):
        def call(*_arguments, **_keywords):
            raise AssertionError(f"{name} is not counted")

        return call

    for name, place in SENT.items():
        setattr(dist, name, counted(name, place))
    for name in UNUSED:
        setattr(dist, name, refused(name))
    return sent
