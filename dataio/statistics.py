"""Exact statistics of the columns, over all frames of all shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import safe_open

from dataio.manifest import Column, Statistics


def compute_statistics(indexes: list[Path], columns: list[Column]) -> dict[str, Statistics]:
    """Exact statistics of every column over all frames in the shards' indexes, in float64, per dimension.

    std is that of the population; quantiles interpolate linearly between the two nearest frames.
    """
    statistics = {}
    for column in columns:
        parts = []
        for path in indexes:
            with safe_open(path, framework="np") as file:
                parts.append(file.get_tensor(f"column.{column.key}"))
        values = np.concatenate(parts).astype(np.float64)
        q01, q99 = np.quantile(values, (0.01, 0.99), axis=0)
        statistics[column.key] = Statistics(
            mean=values.mean(axis=0).tolist(),
            std=values.std(axis=0).tolist(),
            min=values.min(axis=0).tolist(),
            max=values.max(axis=0).tolist(),
            q01=q01.tolist(),
            q99=q99.tolist(),
            count=len(values),
        )
    return statistics
