"""GR00T for the benchmarks: LeRobot's own forward and pre-processor, and FLOPs at any size on the meta device."""

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
# Tokens of LIBERO Spatial's prompts with the published tokenizer: of the longest, to which native pads a batch of 80,
# and to which we pad every batch.
LONGEST_PROMPT = 156
OPENING = 4  # tokens before the first image


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


def libero_layout(side: int) -> tuple[Layout, int]:
    """The layout of a LIBERO prompt, and how many text tokens the longest has."""
    image, other = 1, 0
    opening, between = [other] * OPENING, [other] * 2
    tokens: list[int] = []
    for camera in range(LIBERO_CAMERAS):
        tokens += (between if camera else opening) + [image] * side**2
    layout = find_layout([*tokens, other], image, side)
    return layout, LONGEST_PROMPT - (16 // 2) ** 2 * LIBERO_CAMERAS - OPENING - 2 * (LIBERO_CAMERAS - 1) - 1


@contextlib.contextmanager
def countable(size: int) -> Iterator[None]:
    """Replace what reads values in LeRobot's and transformers' forward, so that it runs on meta tensors.

    No product is added or removed: position ids, placeholder mask and attention mask get values of the right shape,
    and deepstack features are not added.
    """

    def positions(_self: Any, model_input: dict[str, Tensor]) -> None:
        model_input["position_ids"] = torch.zeros(4, *model_input["input_ids"].shape, dtype=torch.int64, device="meta")

    def placeholders(
        _self: Any, input_ids: Tensor, inputs_embeds: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
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

    Both sides have the longest prompt: a batch of 80 has one of it, and pads to it.
    """
    dimensions, (side, _) = SIZES[size], resolution(size)
    meta = torch.device("meta")
    core = build_core(dimensions, meta, 0)
    core.train()
    head, config = core.action_head, core.config
    layout, text = libero_layout(side // PATCH // MERGE)
    tokens = len(layout.fixed) + text
    width, horizon = config.max_action_dim, config.action_horizon
    with meta:
        patches = LIBERO_CAMERAS * (side // PATCH) ** 2
        batch = {
            "input_ids": torch.zeros(1, tokens, dtype=torch.int64),
            "attention_mask": torch.ones(1, tokens, dtype=torch.int64),
            "pixel_values": torch.empty(patches, 3 * TEMPORAL * PATCH**2),
            "image_grid_thw": torch.tensor([[1, side // PATCH, side // PATCH]] * LIBERO_CAMERAS, device="cpu"),
            "mm_token_type_ids": torch.zeros(1, tokens, dtype=torch.int32),
            "state": torch.empty(1, 1, config.max_state_dim),
            "action": torch.empty(1, horizon, width),
            "action_mask": torch.empty(1, horizon, width),
            "embodiment_id": torch.full((1,), LIBERO_EMBODIMENT, dtype=torch.int32),
        }
        images = torch.empty(1, LIBERO_CAMERAS, side, side, 3, dtype=torch.uint8)
        lengths, bucket = torch.full((1,), tokens), torch.zeros(1, dtype=torch.int64)
        valid = torch.empty(1, LIBERO_STEPS)
        places = Places(torch.arange(LIBERO_CAMERAS * layout.tokens), torch.arange(tokens - LIBERO_CAMERAS * layout.tokens))
    with FlopCounterMode(display=False) as native, countable(tokens):
        backbone_input, action_input = dict(batch), dict(batch)
        seen = core.backbone(core.backbone.prepare_input(backbone_input))
        core.action_head(seen, core.action_head.prepare_input(action_input))["loss"].backward()
    with FlopCounterMode(display=False) as unused_head, torch.no_grad():
        core.backbone.model.lm_head(torch.empty(1, tokens, core.backbone.language_model.embed_tokens.embedding_dim, device=meta))

    backbone = Backbone(core, layout, side, text)
    rows = LiveRows(head, HEAD, LIBERO_EMBODIMENT, horizon)
    with FlopCounterMode(display=False) as vision, torch.no_grad():
        backbone.see(images)
    with FlopCounterMode(display=False) as prefix:
        features = backbone.features(images, batch["input_ids"][:, :text])
    with FlopCounterMode(display=False) as forward:
        predicted = velocity(
            head, rows, places, Features(features, lengths, False), batch["state"], batch["action"], bucket,
            LIBERO_STEPS, LIBERO_ACTION,
        )  # fmt: skip
        actions = batch["action"][:, :LIBERO_STEPS, :LIBERO_ACTION]
        loss = flow_loss(predicted, actions, actions, valid, per_batch=False)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counters = {"vision": vision, "prefix": prefix, "forward": forward, "backward": backward}
    counted = {name: counter.get_total_flops() / 1e12 for name, counter in counters.items()}
    cached = counted["forward"] + counted["backward"]
    return {
        "policy": "groot",
        "size": size,
        "parameters": sum(p.numel() for p in core.parameters()),
        "trainable_parameters": sum(p.numel() for p in core.parameters() if p.requires_grad),
        "live_parameters": sum(
            p.numel() for p in core.parameters() if p.requires_grad and id(p) not in rows.cut
        ) + sum(p.numel() for p in rows.parameters.values()),
        "tokens": tokens,
        "native": native.get_total_flops() / 1e12,
        "native_language_head": unused_head.get_total_flops() / 1e12,
        "somaspeed": counted["prefix"] + cached,
        "somaspeed_cached": cached,
        "native_variants": {VARIANTS[0].name: native.get_total_flops() / 1e12},
        "somaspeed_split": {
            "vision": counted["vision"],
            "prefix_language_model": counted["prefix"] - counted["vision"],
            "expert_forward": counted["forward"],
            "expert_backward": counted["backward"],
        },
    }
