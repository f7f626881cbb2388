"""Small shard sets, made by the sharding command's own code, and small loaders over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dataio.claim import Options
from dataio.encode import make_codec
from dataio.loader import Loader
from dataio.reader import ShardReader
from dataio.sharding import shard_dataset

CHUNK = {"action": [0, 1, 2, 3, 4, 5, 6]}


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


def small_loader(reader: ShardReader, **options: Any) -> Loader:
    """A loader of all samples, seed 0, in batches of three with action chunks; `options` go before."""
    defaults = {"samples": None, "windows": CHUNK, "cameras": None, "seed": 0, "microbatch": 3, "workers": 1}
    return Loader(reader, **(defaults | options))
