"""Small LeRobot datasets, made through LeRobot's own writer, whose pixels say which frame they are.

Frame `index` of camera number `c` shows the number `index + CAMERA_STRIDE * c` as a 4 x 4 grid of black and
white cells, which survives video and JPEG compression: `read_number(pixels)` reads it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

CAMERA_STRIDE = 4096
FPS = 10
TASKS = ("put the bowl on the plate", "open the drawer")


def draw_number(number: int, size: int) -> np.ndarray:
    """[size, size, 3] uint8 image of the 16 bits of `number`; `size` is a multiple of 4."""
    bits = (number >> np.arange(16)) & 1
    grid = np.kron(bits.reshape(4, 4), np.ones((size // 4, size // 4))) * 200 + 20
    return np.repeat(grid[..., None], 3, axis=2).astype(np.uint8)


def read_number(pixels: np.ndarray) -> int:
    """The number that an [H, W, 3] image made by `draw_number` shows."""
    cell = pixels.shape[0] // 4
    means = pixels.reshape(4, cell, 4, cell, 3).mean(axis=(1, 3, 4)).ravel()
    return int(((means > 120) << np.arange(16)).sum())


def write_dataset(
    root: Path,
    lengths: Sequence[int] = (5, 4, 6),
    *,
    video: bool = False,
    cameras: Sequence[str] = ("image", "image2"),
    size: int = 32,
    values: Sequence[float] | None = None,
    picture: Callable[[int, int], np.ndarray] | None = None,
    extra: dict[str, tuple[dict, Callable[[int], np.ndarray]]] | None = None,
    data_mb: float | None = None,
    video_mb: float | None = None,
) -> Path:
    """Write a LeRobot v3 dataset of `len(lengths)` episodes to `root` and return `root`.

    `observation.state` [3] is (value, 2 value, -value), `action` [2] is (value, frame number in its episode),
    where value is `values[index]`, by default the global frame index. Episode e has task `TASKS[e % 2]`.
    `picture(index, camera number)` overrides the frames. `extra` adds features: key -> (LeRobot feature,
    function of the index). `data_mb`, `video_mb`: the sizes at which LeRobot starts another data or video
    file.
    """
    from lerobot.configs import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    picture = picture or (lambda index, camera: draw_number(index + CAMERA_STRIDE * camera, size))
    extra = extra or {}
    height, width = picture(0, 0).shape[:2]
    visual = {"dtype": "video" if video else "image", "shape": (height, width, 3)}
    features: dict[str, dict] = {
        f"observation.images.{name}": {**visual, "names": ["height", "width", "channel"]} for name in cameras
    }
    features["observation.state"] = {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]}
    features["action"] = {"dtype": "float32", "shape": (2,), "names": {"motors": ["a", "b"]}}
    features |= {key: feature for key, (feature, _) in extra.items()}
    dataset = LeRobotDataset.create(
        "test/dataset", FPS, features, root=root, robot_type="test_arm", use_videos=video,
        rgb_encoder=RGBEncoderConfig(vcodec="h264", crf=18), data_files_size_in_mb=data_mb,
        video_files_size_in_mb=video_mb,
    )  # fmt: skip
    index = 0
    for episode, length in enumerate(lengths):
        for frame in range(length):
            value = float(values[index]) if values is not None else float(index)
            dataset.add_frame(
                {f"observation.images.{name}": picture(index, c) for c, name in enumerate(cameras)}
                | {"observation.state": np.array([value, 2 * value, -value], np.float32)}
                | {"action": np.array([value, frame], np.float32)}
                | {key: make(index) for key, (_, make) in extra.items()}
                | {"task": TASKS[episode % len(TASKS)]}
            )
            index += 1
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return root
