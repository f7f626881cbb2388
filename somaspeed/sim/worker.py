"""A simulator process: `python -m somaspeed.sim.worker SUITE RENDERING`, requests on standard input, replies on
standard output. `--check` renders one frame and says so, then ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from somaspeed.sim import protocol
from somaspeed.sim.protocol import RENDERINGS, Act, Begin, Collect, Failed, Ready, Render, Rendering, Reply, Request

if TYPE_CHECKING:
    from somaspeed.sim.libero import LiberoScene


def serve(requests: BinaryIO, replies: BinaryIO, ready: Ready, handle: Callable[[Request], Reply]) -> None:
    """Answer requests until their stream ends. An exception is a reply; the process lives on."""
    protocol.send(replies, ready)
    while (request := protocol.receive_request(requests)) is not None:
        try:
            reply = handle(request)
        except Exception:
            reply = Failed(traceback.format_exc())
        protocol.send(replies, reply)


def take_over_stdout() -> BinaryIO:
    """The real standard output, for messages; whatever libraries print goes to standard error from now on."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return stream


class Simulator:
    """Keeps the scene of the last task, since building one takes seconds."""

    def __init__(self, suite: str, rendering: Rendering) -> None:
        from somaspeed.sim import libero

        self._suite = libero.Suite(suite, rendering)
        self._task = -1
        self._loaded: libero.LiberoScene
        self.ready = Ready(suite, self._suite.tasks, libero.versions(), rendering)

    def handle(self, request: Request) -> Reply:
        from somaspeed.sim import collect
        from somaspeed.sim.rollout import Rollout

        match request:
            case Begin():
                self._rollout = Rollout(self._scene(request.task), request)
                return self._rollout.observe()
            case Act():
                return self._rollout.act(request)
            case Collect():
                return collect.collect(self._scene(request.task), request)
            case Render():
                return collect.render(self._scene(request.task), request.seed, request.states)

    def check(self) -> str:
        """Settle the first task's first initial state and render it; one line that says so."""
        scene = self._scene(0)
        scene.reset(0, 0)
        images = scene.images()
        if min(image.std() for image in images.values()) < 1:
            raise RuntimeError("the rendered frame is blank")
        shapes = ", ".join(f"{name} {image.shape[1]}x{image.shape[0]}" for name, image in images.items())
        return f"simulator ready: {self.ready.suite}, {len(self.ready.tasks)} tasks; rendered {shapes}"

    def _scene(self, task: int) -> LiberoScene:
        if task != self._task:
            if self._task >= 0:
                self._loaded.close()
                self._task = -1
            self._loaded, self._task = self._suite.scene(task), task
        return self._loaded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m somaspeed.sim.worker", description=__doc__)
    parser.add_argument("suite")
    parser.add_argument("rendering", choices=RENDERINGS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    output = take_over_stdout()
    from somaspeed.sim.libero import SimulatorError  # which prints

    try:
        simulator = Simulator(arguments.suite, arguments.rendering)
    except SimulatorError as error:
        sys.exit(f"error: {error}")
    if arguments.check:
        output.write(f"{simulator.check()}\n".encode())
        output.flush()
    else:
        serve(sys.stdin.buffer, output, simulator.ready, simulator.handle)
    # Interpreter shutdown makes the renderer complain about a context that is gone; nothing is left to do.
    output.close()
    os._exit(0)


if __name__ == "__main__":
    main()
