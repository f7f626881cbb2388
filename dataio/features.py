"""Which features of a LeRobot dataset become cameras and columns of a shard, and which cannot."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from dataio.manifest import Camera, Column, DataError, did_you_mean

BOOKKEEPING = ("index", "episode_index", "frame_index", "timestamp", "task_index")
SAMPLE_KEYS = ("episode", "frame", "task")
CAMERA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Feature(msgspec.Struct):
    """One entry of `features` in info.json."""

    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    info: dict[str, Any] | None = None


def rename(features: dict[str, Feature], names: dict[str, str]) -> tuple[dict[str, Feature], dict[str, str]]:
    """`features` under the keys that `names` (dataset's key → name) gives them, and the new keys' old ones.

    A camera's name is its last part: `top` stands for `observation.images.top`. Raises DataError for a key that the
    dataset does not have, with the closest one, and for two features under one key.
    """
    known = [key for key in features if key not in BOOKKEEPING]
    old: dict[str, str] = {}
    for key in names:
        if key not in known:
            raise DataError(f"--map {key}={names[key]}: the dataset has no feature {key!r}{did_you_mean(key, known)}")
    for key, feature in features.items():
        new = names.get(key, key)
        if key in names and feature.dtype in ("image", "video") and "." not in new:
            new = f"observation.images.{new}"
        if new in old:
            raise DataError(f"--map: {old[new]!r} and {key!r} would both be {new!r}; give one of them another name.")
        old[new] = key
    return {new: features[key] for new, key in old.items()}, {n: key for n, key in old.items() if n != key}


def sort_features(features: dict[str, Feature]) -> tuple[list[Camera], list[Column], list[str]]:
    """Split features into cameras, numeric 1-d columns, and skipped ones with the reason.

    LeRobot's own bookkeeping (index, timestamp, …) is left out. Raises DataError when there is no colour
    camera, or a name cannot be used in a tar.
    """
    cameras: list[Camera] = []
    columns: list[Column] = []
    skipped: list[str] = []
    for key, feature in features.items():
        if key in BOOKKEEPING:
            continue
        if feature.dtype in ("image", "video"):
            size = _height_width(feature)
            if size is None:
                skipped.append(f"{key}: not a colour camera (shape {list(feature.shape)})")
            else:
                cameras.append(Camera(key.rpartition(".")[2], key, *size))
        elif not _is_numeric(feature.dtype):
            skipped.append(f"{key}: {feature.dtype} is not numeric")
        elif len(feature.shape) != 1:
            skipped.append(f"{key}: has {len(feature.shape)} dimensions (shape {list(feature.shape)})")
        elif key in SAMPLE_KEYS:
            raise DataError(
                f"feature {key!r}: the name is taken by the sample's own fields. Rename it with --map {key}=NAME."
            )
        else:
            columns.append(Column(key, feature.dtype, feature.shape, _names(feature.names)))
    if not cameras:
        raise DataError(
            f"no colour camera among the features {list(features)}. Shards are made of camera frames."
        )
    counts = Counter(camera.name for camera in cameras)
    for camera in cameras:
        if not CAMERA_NAME.fullmatch(camera.name) or camera.name == "frame" or counts[camera.name] > 1:
            raise DataError(
                f"camera {camera.key!r}: its last part {camera.name!r} names the image in the tar, so it "
                "must be unique, not 'frame', and of letters, digits, _ and - only. Rename it with "
                f"--map {camera.key}=NAME."
            )
    return cameras, columns, skipped


def _is_numeric(dtype: str) -> bool:
    try:
        return np.dtype(dtype).kind in "biuf"
    except TypeError:
        return False


def _names(names: Any) -> list[str] | dict[str, list[str]] | None:
    try:
        return msgspec.convert(names, list[str] | dict[str, list[str]] | None)
    except msgspec.ValidationError:
        return None


def _height_width(feature: Feature) -> tuple[int, int] | None:
    """Height and width of a camera with three channels, first or last; None for other features."""
    if len(feature.shape) != 3 or (feature.info or {}).get("is_depth_map"):
        return None
    names = [str(name) for name in feature.names] if isinstance(feature.names, list) else []
    channels_first = names[0].startswith("channel") if names else feature.shape[2] != 3
    channels, height, width = feature.shape if channels_first else (feature.shape[2], *feature.shape[:2])
    return (height, width) if channels == 3 else None
