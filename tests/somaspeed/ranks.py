"""Several ranks on this machine, started as torchrun would, but with everything imported already."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PRELOADED = [
    __name__,
    "somaspeed.train",
    "somaspeed.policies.pi05",
    "somaspeed.native.__main__",
    "transformers.trainer",
]


class Ended(NamedTuple):
    """What one rank returned and printed."""

    result: Any
    printed: str


def on_ranks(ranks: int, function: str, *arguments: Any) -> list[Ended]:
    """Call `module:function` on every rank, in a process of its own. Fails when one of them does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=as_rank, args=(rank, ranks, port, function, arguments, sending))
        for rank, (_, sending) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sending in pipes:
        sending.close()
    try:
        ended = [receive(rank, receiving) for rank, (receiving, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    return ended


def as_rank(
    rank: int, ranks: int, port: int, function: str, arguments: tuple[Any, ...], connection: Connection
) -> None:
    if ranks > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "localhost"}
    module, _, name = function.partition(":")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = getattr(importlib.import_module(module), name)(*arguments)
    connection.send(Ended(result, printed.getvalue()))


def receive(rank: int, connection: Connection) -> Ended:
    assert connection.poll(300), f"rank {rank} does not end"
    try:
        return connection.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} failed; see what it printed") from None
