"""Which episodes train and which are held out."""

from __future__ import annotations

import hashlib

import numpy as np

from dataio.manifest import DataError
from dataio.reader import ShardReader


def split_episodes(reader: ShardReader, held_out: int | float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the samples into training and held-out ids (int64, ascending), by whole episodes.

    `held_out` is a number of episodes (int) or a fraction of them (float in [0, 1), at least one episode if
    above 0). The choice depends on (seed, episode number) alone, so an episode that is added or quarantined
    later leaves nearly all others on their side. Raises DataError when no episode would be left to train on.
    """
    episodes = [episode.episode for episode in reader.manifest.episodes]
    if isinstance(held_out, bool) or not isinstance(held_out, int | float) or held_out < 0:
        raise DataError(f"held_out must be a number of episodes or a fraction of them, got {held_out!r}")
    if isinstance(held_out, float):
        count = max(round(held_out * len(episodes)), 1) if held_out else 0
    else:
        count = held_out
    if count >= len(episodes):
        raise DataError(
            f"{reader.directory}: held_out={held_out!r} takes {count} of {len(episodes)} episodes and leaves "
            "none to train on; hold out fewer."
        )
    chosen = sorted(episodes, key=lambda episode: _draw(seed, episode))[:count]
    held = np.isin(reader.episode, chosen)
    return np.flatnonzero(~held), np.flatnonzero(held)


def _draw(seed: int, episode: int) -> bytes:
    return hashlib.blake2b(f"somaspeed split {seed} {episode}".encode(), digest_size=8).digest()
