"""A small world in which the right action can only be seen: where a bright square is, in each of two cameras.

Every frame shows a square in one quadrant of each camera, drawn independently. The action is
(column in `image`, row in `image`, column in `image2`, gripper = row in `image2`), each -1 or 1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

SIDE = 56
EPISODES, LENGTH = 8, 12


def picture(column: int, row: int, flip: bool = False) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3]: dark, with a bright square in the quadrant (column, row), each 0 or 1."""
    image = np.full((SIDE, SIDE, 3), 30, np.uint8)
    half = SIDE // 2
    image[row * half : (row + 1) * half, column * half : (column + 1) * half] = (240, 200, 160)
    return image[::-1].copy() if flip else image


def write_world(
    root: Path, *, flip: bool = False, swap: bool = False, gripper: float = 1.0, scale: float = 1.0
) -> Path:
    """Write the LeRobot dataset. The faults: images upside down, cameras exchanged, the gripper's sign, other units."""
    image = {"dtype": "image", "shape": (SIDE, SIDE, 3), "names": ["height", "width", "channels"]}
    dataset = LeRobotDataset.create(
        "test/seeing",
        10,
        {
            "observation.images.image": image,
            "observation.images.image2": image,
            "observation.state": {"dtype": "float32", "shape": (2,), "names": ["a", "b"]},
            "action": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "gripper"]},
        },
        root=root,
        use_videos=False,
    )
    generator = np.random.default_rng(0)
    for episode in range(EPISODES):
        column, row, column2, row2 = generator.integers(0, 2, 4)
        for _ in range(LENGTH):
            first, second = picture(column, row, flip), picture(column2, row2, flip)
            if swap:
                first, second = second, first
            signs = np.array([column, row, column2, row2]) * 2.0 - 1
            jitter = generator.uniform(-0.05, 0.05, 4) * (1, 1, 1, 0)
            dataset.add_frame(
                {
                    "observation.images.image": first,
                    "observation.images.image2": second,
                    "observation.state": generator.uniform(-1, 1, 2).astype(np.float32) * np.float32(scale),
                    "action": ((signs + jitter) * (scale, scale, scale, gripper)).astype(np.float32),
                    "task": f"look {'here' if episode % 2 else 'there'}",
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return root
