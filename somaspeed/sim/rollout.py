"""One episode in a scene, step by step: when it ends, and what is filmed of it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from somaspeed.sim.protocol import Act, Begin, Finished, Observation


class Scene(Protocol):
    """One task in a simulator."""

    def reset(self, seed: int, init: int) -> None:
        """Seed, put the stored initial state `init` in place and let it settle."""

    def step(self, action: np.ndarray) -> bool:
        """Take one control step, float [7]. Returns whether the task is solved."""

    def state(self) -> np.ndarray:
        """Proprioception, float32 [8]."""

    def images(self) -> dict[str, np.ndarray]:
        """Every camera as in training data, uint8 [H, W, 3]."""

    def film(self) -> np.ndarray:
        """One frame for a video, uint8 [H, W, 3]."""


class Rollout:
    """Plays one episode. Success at the last allowed step counts; steps after the end are not taken."""

    def __init__(self, scene: Scene, begin: Begin) -> None:
        self._scene, self._begin = scene, begin
        self._steps = 0
        self._film: list[np.ndarray] = []
        scene.reset(begin.seed, begin.init)
        self._shoot(force=True)

    def observe(self) -> Observation:
        images = {} if self._begin.blind else self._scene.images()
        return Observation(images, self._scene.state(), self._steps, self._footage())

    def act(self, request: Act) -> Observation | Finished:
        """Take the actions in turn. Raises ValueError for actions that are not finite or not [n, 7]."""
        actions = request.actions
        if actions.ndim != 2 or not len(actions) or not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite and of shape [n, 7] with n > 0, got {actions.shape}")
        for action in actions:
            success = self._scene.step(action)
            self._steps += 1
            self._shoot(force=success)
            if success or self._steps == self._begin.max_steps:
                return Finished(success, self._steps, self._footage())
        return self.observe()

    def _shoot(self, force: bool) -> None:
        every = self._begin.film_every
        if every and (force or self._steps % every == 0):
            self._film.append(self._scene.film())

    def _footage(self) -> np.ndarray | None:
        film, self._film = self._film, []
        return np.stack(film) if film else None
