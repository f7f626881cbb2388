"""Small shard sets, made by the sharding command's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dataio.encode import make_codec
from dataio.sharding import Options, shard_dataset


def make_shards(
    dataset: Path,
    out: Path,
    codec: str = "png",
    samples_per_shard: int = 6,
    order: Literal["episode", "shuffled"] = "episode",
) -> Path:
    """Shard `dataset` into `out` and return `out`; JPEG is of quality 95, 4:4:4."""
    options = Options(make_codec(codec, 95, "4:4:4"), samples_per_shard=samples_per_shard, order=order)
    shard_dataset(str(dataset), out, options)
    return out
