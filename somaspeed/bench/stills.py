"""A handful of frames as one batch, decoded by Pillow: for benchmarks of the step, which need no pipeline, no DALI."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import torch
from PIL import Image

from dataio.batch import Batch
from dataio.reader import ShardReader
from dataio.windows import Windows
from somaspeed.draws import draw_batch
from somaspeed.policies.base import Policy


def still_batch(reader: ShardReader, policy: Policy, count: int, seed: int) -> Batch:
    """`count` samples spread over the shards, on the host, with what the policy's host side and draws add."""
    samples = np.linspace(0, len(reader) - 1, count).astype(np.int64)
    columns, is_pad = Windows(reader, policy.windows).gather(samples)
    encoded = reader.read(samples, policy.cameras)
    tensor = torch.from_numpy
    batch = Batch(
        sample=tensor(samples),
        epoch=torch.zeros(count, dtype=torch.int64),
        position=torch.arange(count),
        images={
            camera: tensor(np.stack([np.asarray(Image.open(io.BytesIO(data.tobytes()))) for data in images]))
            for camera, images in encoded.items()
        },
        columns={key: tensor(rows) for key, rows in columns.items()},
        is_pad={key: tensor(rows) for key, rows in is_pad.items()},
        task=tensor(reader.task[samples]),
        episode=tensor(reader.episode[samples]),
        frame=tensor(reader.frame[samples]),
        index=tensor(reader.index[samples]),
        timestamp=tensor(reader.timestamp[samples]),
        image_rows=torch.arange(count),
    )
    return dataclasses.replace(batch, extra=policy.host(batch) | draw_batch(seed, batch, policy.draw))
