"""Policies and batches at test size, on the shipped sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dataio.batch import Batch
from dataio.loader import batches
from dataio.reader import ShardReader
from somaspeed.config import Config, parse_config
from somaspeed.draws import draw_batch
from somaspeed.policies import policy_class
from somaspeed.policies.base import Policy


def tiny_config(**sections: dict[str, Any]) -> Config:
    """The tiny π0.5 configuration, with keys of its sections replaced."""
    raw: dict[str, Any] = {
        "output": "unused",
        "model": {"name": "pi05", "size": "tiny", "empty_cameras": 1},
        "training": {"steps": 6, "microbatch": 4, "lr": 1e-3, "log_every": 1},
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_config(raw, "test")


def loaded_policy(config: Config, reader: ShardReader) -> Policy:
    policy = policy_class(config.model.name)(config, reader.manifest, torch.device("cpu"))
    policy.load()
    return policy


def first_batch(policy: Policy, reader: ShardReader, samples: list[int]) -> Batch:
    """The given samples in one batch, with the policy's host inputs and draws in `extra`."""
    return next(
        batches(
            reader,
            np.array(samples),
            windows=policy.windows,
            cameras=policy.cameras,
            microbatch=len(samples),
            transform=lambda batch: policy.host(batch) | draw_batch(7, batch, policy.draw),
        )
    )
