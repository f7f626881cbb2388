"""Whether actions come out of the checkpoint as they went in: signs, ranges, statistics, and the round trip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dataio.manifest import Manifest
from somaspeed.actor import Actor
from somaspeed.doctor.findings import Dimension, Finding
from somaspeed.doctor.replay import Frames

ACTION = "action"
KINDS = ("mean", "std", "min", "max", "q01", "q99")
SAME = 0.01  # of a dimension's range: statistics that differ by less are the same
OTHER = 0.25  # … and by more belong to other data
ROUND_TRIP = 1e-4  # of a dimension's range


def check_errors(table: Sequence[Dimension]) -> list[Finding]:
    """Whether the policy does better than a constant."""
    ratio = float(np.mean([row.error / max(row.constant, 1e-9) for row in table if row.constant > 1e-6] or [1.0]))
    if ratio >= 1:
        text = (
            f"the error is {ratio:.2f} times that of always predicting the mean action: nothing that helps was learnt, "
            "or what was learnt does not come out; see the other findings."
        )
        return [Finding("error", "problem", text)]
    text = f"the error is {ratio:.2f} times that of always predicting the mean action"
    return [Finding("error", "ok" if ratio < 0.8 else "note", text)]


def check_signs(table: Sequence[Dimension], predicted: np.ndarray, frames: Frames) -> list[Finding]:
    """Name dimensions that come out mirrored: their mirror image is much closer to the truth."""
    truth, guess = frames.actions[frames.valid], predicted[frames.valid]
    findings = []
    for dim, row in enumerate(table):
        mirrored = truth[:, dim].min() + truth[:, dim].max() - guess[:, dim]
        error = float(np.abs(mirrored - truth[:, dim]).mean())
        if row.correlation < -0.3 and error < 0.8 * row.error:
            findings.append(
                Finding(
                    "sign",
                    "problem",
                    f"{label(truth, dim, row.name)} has the wrong sign: it correlates with the data by "
                    f"{row.correlation:+.2f}, and mirrored its error falls from {row.error:.3f} to {error:.3f}.",
                )
            )
    return findings or [Finding("sign", "ok", "no action dimension comes out mirrored")]


def check_reach(table: Sequence[Dimension], predicted: np.ndarray, frames: Frames) -> list[Finding]:
    """Name two-valued dimensions (the gripper) of which one value is never reached."""
    truth, guess = frames.actions[frames.valid], predicted[frames.valid]
    findings = []
    for dim, row in enumerate(table):
        if not two_valued(truth[:, dim]):
            continue
        low, high = float(truth[:, dim].min()), float(truth[:, dim].max())
        middle = (low + high) / 2
        for side, reached in ((low, guess[:, dim].min() < middle), (high, guess[:, dim].max() > middle)):
            if not reached:
                findings.append(
                    Finding(
                        "range",
                        "problem",
                        f"{label(truth, dim, row.name)} is {low:g} or {high:g} in the data, but the policy never comes "
                        f"near {side:g}: it stays in [{guess[:, dim].min():.2f}, {guess[:, dim].max():.2f}].",
                    )
                )
    return findings


def label(truth: np.ndarray, dim: int, name: str) -> str:
    kind = "the gripper " if "grip" in name or two_valued(truth[:, dim]) else ""
    return f"{kind}action dimension {dim} ({name})"


def two_valued(column: np.ndarray) -> bool:
    low, high = column.min(), column.max()
    near = np.minimum(np.abs(column - low), np.abs(column - high)) < 0.01 * max(high - low, 1e-9)
    return bool(high > low and near.mean() > 0.95 and 0.02 < (column > (low + high) / 2).mean() < 0.98)


def check_statistics(processors: Mapping[str, Any], manifest: Manifest, trained_on: str | None) -> list[Finding]:
    """Compare the statistics in the checkpoint's processors with the shards'.

    `trained_on` is the fingerprint of the training shards, where it is known.
    """
    same_data = trained_on == manifest.source.fingerprint
    findings, compared = [], 0
    for where, pipeline in processors.items():
        for key, kinds in stored_statistics(pipeline):
            if key not in manifest.statistics:
                continue
            compared += 1
            worst = largest_difference(kinds, manifest, key)
            if worst and worst[0] > SAME:
                findings.append(foreign(where, key, worst, same_data))
    if not compared:
        return [Finding("statistics", "note", "the processors hold no statistics that could be compared")]
    return findings or [Finding("statistics", "ok", "the checkpoint's statistics are those of these shards")]


def foreign(where: str, key: str, worst: tuple[float, str, int, float, float], same_data: bool) -> Finding:
    share, kind, dim, there, here = worst
    advice = (
        "It was trained on these very shards, so its file was exchanged."
        if same_data
        else "Use the checkpoint with the data it was trained on."
    )
    text = (
        f"statistics of another dataset: the {where} of the checkpoint has {key} {kind} = {there:.4g} in dimension "
        f"{dim}, these shards have {here:.4g} ({share:.0%} of the range). {advice}"
    )
    return Finding("statistics", "problem" if same_data or share > OTHER else "note", text)


def stored_statistics(pipeline: Any) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(feature, statistics) of every (un)normalising step of a LeRobot pipeline."""
    for step in pipeline.steps:
        stored = getattr(step, "_tensor_stats", None) or getattr(step, "stats", None)  # GR00T's steps have the latter
        for key, kinds in (stored or {}).items():
            yield key, {kind: np.asarray(value, np.float64).ravel() for kind, value in kinds.items() if kind in KINDS}


def largest_difference(
    kinds: Mapping[str, np.ndarray], manifest: Manifest, key: str
) -> tuple[float, str, int, float, float] | None:
    """(share of the dimension's range, kind, dimension, there, in the shards) of the statistic that differs most."""
    ours = manifest.statistics[key]
    extent = np.maximum(np.array(ours.max) - np.array(ours.min), 1e-6)
    found = []
    for kind, there in kinds.items():
        here = np.array(getattr(ours, kind))
        if here.shape != there.shape:
            return np.inf, kind, min(len(here), len(there)), np.nan, np.nan
        share = np.abs(there - here) / extent
        dim = int(share.argmax())
        found.append((float(share[dim]), kind, dim, float(there[dim]), float(here[dim])))
    return max(found, default=None)


def check_round_trip(actor: Actor, frames: Frames, names: list[str]) -> list[Finding]:
    """Push true actions through normalisation and back: they must come out as they went in."""
    truth = frames.actions[:, 0]
    observation = actor.observation(frames.images, frames.state, frames.tasks)
    normalised = actor.preprocessor({**observation, ACTION: torch.from_numpy(truth)}).get(ACTION)
    if normalised is None:
        return [Finding("round trip", "note", "the pre-processor passes no actions; their round trip was not checked")]
    first = normalised[:, 0] if normalised.ndim == 3 else normalised  # GR00T makes chunks of them
    back = actor.postprocessor(first[:, : truth.shape[1]]).numpy()
    extent = np.maximum(np.ptp(truth, axis=0), 1e-6)
    findings = []
    for dim, name in enumerate(names):
        error = float(np.abs(back[:, dim] - truth[:, dim]).max() / extent[dim])
        if error <= ROUND_TRIP:
            continue
        slope = np.polyfit(truth[:, dim], back[:, dim], 1)[0] if truth[:, dim].std() > 1e-6 else 1.0
        what = "comes back with the wrong sign" if slope < 0 else f"comes back changed by {error:.0%} of its range"
        findings.append(
            Finding(
                "round trip",
                "problem",
                f"{label(frames.actions[frames.valid], dim, name)} {what} after normalising and "
                "un-normalising: the pre- and the post-processor of the checkpoint do not belong together.",
            )
        )
    return findings or [Finding("round trip", "ok", "normalising and un-normalising gives every action back")]
