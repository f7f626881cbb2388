"""Drivers without eyes: what they solve says nothing about vision, so a policy must do better.

Both know the demonstrations in a shard set, which task it is, and nothing of the images.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dataio.manifest import DataError
from dataio.reader import ShardReader
from somaspeed.sim.protocol import Observation

ACTION, STATE = "action", "observation.state"


class Demonstrations:
    """The demonstrations of each task of `languages` (number → instruction). Raises DataError for one without any."""

    def __init__(self, reader: ShardReader, languages: Mapping[int, str], steps: int) -> None:
        self.steps = steps
        self.state: dict[int, np.ndarray] = {}  # float32 [N, S]
        self.action: dict[int, np.ndarray] = {}  # float32 [N, D]
        self.end: dict[int, np.ndarray] = {}  # int64 [N]: one past the last row of the row's episode
        by_frame = np.lexsort((reader.frame, reader.episode))
        for task, language in languages.items():
            tasks = reader.manifest.tasks
            number = tasks.index(language) if language in tasks else -1
            rows = by_frame[reader.task[by_frame] == number]
            if not len(rows):
                raise DataError(f"{reader.directory}: no demonstration of {language!r}; choose other --tasks.")
            self.state[task] = reader.columns[STATE][rows]
            self.action[task] = reader.columns[ACTION][rows]
            self.end[task] = np.searchsorted(reader.episode[rows], reader.episode[rows], side="right")

    def after(self, task: int, row: int) -> np.ndarray:
        """The actions from `row` on, float32 [steps, D]; the episode's last one is repeated after its end."""
        rows = np.minimum(np.arange(row, row + self.steps), self.end[task][row] - 1)
        return self.action[task][rows]


class Replay:
    """Plays each task's first demonstration, whatever happens."""

    blind = True

    def __init__(self, demonstrations: Demonstrations) -> None:
        self._demonstrations = demonstrations

    def act(self, task: int, seen: Observation, seed: int) -> np.ndarray:
        last = int(self._demonstrations.end[task][0]) - 1
        return self._demonstrations.after(task, min(seen.steps, last))


class StateRegressor:
    """A network from task and proprioception to the next actions, fitted to the demonstrations by least squares.

    Two hidden layers; states and actions are scaled by their mean and spread. The same demonstrations give the same
    network on the same machine.
    """

    blind = True
    HIDDEN, EPOCHS, BATCH, RATE = 256, 40, 256, 1e-3

    def __init__(self, demonstrations: Demonstrations) -> None:
        tasks = sorted(demonstrations.state)
        self._column = {task: column for column, task in enumerate(tasks)}
        state = np.concatenate([demonstrations.state[task] for task in tasks])
        self._mean, self._spread = state.mean(axis=0), np.maximum(state.std(axis=0), 1e-6)
        inputs = torch.cat([self._inputs(task, demonstrations.state[task]) for task in tasks])
        rows = [(task, row) for task in tasks for row in range(len(demonstrations.state[task]))]
        targets = torch.from_numpy(np.stack([demonstrations.after(task, row) for task, row in rows]))
        self._center, self._scale = targets.mean(dim=(0, 1)), targets.std(dim=(0, 1)).clamp_min(1e-6)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self._network = nn.Sequential(
                nn.Linear(inputs.shape[1], self.HIDDEN),
                nn.ReLU(),
                nn.Linear(self.HIDDEN, self.HIDDEN),
                nn.ReLU(),
                nn.Linear(self.HIDDEN, targets[0].numel()),
                nn.Unflatten(1, targets[0].shape),
            )
            self._fit(inputs, (targets - self._center) / self._scale)

    def act(self, task: int, seen: Observation, seed: int) -> np.ndarray:
        with torch.no_grad():
            return (self._network(self._inputs(task, seen.state[None]))[0] * self._scale + self._center).numpy()

    def _inputs(self, task: int, state: np.ndarray) -> Tensor:
        """float32 [N, tasks + S] of states [N, S]."""
        which = np.zeros((len(state), len(self._column)), np.float32)
        which[:, self._column[task]] = 1
        return torch.from_numpy(np.concatenate([which, (state - self._mean) / self._spread], axis=1))

    def _fit(self, inputs: Tensor, targets: Tensor) -> None:
        optimizer = torch.optim.Adam(self._network.parameters(), self.RATE)
        batches = self.EPOCHS * -(-len(inputs) // self.BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches)
        for _ in range(self.EPOCHS):
            for rows in torch.randperm(len(inputs)).split(self.BATCH):
                optimizer.zero_grad()
                nn.functional.mse_loss(self._network(inputs[rows]), targets[rows]).backward()
                optimizer.step()
                schedule.step()


BLIND: dict[str, type[Replay | StateRegressor]] = {"replay": Replay, "regressor": StateRegressor}
