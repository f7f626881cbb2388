"""GR00T at test size on the shipped sample: configurations, LeRobot's own forward, sharpened weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lerobot.policies.groot.groot_n1_7 as upstream
import torch
from lerobot.policies.groot.groot_n1_7 import _tie_unused_qwen_lm_head
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

from dataio.batch import Batch
from somaspeed.config import Config, parse_config
from somaspeed.policies.groot import Groot
from somaspeed.policies.groot.policy import Inputs


def groot_config(**sections: dict[str, Any]) -> Config:
    """The tiny GR00T configuration, with keys of its sections replaced."""
    raw: dict[str, Any] = {
        "output": "unused",
        "model": {
            "name": "groot",
            "size": "tiny",
            "embodiment_tag": "libero_sim",
            "action_decode_transform": "none",
            "numerics": "native",
        },
        "training": {"steps": 6, "microbatch": 4, "lr": 1e-3, "weight_decay": 1e-5, "log_every": 1},
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_config(raw, "test")


def native_inputs(policy: Groot, batch: Batch) -> dict[str, Any]:
    """What LeRobot's loader and its own pre-processor hand to the model for the same samples, prompts left-padded."""
    raw = {
        "observation.state": batch.columns["observation.state"],
        "action": batch.columns["action"],
        "action_is_pad": batch.is_pad["action"],
        "task": [policy.tasks[task] for task in batch.task.tolist()],
    }
    for camera in policy.cameras:
        raw[f"observation.images.{camera}"] = batch.images[camera].permute(0, 3, 1, 2).float() / 255
    return policy.module._filter_groot_inputs(policy.preprocessor(raw), include_action=True)


def native_loss(policy: Groot, batch: Batch, seed: int | None = None) -> Tensor:
    """The loss of LeRobot's own forward with the batch's noise and time; `seed` sets the state of its dropout."""
    dtype, noise, time = policy.core.dtype, batch.extra["noise"], batch.extra["time"]
    policy.rows.write_back()
    inputs = native_inputs(policy, batch)
    if seed is not None:
        torch.manual_seed(seed)
    with (
        mock.patch.object(upstream.torch, "randn", lambda *_, **__: noise.to(dtype)),
        mock.patch.object(policy.head, "sample_time", lambda *_, **__: time.to(dtype)),
    ):
        return policy.core(inputs)["loss"]


def our_loss(policy: Groot, batch: Batch, inputs: Inputs) -> Tensor:
    prefix = policy.prefix(inputs, policy.frozen(inputs))
    return policy.expert_loss(prefix, inputs, batch.extra["noise"], batch.extra["time"])


def native_gradients(policy: Groot, loss: Tensor) -> tuple[dict[str, Tensor], float]:
    """Gradients of LeRobot's parameters under the names of ours, and the largest one among the rows left out."""
    policy.module.zero_grad(set_to_none=True)
    loss.backward()
    found, outside = {}, 0.0
    for name, parameter in policy.module.named_parameters():
        if not parameter.requires_grad or parameter.grad is None:
            continue
        label = policy.rows.cut.get(id(parameter))
        if label is None:
            found[name] = parameter.grad
            continue
        rows = policy.rows.tables[label][1]
        found[label] = parameter.grad[rows].clone()
        rest = parameter.grad.clone()
        rest[rows] = 0
        outside = max(outside, rest.abs().max().item())
    policy.module.zero_grad(set_to_none=True)
    return found, outside


def our_gradients(policy: Groot, loss: Tensor) -> dict[str, Tensor]:
    live = policy.live_parameters()
    for parameter in live.values():
        parameter.grad = None
    loss.backward()
    found = {name: parameter.grad for name, parameter in live.items() if parameter.grad is not None}
    for parameter in live.values():
        parameter.grad = None
    return found


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative L2 difference over all gradient tensors.

    A key bias moves no softmax: its true gradient is zero, and what is found is rounding.
    """
    assert a.keys() == b.keys()
    return max(
        ((a[name] - b[name]).norm() / a[name].norm()).item() for name in a if not name.endswith("attn1.to_k.bias")
    )


def total(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The relative L2 difference over all gradients together."""
    squared = sum((a[name] - b[name]).square().sum() for name in a)
    return (squared / sum(value.square().sum() for value in a.values())).sqrt().item()


@torch.no_grad()
def sharpened(policy: Groot, dtype: torch.dtype = torch.float64, seed: int = 3) -> Groot:
    """Give `policy` large random weights. At LeRobot's initialisation attention is so flat that a wrong mask or
    position hardly shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.core.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(drawn * (0.5 if "embed" in name else 0.12))
        else:
            parameter.copy_(drawn * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    _tie_unused_qwen_lm_head(policy.core.backbone.model)
    policy.attach(policy.module.to(dtype))
    return policy


@contextlib.contextmanager
def all_float64() -> Iterator[None]:
    """Lift the parts that transformers computes in float32 whatever the model's dtype: their rounding, magnified by
    sharp weights and dropout, is all that would be seen of a difference."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(-2).double(), sin.unsqueeze(-2).double()
        return q * cos + qwen.rotate_half(q) * sin, k * cos + qwen.rotate_half(k) * sin

    with (
        mock.patch.object(qwen.Qwen3VLTextRMSNorm, "forward", norm),
        mock.patch.object(qwen, "apply_rotary_pos_emb_vision", rotation),
    ):
        yield
