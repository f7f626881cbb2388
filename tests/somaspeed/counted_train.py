"""`somaspeed.train` on several ranks with every collective counted."""

from __future__ import annotations

import collections
import contextlib
import io
import multiprocessing
import os
import socket
from multiprocessing.connection import Connection

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


def run(rank: int, ranks: int, port: int, arguments: list[str], connection: Connection) -> None:
    """One rank: train, then send exit status, what was printed, and the bytes sent by collective."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sent, printed = count(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(arguments)
    connection.send((status, printed.getvalue(), sent))


def train_on(ranks: int, arguments: list[str]) -> tuple[str, collections.Counter[str]]:
    """Train on so many ranks, started as torchrun would but with everything imported; what rank 0 printed and sent."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "somaspeed.policies.pi05"])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=run, args=(rank, ranks, port, arguments, pipes[rank][1])) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for _, sending in pipes:
        sending.close()
    results = [receiving.recv() for receiving, _ in pipes]
    for process in processes:
        process.join()
    assert [status for status, *_ in results] == [0] * ranks
    return results[0][1:]
