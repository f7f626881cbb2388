"""Drivers without eyes: what they solve says nothing about vision, so a policy must do better.

Both know the demonstrations in a shard set, which task it is, and nothing of the images.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

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

    def __init__(self, demonstrations: Demonstrations) -> None:
        self._demonstrations = demonstrations

    def act(self, task: int, seen: Observation, seed: int) -> np.ndarray:
        last = int(self._demonstrations.end[task][0]) - 1
        return self._demonstrations.after(task, min(seen.steps, last))


class NearestState:
    """Does what was done in the demonstrated state that is closest, in units of each dimension's spread."""

    def __init__(self, demonstrations: Demonstrations) -> None:
        self._demonstrations = demonstrations
        states = demonstrations.state.items()
        self._scale = {task: 1 / np.maximum(state.std(axis=0), 1e-6) for task, state in states}

    def act(self, task: int, seen: Observation, seed: int) -> np.ndarray:
        away = (self._demonstrations.state[task] - seen.state) * self._scale[task]
        return self._demonstrations.after(task, int((away**2).sum(axis=1).argmin()))
