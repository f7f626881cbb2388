"""LeRobot's own training script on the tiny π0.5, without anything of our stopwatch."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import lerobot.scripts.lerobot_train as lerobot_train
import torch
import torch.distributed as dist
from lerobot.datasets import LeRobotDatasetMetadata
from lerobot.policies.pi05.modeling_pi05 import PI05Policy

from somaspeed.config import load_config
from somaspeed.native import pi05 as native_pi05
from tests.conftest import ROOT

CONFIG = ROOT / "configs" / "pi05" / "native-tiny.toml"


def pi05_losses(dataset: Path, output: Path, steps: int, seed: int = 42) -> list[float]:
    """What LeRobot's own script computes, started by its own command line; only the model's size is ours."""
    config = load_config(CONFIG, [])
    losses = []
    forward = PI05Policy.forward

    def recorded(self, batch, *arguments, **settings):
        loss, outputs = forward(self, batch, *arguments, **settings)
        losses.append(loss.item())
        return loss, outputs

    arguments = {
        "policy.type": "pi05",
        "policy.device": "cpu",
        "policy.push_to_hub": "false",
        "policy.dtype": "float32",
        "policy.train_expert_only": "true",
        "policy.freeze_vision_encoder": "true",
        "policy.gradient_checkpointing": "true",
        "policy.empty_cameras": "1",
        "policy.image_resolution": "[56, 56]",
        "policy.optimizer_lr": "2e-3",
        "policy.optimizer_weight_decay": "0.01",
        "policy.scheduler_warmup_steps": "10",
        "policy.scheduler_decay_steps": "300",
        "policy.scheduler_decay_lr": "1e-4",
        "dataset.repo_id": "any/name",
        "dataset.root": str(dataset),
        "output_dir": str(output),
        "seed": str(seed),
        "num_workers": "0",
        "batch_size": "2",
        "steps": str(steps),
        "save_checkpoint": "false",
    }
    command = ["lerobot-train", *(f"--{key}={value}" for key, value in arguments.items())]
    torch.set_num_threads(1)
    meta = LeRobotDatasetMetadata("any/name", root=dataset)
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(PI05Policy, "forward", recorded),
        native_pi05.prepared(config, meta, "cpu"),
    ):
        lerobot_train.train()
    return losses


def on_a_rank(dataset: Path, output: Path, steps: int) -> list[float]:
    """The mean losses over ranks."""
    dist.init_process_group("gloo")
    with mock.patch.object(dist, "destroy_process_group", lambda *_: None):  # the script ends with it
        losses = pi05_losses(dataset, output, steps)
    every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, losses)
    dist.destroy_process_group()
    return [sum(step) / len(step) for step in zip(*every, strict=True)]
