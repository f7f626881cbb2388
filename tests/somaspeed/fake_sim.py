"""A simulator process without a simulator: a point that must be brought to a goal. Speaks the real protocol.

The environment variable FAKE_SIM chooses a misbehaviour: `die-once:FILE` ends the process in the middle of task 1's
first episode, until FILE exists; `die` always does; `hang` never answers an action; `raise` fails every action;
`mute` does not start.
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from somaspeed.sim.protocol import Act, Begin, Collect, Episode, Frames, Ready, Render, Reply, Request, Task
from somaspeed.sim.rollout import Rollout
from somaspeed.sim.worker import serve, take_over_stdout

SIDE = 256
INITS = 5
TASKS = [Task("bring the point to the left", INITS), Task("bring the point to the right", INITS)]


class Point:
    """Solved once the sum of the first action components reaches init + 1, so init is how many steps are needed - 1."""

    def __init__(self, task: int) -> None:
        self.task = task

    def reset(self, seed: int, init: int) -> None:
        self.position, self.goal = 0.0, init + 1
        self.shade = np.random.default_rng(seed).integers(20, 200)

    def step(self, action: np.ndarray) -> bool:
        self.position += float(action[0])
        return self.position >= self.goal

    def state(self) -> np.ndarray:
        return np.full(8, self.position, np.float32)

    def images(self) -> dict[str, np.ndarray]:
        image = np.full((SIDE, SIDE, 3), self.shade, np.uint8)
        return {"image": image, "image2": image[::-1]}

    def film(self) -> np.ndarray:
        return np.full((SIDE, SIDE, 3), self.shade, np.uint8)


class FakeSimulator:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def handle(self, request: Request) -> Reply:
        match request:
            case Begin():
                self.task = request.task
                self.rollout = Rollout(Point(request.task), request)
                return self.rollout.observe()
            case Act():
                self.misbehave()
                return self.rollout.act(request)
            case Collect():
                steps = 3 + request.init
                actions = np.random.default_rng(request.seed).random((steps, 7), np.float32)
                states = np.arange(steps, dtype=np.float64)[:, None]
                return Episode(request.init != 1, 1, "lower", states, np.zeros((steps, 8), np.float32), actions)
            case Render():
                return Frames({name: [png(name, state) for state in request.states] for name in ("image", "image2")})

    def misbehave(self) -> None:
        kind, _, path = self.fault.partition(":")
        if kind == "die" or (kind == "die-once" and self.task == 1 and not Path(path).exists()):
            if path:
                Path(path).touch()
            print("segmentation fault, or so", file=sys.stderr, flush=True)
            os._exit(7)
        if kind == "hang":
            time.sleep(600)
        if kind == "raise":
            raise RuntimeError("the physics exploded")


def png(camera: str, state: np.ndarray) -> bytes:
    """A picture whose red says which state it shows, and whose green which camera."""
    buffer = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (int(state[0]) * 10, 200 if camera == "image2" else 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def main() -> None:
    fault = os.environ.get("FAKE_SIM", "")
    output = take_over_stdout()
    print("libraries print to standard output")  # must not end up between the messages
    if fault == "mute":
        sys.exit("no such suite")
    simulator = FakeSimulator(fault)
    serve(sys.stdin.buffer, output, Ready("fake", TASKS, {"fake": "1"}), simulator.handle)


if __name__ == "__main__":
    main()
