"""MolmoAct2 at test size, and LeRobot's own pre-processing, forward and backward beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dataio.batch import Batch
from somaspeed.config import Config
from somaspeed.policies.molmoact2 import MolmoAct2
from tests.somaspeed.cases import tiny_config

CHUNK = 10  # of the LIBERO recipe
MODEL = {
    "name": "molmoact2",
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "setup_type": "single franka robotic arm in libero",
    "control_mode": "delta end-effector pose",
}


def molmoact2_config(size: str = "tiny", model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """The tiny MolmoAct2 configuration, with keys of its sections replaced."""
    raw = tiny_config(model={**MODEL, "size": size, **(model or {})}, **sections)
    raw.model.options.pop("empty_cameras")
    return raw


def native_batch(policy: MolmoAct2, batch: Batch) -> dict[str, Any]:
    """What LeRobot's loader and pre-processor hand to `MolmoAct2Policy.forward` for the same samples."""
    raw: dict[str, Any] = {
        "observation.state": batch.columns["observation.state"],
        "action": batch.columns["action"],
        "action_is_pad": batch.is_pad["action"],
        "task": [policy.tasks[task] for task in batch.task.tolist()],
    }
    for camera in policy.cameras:
        raw[f"observation.images.{camera}"] = batch.images[camera].permute(0, 3, 1, 2).float() / 255
    return policy.preprocessor(raw)


@contextlib.contextmanager
def checkpointing(policy: MolmoAct2, enabled: bool) -> Iterator[None]:
    """LeRobot's own activation checkpointing with all that it brings along, while in the context."""
    from somaspeed.policies.molmoact2.bench import checkpointed

    with checkpointed(policy.module, enabled):
        yield


def gradients(policy: MolmoAct2, loss: Tensor) -> dict[str, Tensor]:
    policy.module.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.module.named_parameters() if p.grad is not None}


def native(policy: MolmoAct2, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of LeRobot's forward with the batch's noise and times."""
    prepared = native_batch(policy, batch)
    noise = torch.nn.functional.pad(batch.extra["noise"], (0, 32 - batch.extra["noise"].shape[-1]))
    loss, _ = policy.module._compute_flow_matching_loss_joint_per_layer(
        batch=prepared,
        model_inputs=policy.module._model_inputs(prepared),
        timesteps=batch.extra["time"],
        noise=noise,
    )
    return loss.item(), gradients(policy, loss)


def our_loss(policy: MolmoAct2, batch: Batch, inputs: Any, frozen: Tensor | None = None) -> Tensor:
    prefix = policy.prefix(inputs, policy.frozen(inputs) if frozen is None else frozen)
    return policy.expert_loss(prefix, inputs, batch.extra["noise"], batch.extra["time"])


def ours(policy: MolmoAct2, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    loss = our_loss(policy, batch, policy.prepare(batch))
    return loss.item(), gradients(policy, loss)


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative L2 difference over all gradient tensors."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / a[name].norm()).item() for name in a)
