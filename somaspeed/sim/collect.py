"""Episodes that the oracle solves: physics first, frames afterwards from the states it went through."""

from __future__ import annotations

import io
import itertools

import numpy as np
from PIL import Image

from somaspeed.sim.libero import CAMERAS, LiberoScene
from somaspeed.sim.oracle import SIDES, Oracle
from somaspeed.sim.protocol import Collect, Episode, Frames

MAX_STEPS = 220
ATTEMPTS = 4
PNG_LEVEL = 1  # of compression: files are written once and read once


def collect(scene: LiberoScene, request: Collect) -> Episode:
    """Try the task's grasp sides in turn, each time with other noise, until the simulator calls the task solved."""
    for attempt, side in enumerate(itertools.islice(itertools.cycle(SIDES[request.task]), ATTEMPTS), start=1):
        scene.reset(request.seed, request.init)
        generator = np.random.default_rng([request.seed, request.task, request.init, attempt])
        oracle = Oracle(scene.seen, side, generator, request.noise)
        success, states, proprioception, actions = play(scene, oracle)
        if success:
            break
    return Episode(success, attempt, oracle.phase, np.stack(states), np.stack(proprioception), np.stack(actions))


def play(scene: LiberoScene, oracle: Oracle) -> tuple[bool, list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Let the oracle act until success, a lost bowl or the step limit: success, and per step what was before it."""
    states, proprioception, actions = [], [], []
    for _ in range(MAX_STEPS):
        action = oracle.act(scene.seen)
        states.append(scene.simulator_state())
        proprioception.append(scene.state())
        actions.append(action)
        if scene.step(action):
            return True, states, proprioception, actions
        if oracle.lost(scene.seen):
            break
    return False, states, proprioception, actions


def render(scene: LiberoScene, seed: int, states: np.ndarray) -> Frames:
    """Every camera at every state of an episode that was begun with `seed`, as PNG files."""
    scene.furnish(seed)
    images: dict[str, list[bytes]] = {name: [] for name in CAMERAS}
    for state in states:
        scene.restore(state)
        for name, image in scene.images().items():
            buffer = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(image)).save(buffer, "PNG", compress_level=PNG_LEVEL)
            images[name].append(buffer.getvalue())
    return Frames(images)
