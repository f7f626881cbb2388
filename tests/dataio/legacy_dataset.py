"""A LeRobot v2.1 dataset: a v3 one of `tiny_lerobot`, one file per episode and camera, metadata in JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as parquet

from dataio.frames import EpisodeReader
from dataio.source import open_source

DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


def write_legacy(v3: Path, root: Path) -> Path:
    """Write the dataset in `v3` as v2.1 to `root` and return `root`."""
    source = open_source(str(v3))
    reader = EpisodeReader(source)
    info: dict[str, Any] = json.loads((v3 / "meta/info.json").read_text())
    keep = ("fps", "robot_type", "total_episodes", "total_frames", "total_tasks", "features", "splits")
    videos = any(feature["dtype"] == "video" for feature in info["features"].values())
    legacy = {key: info[key] for key in keep if key in info} | {
        "codebase_version": "v2.1",
        "total_chunks": 1,
        "chunks_size": 1000,
        "total_videos": len(source.cameras) * len(source.spans) if videos else 0,
        "data_path": DATA,
        "video_path": VIDEO if videos else None,
    }
    episodes, statistics = [], []
    for span in source.spans:
        table = parquet.read_table(v3 / span.data, filters=[("episode_index", "=", span.episode)])
        path = root / DATA.format(episode_chunk=0, episode_index=span.episode)
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path)
        if videos:
            for camera in source.cameras:
                path = root / VIDEO.format(episode_chunk=0, video_key=camera.key, episode_index=span.episode)
                write_video(path, list(reader.frames(span, camera)), round(source.fps))
        task = int(table["task_index"][0].as_py())
        episodes.append({"episode_index": span.episode, "tasks": [source.tasks[task]], "length": span.length})
        rows = reader.rows(span).columns
        statistics.append({"episode_index": span.episode, "stats": {key: stats(rows[key]) for key in rows}})
    lines = {
        "episodes.jsonl": episodes,
        "episodes_stats.jsonl": statistics,
        "tasks.jsonl": [{"task_index": number, "task": text} for number, text in enumerate(source.tasks)],
    }
    (root / "meta").mkdir(parents=True)
    for name, rows in lines.items():
        (root / "meta" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "meta/info.json").write_text(json.dumps(legacy))
    return root


def stats(values: np.ndarray) -> dict[str, list[float]]:
    kinds = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    return {kind: value.astype(float).tolist() for kind, value in kinds.items()} | {"count": [len(values)]}


def write_video(path: Path, frames: list[np.ndarray], fps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("h264", fps, options={"crf": "18", "g": "2"})
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
