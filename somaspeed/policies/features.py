"""Shard features as a policy's features: which camera feeds which image slot, and LeRobot's statistics."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
from lerobot.utils.constants import OBS_IMAGES
from torch import Tensor

from dataio.manifest import Manifest, did_you_mean
from somaspeed.policies.base import PolicyError


def match_cameras(manifest: Manifest, renames: dict[str, str], image_features: Iterable[str]) -> list[str]:
    """The shard cameras in the order of the policy's image features, through the map shard name → policy name.

    Empty slots (`empty_camera_N`) take no camera. Raises PolicyError for a shard camera that the policy does not
    know, a policy camera that the shards do not have, and a map entry that names neither.
    """
    shard = [camera.name for camera in manifest.cameras]
    for name in renames:
        if name not in shard:
            raise PolicyError(
                f"data.map names camera {name!r}, which the shards do not have{did_you_mean(name, shard)}"
            )
    wanted = [key.removeprefix(f"{OBS_IMAGES}.") for key in image_features]
    wanted = [name for name in wanted if not name.startswith("empty_camera_")]
    by_target = {renames.get(name, name): name for name in shard}
    if len(by_target) < len(shard):
        pairs = ", ".join(f"{name} → {renames.get(name, name)}" for name in shard)
        raise PolicyError(f"data.map sends two cameras to one: {pairs}")
    for target, name in by_target.items():
        if target not in wanted:
            raise PolicyError(
                f"camera {target!r} is not known to the policy{did_you_mean(target, wanted)}. "
                f'Map it with data.map = {{ {name} = "…" }}.'
            )
    for name in wanted:
        if name not in by_target:
            raise PolicyError(
                f"the policy's camera {name!r} is not in the shards{did_you_mean(name, by_target)}. "
                f'Map a shard camera to it with data.map = {{ … = "{name}" }}.'
            )
    return [by_target[name] for name in wanted]


def statistics_tensors(manifest: Manifest) -> dict[str, dict[str, Tensor]]:
    """The manifest's statistics as LeRobot's processors take them: float32 tensors by feature and kind."""
    return {
        key: {
            kind: torch.as_tensor(values, dtype=torch.float32)
            for kind, values in msgspec.to_builtins(statistics).items()
        }
        for key, statistics in manifest.statistics.items()
    }
