"""Policies and batches at test size, on the shipped sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dataio.batch import Batch
from dataio.encode import decode_image
from dataio.loader import batches
from dataio.reader import ShardReader
from somaspeed.actor import Actor
from somaspeed.checkpoint import CheckpointError
from somaspeed.config import Config, parse_config
from somaspeed.doctor.cli import main as doctor
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


def check_actor(finished: Path, sample: ShardReader, moved: Path, part: str) -> None:
    """Whether the checkpoint of run `finished`, copied to `moved`, acts there as the evaluation and the doctor load it,
    is examined, and is refused without a tensor whose name has `part`, which LeRobot itself passes over.
    """
    shutil.copytree((finished / "checkpoints/last/pretrained_model").resolve(), moved)
    hidden = moved.with_name("hidden")
    (finished / "checkpoints").rename(hidden)
    try:
        actor = Actor(moved, torch.device("cpu"))
    finally:
        hidden.rename(finished / "checkpoints")
    saved, state = load_file(moved / "model.safetensors"), actor.policy.state_dict()
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    images = {name: decode_image(sample.encoded(5, name).tobytes()) for name in actor.cameras}
    frame = images, sample.columns["observation.state"][5], sample.manifest.tasks[sample.task[5]]
    first, again, other = (actor.act(*frame, seed) for seed in (3, 3, 4))
    assert first.shape == (actor.n_action_steps, 7) and np.array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(first, actor.untrained().act(*frame, 3))
    report = moved.with_name("doctor.json")
    examine = ["--checkpoint", str(moved), "--shards", str(sample.directory), "--frames", "8", "--json", str(report)]
    assert doctor(examine) in (0, 1)
    found = json.loads(report.read_text())
    levels = {finding["check"]: finding["level"] for finding in found["findings"]}
    assert len(found["dimensions"]) == 7
    assert [levels[check] for check in ("key map", "statistics", "round trip")] == ["ok"] * 3
    del saved[next(name for name in saved if part in name)]
    save_file(saved, moved / "model.safetensors")
    with pytest.raises(CheckpointError, match="refusing a partial load|Missing key"):
        Actor(moved, torch.device("cpu"))
