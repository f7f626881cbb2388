"""Seeds of episodes: a function of the run's seed, the task and the episode, and of nothing else."""

from __future__ import annotations

import numpy as np


def episode_seed(seed: int, task: int, episode: int, draw: int = 0) -> int:
    """A seed in [0, 2³²) for one episode of one task; `draw` numbers what is drawn within it."""
    return int(np.random.SeedSequence([seed, task, episode, draw]).generate_state(1)[0])
