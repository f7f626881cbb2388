"""GR00T for the benchmarks: LeRobot's own forward and pre-processor, and FLOPs at any size on the meta device.

Operators that compute, dispatched by our step at published depths whatever the batch (`somaspeed-bench operations`):
3,902 in float32 and 5,652 under bfloat16 autocast, which rounds the head's weights anew in every step; masters stay
float32. The host never waits in either.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import lerobot.policies.groot.groot_n1_7 as upstream
import torch
from lerobot.policies.groot.groot_n1_7 import GR00TN17
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

from dataio.batch import Batch
from somaspeed.bench.variants import Variant
from somaspeed.policies.groot.backbone import Backbone
from somaspeed.policies.groot.head import Features, Places, flow_loss, velocity
from somaspeed.policies.groot.images import normalize
from somaspeed.policies.groot.policy import HEAD, Groot, Inputs
from somaspeed.policies.groot.prompt import MERGE, PATCH, TEMPORAL, Layout, find_layout
from somaspeed.policies.groot.rows import LiveRows
from somaspeed.policies.groot.sizes import SIZES, build_core, resolution

VARIANTS = (Variant("upstream", published=True, checkpointing=False),)
# Keys of [model] beside name and size: the native numerics, so that losses can be compared.
MODEL = {
    "numerics": "native",
    "embodiment_tag": "libero_sim",
    "action_decode_transform": "none",
    "tokenizer": "trained",
}
LIBERO_STEPS, LIBERO_ACTION, LIBERO_CAMERAS, LIBERO_EMBODIMENT = 40, 7, 2, 2
OPENING = 4  # tokens before the first image
# Tokens of LIBERO Spatial's texts and of what ends them, in prompts of 153 and 156 tokens: mean and maximum over its
# ten tasks, counted with the vocabulary of the published tokenizer. Over the frames of the shipped sample the mean is
# 152.6.
MEAN_TEXT, LONGEST_TEXT = 18, 21


@contextlib.contextmanager
def native_mode(policy: Groot, _variant: Variant) -> Iterator[None]:
    """Within it LeRobot's module holds the live rows; after it, the gradients of its tables are those of our rows."""
    policy.rows.write_back()
    yield
    for label, (table, rows) in policy.rows.tables.items():
        if table.grad is not None:
            policy.rows.parameters[label].grad = table.grad[rows].clone()
            table.grad = None


@functools.lru_cache(maxsize=1)
def native_batch(policy: Groot, inputs: Inputs) -> dict[str, Tensor]:
    """What LeRobot's pre-processor would have given for `inputs`: prompts padded on the left, two frames per patch."""
    layout, device = policy.prompts.layout, policy.device
    batch, size = len(inputs.text), len(layout.fixed) + inputs.text.shape[1]
    tokens = torch.cat([layout.fixed.to(device).expand(batch, -1), inputs.text], dim=1)
    index = (torch.arange(size, device=device) + inputs.lengths[:, None]) % size
    valid = torch.arange(size, device=device) >= size - inputs.lengths[:, None]
    images = inputs.images.flatten(0, 1)
    side = images.shape[1] // PATCH // MERGE
    blocks = normalize(images).view(len(images), side, MERGE, PATCH, side, MERGE, PATCH, 3)
    patches = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).flatten(0, 4)
    config = policy.core.config
    mask = torch.zeros(batch, config.action_horizon, config.max_action_dim, device=device)
    mask[:, : policy.steps, : policy.action_dim] = inputs.valid[..., None]
    tokens = torch.where(valid, tokens.gather(1, index), policy.prompts.pad)
    return {
        "input_ids": tokens,
        "attention_mask": valid.long(),
        "pixel_values": patches[:, :, None].expand(-1, -1, TEMPORAL, -1, -1).flatten(1),
        "image_grid_thw": torch.tensor([[1, side * MERGE, side * MERGE]] * len(images), device=device),
        "mm_token_type_ids": (tokens == policy.core.backbone.model.config.image_token_id).int(),
        "state": inputs.state,
        "action": inputs.actions,
        "action_mask": mask,
        "embodiment_id": torch.full((batch,), policy.rows.embodiment, dtype=torch.int32, device=device),
    }


@contextlib.contextmanager
def given_draws(core: GR00TN17, noise: Tensor, time: Tensor) -> Iterator[None]:
    """Within it LeRobot's head takes this noise and time for its own draws."""
    with (
        mock.patch.object(upstream.torch, "randn", lambda *_, **__: noise),
        mock.patch.object(core.action_head, "sample_time", lambda *_, **__: time),
    ):
        yield


def native_loss(policy: Groot, _variant: Variant, inputs: Inputs, noise: Tensor, time: Tensor) -> Tensor:
    """The loss of LeRobot's own forward, dropout and all. Run it and its backward inside `native_mode`."""
    batch = native_batch(policy, inputs)
    if inputs.dropout_seed is not None:
        torch.manual_seed(inputs.dropout_seed)
    with policy.precision(), given_draws(policy.core, noise, time):
        return policy.core(dict(batch))["loss"]


def native_prepare(policy: Groot, batch: Batch) -> Callable[[], Any]:
    """LeRobot's own pre-processor over the decoded frames of `batch`, from the tensors that its loader would give."""
    on_host = batch.to("cpu")
    raw = {
        OBS_STATE: on_host.columns[OBS_STATE],
        ACTION: on_host.columns[ACTION],
        f"{ACTION}_is_pad": on_host.is_pad[ACTION],
        "task": [policy.tasks[task] for task in on_host.task.tolist()],
        **{f"{OBS_IMAGES}.{name}": image.permute(0, 3, 1, 2) for name, image in on_host.images.items()},
    }
    return lambda: policy.preprocessor(dict(raw))


def libero_layout(side: int) -> Layout:
    """The layout of a LIBERO prompt, with images of `side` × `side` tokens."""
    image, other = 1, 0
    tokens = [other] * OPENING
    for camera in range(LIBERO_CAMERAS):
        tokens += [other] * (2 if camera else 0) + [image] * side**2
    return find_layout([*tokens, other], image, side)


@contextlib.contextmanager
def countable(size: int) -> Iterator[None]:
    """Replace what reads values in LeRobot's and transformers' forward, so that it runs on meta tensors.

    No product is added or removed: position ids, placeholder mask and attention mask get values of the right shape,
    and deepstack features are not added.
    """

    def positions(_self: Any, model_input: dict[str, Tensor]) -> None:
        model_input["position_ids"] = torch.zeros(4, *model_input["input_ids"].shape, dtype=torch.int64, device="meta")

    def placeholders(_self: Any, input_ids: Tensor, inputs_embeds: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        return torch.empty(inputs_embeds.shape, dtype=torch.bool, device="meta"), None

    mask = torch.ones(1, 1, size, size, dtype=torch.bool, device="meta")
    with (
        mock.patch.object(upstream.Qwen3Backbone, "_ensure_legacy_qwen3_position_ids", positions),
        mock.patch.object(qwen.Qwen3VLModel, "get_placeholder_mask", placeholders),
        mock.patch.object(qwen.Qwen3VLTextModel, "_deepstack_process", lambda _self, hidden, *_: hidden),
        mock.patch.object(qwen, "create_causal_mask", lambda **_: mask),
    ):
        yield


def flops(size: str) -> dict[str, Any]:
    """TFLOP per sample, forward and backward, at the LIBERO recipe, counted on the meta device at batch 1.

    As for the other policies ours is at the mean prompt, and native at the longest, to which its batches are padded;
    the variant at the mean is native without those pads. Ours has pads as well, since it keeps one shape for all
    batches: where all ten tasks are trained at once, it computes what `longest_prompt` says.
    """
    side, _ = resolution(size)
    core = build_core(SIZES[size], torch.device("meta"), 0)
    core.train()
    rows = LiveRows(core.action_head, HEAD, LIBERO_EMBODIMENT, core.config.action_horizon)
    layout = libero_layout(side // PATCH // MERGE)
    fixed = len(layout.fixed)
    mean, longest = (meta_batch(core, side, fixed + text) for text in (MEAN_TEXT, LONGEST_TEXT))
    native = {VARIANTS[0].name: native_flops(core, longest), "at the mean prompt": native_flops(core, mean)}
    split = our_flops(core, rows, layout, mean, side, MEAN_TEXT)
    live = [p for p in core.parameters() if p.requires_grad and id(p) not in rows.cut] + [*rows.parameters.values()]
    return {
        "policy": "groot",
        "size": size,
        "parameters": sum(p.numel() for p in core.parameters()),
        "trainable_parameters": sum(p.numel() for p in core.parameters() if p.requires_grad),
        "live_parameters": sum(p.numel() for p in live),
        "native": native[VARIANTS[0].name],
        **summed(split),
        "native_variants": native,
        "somaspeed_split": split,
        "longest_prompt": summed(our_flops(core, rows, layout, longest, side, LONGEST_TEXT)),
        "tokens": {"somaspeed": fixed + MEAN_TEXT, "native": fixed + LONGEST_TEXT},
    }


def summed(split: dict[str, float]) -> dict[str, float]:
    """The whole step, and the step whose features come from the cache."""
    cached = split["expert_forward"] + split["expert_backward"]
    return {"somaspeed": sum(split.values()), "somaspeed_cached": cached}


def meta_batch(core: GR00TN17, side: int, tokens: int) -> dict[str, Tensor]:
    """One LIBERO sample as LeRobot's pre-processor gives it, on the meta device."""
    config, patches = core.config, LIBERO_CAMERAS * (side // PATCH) ** 2
    grid = torch.tensor([[1, side // PATCH, side // PATCH]] * LIBERO_CAMERAS)
    with torch.device("meta"):
        return {
            "input_ids": torch.zeros(1, tokens, dtype=torch.int64),
            "attention_mask": torch.ones(1, tokens, dtype=torch.int64),
            "pixel_values": torch.empty(patches, 3 * TEMPORAL * PATCH**2),
            "image_grid_thw": grid,
            "mm_token_type_ids": torch.zeros(1, tokens, dtype=torch.int32),
            "state": torch.empty(1, 1, config.max_state_dim),
            "action": torch.empty(1, config.action_horizon, config.max_action_dim),
            "action_mask": torch.empty(1, config.action_horizon, config.max_action_dim),
            "embodiment_id": torch.full((1,), LIBERO_EMBODIMENT, dtype=torch.int32),
        }


def native_flops(core: GR00TN17, batch: dict[str, Tensor]) -> float:
    """TFLOP of LeRobot's forward and backward."""
    with FlopCounterMode(display=False) as counter, countable(batch["input_ids"].shape[1]):
        seen = core.backbone(core.backbone.prepare_input(dict(batch)))
        core.action_head(seen, core.action_head.prepare_input(dict(batch)))["loss"].backward()
    return counter.get_total_flops() / 1e12


def our_flops(
    core: GR00TN17, rows: LiveRows, layout: Layout, batch: dict[str, Tensor], side: int, text: int
) -> dict[str, float]:
    """TFLOP of our forward and backward, by part."""
    backbone = Backbone(core, layout, side, text)
    with torch.device("meta"):
        images = torch.empty(1, LIBERO_CAMERAS, side, side, 3, dtype=torch.uint8)
        lengths, bucket = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        count = LIBERO_CAMERAS * layout.tokens
        places = Places(torch.arange(count), torch.arange(len(layout.fixed) + text - count))
        valid = torch.empty(1, LIBERO_STEPS)
    with FlopCounterMode(display=False) as vision, torch.no_grad():
        backbone.see(images)
    with FlopCounterMode(display=False) as prefix:
        features = Features(backbone.features(images, batch["input_ids"][:, :text]), lengths, False)
    with FlopCounterMode(display=False) as forward:
        predicted = velocity(
            core.action_head, rows, places, features, batch["state"], batch["action"], bucket,
            LIBERO_STEPS, LIBERO_ACTION,
        )  # fmt: skip
        actions = batch["action"][:, :LIBERO_STEPS, :LIBERO_ACTION]
        loss = flow_loss(predicted, actions, actions, valid, per_batch=False)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    vision_flops, prefix_flops = vision.get_total_flops(), prefix.get_total_flops()
    return {
        "vision": vision_flops / 1e12,
        "prefix_language_model": (prefix_flops - vision_flops) / 1e12,
        "expert_forward": forward.get_total_flops() / 1e12,
        "expert_backward": backward.get_total_flops() / 1e12,
    }
