"""Training frames replayed open loop: what the policy would do, beside what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dataio.loader import batches
from dataio.reader import ShardReader
from somaspeed.doctor.findings import Dimension

ACTION, STATE = "action", "observation.state"
BATCH = 8

Images = Mapping[str, np.ndarray]
Predict = Callable[[Images, np.ndarray, list[str], int], np.ndarray]  # see actor.Actor.chunks


class Frames(NamedTuple):
    """N training frames with the actions that followed."""

    images: dict[str, np.ndarray]  # camera → uint8 [N, H, W, 3]
    state: np.ndarray  # float32 [N, S]
    tasks: list[str]
    actions: np.ndarray  # float32 [N, T, D]
    valid: np.ndarray  # bool [N, T]: steps within the episode


def sample_frames(reader: ShardReader, cameras: list[str], steps: int, count: int, seed: int) -> Frames:
    """`count` frames drawn from all episodes, with the next `steps` actions of each."""
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.choice(len(reader), min(count, len(reader)), replace=False))
    parts = list(batches(reader, chosen, {ACTION: range(steps)}, cameras, BATCH, workers=1))
    tasks = reader.manifest.tasks
    return Frames(
        {camera: np.concatenate([part.images[camera].numpy() for part in parts]) for camera in cameras},
        np.concatenate([part.columns[STATE].numpy() for part in parts]).astype(np.float32),
        [tasks[number] for part in parts for number in part.task.tolist()],
        np.concatenate([part.columns[ACTION].numpy() for part in parts]).astype(np.float32),
        ~np.concatenate([part.is_pad[ACTION].numpy() for part in parts]),
    )


def predict(act: Predict, frames: Frames, images: Images, seed: int) -> np.ndarray:
    """Predicted actions, float32 [N, T, D], with `images` in place of the frames' own."""
    chunks = []
    for start in range(0, len(frames.state), BATCH):
        rows = slice(start, start + BATCH)
        batch = {camera: stack[rows] for camera, stack in images.items()}
        chunks.append(act(batch, frames.state[rows], frames.tasks[rows], seed + start))
    return np.concatenate(chunks)[:, : frames.actions.shape[1]]


def dimensions(predicted: np.ndarray, frames: Frames, mean: np.ndarray, names: list[str]) -> list[Dimension]:
    """The error of each action dimension over all valid steps, against the truth and the constant `mean` [D]."""
    truth, guess = frames.actions[frames.valid], predicted[frames.valid]
    return [
        Dimension(
            name,
            float(np.abs(guess[:, dim] - truth[:, dim]).mean()),
            float(np.abs(mean[dim] - truth[:, dim]).mean()),
            correlation(guess[:, dim], truth[:, dim]),
        )
        for dim, name in enumerate(names)
    ]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's; 0 where one of them does not vary."""
    if a.std() < 1e-9 or b.std() < 1e-9:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def frame_errors(predicted: np.ndarray, frames: Frames) -> np.ndarray:
    """Per frame the absolute error in units of each dimension's spread, averaged over dimensions and steps, [N]."""
    spread = np.maximum(frames.actions[frames.valid].std(axis=0), 1e-6)
    error = (np.abs(predicted - frames.actions) / spread).mean(axis=2)
    return (error * frames.valid).sum(axis=1) / frames.valid.sum(axis=1)
