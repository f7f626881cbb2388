"""Whether the policy sees what it was trained to see: the error must be least with the images as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from somaspeed.doctor.findings import Finding
from somaspeed.doctor.replay import Frames, Images, Predict, frame_errors, predict

LEAST_GAIN = 0.1  # of the error: smaller differences are no fault
LEAST_SIGMAS = 3.0


def variants(frames: Frames) -> Iterator[tuple[str, str, Images]]:
    """(check, words, images) of everything that may have gone wrong with the images between training and now."""
    turns = {
        "turned by 180°": (slice(None, None, -1), slice(None, None, -1)),
        "flipped upside down": (slice(None, None, -1), slice(None)),
        "flipped left to right": (slice(None), slice(None, None, -1)),
    }
    for words, (rows, columns) in turns.items():
        yield "orientation", words, {name: stack[:, rows, columns] for name, stack in frames.images.items()}
    for a, b in itertools.combinations(frames.images, 2):
        swapped = {**frames.images, a: frames.images[b], b: frames.images[a]}
        yield "cameras", f"swapped between cameras {a!r} and {b!r}", swapped


def check_images(act: Predict, frames: Frames, predicted: np.ndarray, seed: int) -> list[Finding]:
    """Compare the error with the images as stored with that of every variant, and of other frames' images."""
    if not frames.images:
        return [Finding("images", "note", "the policy looks at no camera")]
    stored = frame_errors(predicted, frames)
    best: tuple[float, str, str] | None = None
    for check, words, images in variants(frames):
        error = frame_errors(predict(act, frames, images, seed), frames)
        if better(error, stored) and (best is None or error.mean() < best[0]):
            best = float(error.mean()), check, words
    if best:
        least, check, words = best
        fault = "swapped cameras" if check == "cameras" else "images in another orientation"
        text = (
            f"{fault}: with the images {words} the error falls from {stored.mean():.3f} to {least:.3f} (in units of "
            f"the actions' spread). The policy was trained on images {words} against these shards; "
            + ("correct data.map." if check == "cameras" else "shard with the matching --rotate, or train again.")
        )
        return [Finding(check, "problem", text)]
    shuffled = {name: np.roll(stack, len(stack) // 2, axis=0) for name, stack in frames.images.items()}
    other = frame_errors(predict(act, frames, shuffled, seed), frames)
    if not better(stored, other, least=0.01):
        return [
            Finding(
                "images",
                "note",
                f"the images make no difference: with those of other frames the error is {other.mean():.3f} instead of "
                f"{stored.mean():.3f}. The policy acts blindly, so orientation and cameras cannot be judged.",
            )
        ]
    return [
        Finding("orientation", "ok", "images are oriented as in training: turned or flipped, the error is no smaller"),
        Finding("cameras", "ok", "cameras are those of training: swapped, the error is no smaller"),
    ]


def better(error: np.ndarray, than: np.ndarray, least: float = LEAST_GAIN) -> bool:
    """Whether `error` [N] is less than `than` [N], frame by frame: by a share of it, and beyond chance."""
    gain = than - error
    chance = gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else np.inf
    return bool(gain.mean() > max(least * than.mean(), LEAST_SIGMAS * chance))
