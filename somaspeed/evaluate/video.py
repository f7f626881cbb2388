"""Small videos of episodes."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from dataio.atomic import replacing

CONTROL_HZ = 20


def save_video(path: Path, frames: np.ndarray, every: int) -> None:
    """Write uint8 frames [n, H, W, 3], taken every `every` control steps, at the speed at which they happened."""
    with replacing(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=max(CONTROL_HZ // every, 1))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
