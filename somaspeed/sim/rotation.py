"""Rotations as LIBERO's data writes them."""

from __future__ import annotations

import math

import numpy as np


def matrix(quaternion: np.ndarray) -> np.ndarray:
    """Quaternion (x, y, z, w) → rotation matrix [3, 3], float64."""
    x, y, z, w = np.asarray(quaternion, np.float64) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Quaternion (x, y, z, w) → axis times angle in [0, 2π], float64 [3], as robosuite and LeRobot compute it.

    The sign of the quaternion is kept, so the angle may exceed π; policies are trained on these numbers.
    """
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    length = math.sqrt(1 - w * w)
    if length < 1e-10:
        return np.zeros(3)
    return np.asarray(quaternion[:3], np.float64) * (2 * math.acos(w) / length)


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Rotation matrix [3, 3] → axis times angle in [0, π), float64 [3]."""
    twice_sine = np.array(
        [rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]]
    )
    sine = np.linalg.norm(twice_sine) / 2
    angle = math.atan2(sine, (np.trace(rotation) - 1) / 2)
    return twice_sine * (0.5 if sine < 1e-9 else angle / (2 * sine))


def about_z(angle: float) -> np.ndarray:
    """The rotation by `angle` radians about the z axis, [3, 3]."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
