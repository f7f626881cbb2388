"""MolmoAct2 for the benchmarks: LeRobot's own forward in each native variant, and FLOPs on the meta device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dataio.batch import Batch
from somaspeed.bench.variants import Variant
from somaspeed.policies.molmoact2.assemble import wrap
from somaspeed.policies.molmoact2.forward import (
    Context,
    Layout,
    connector_features,
    expert_velocity,
    flow_loss,
    prefix_kv,
)
from somaspeed.policies.molmoact2.images import pooling_index
from somaspeed.policies.molmoact2.policy import Inputs, MolmoAct2
from somaspeed.policies.molmoact2.prompts import MULTIPLE
from somaspeed.policies.molmoact2.sizes import MAX_ACTION_DIM, PATCH, SIZES, Size, Text, build_on_meta, model_config

# LeRobot's recipe checkpoints; the published one is its.
VARIANTS = (
    Variant("checkpointing", published=True, checkpointing=True),
    Variant("no checkpointing", published=False, checkpointing=False),
)
LIBERO_CAMERAS, LIBERO_STATE, LIBERO_ACTION, LIBERO_CHUNK = 2, 8, 7, 10
# Keys of [model] beside name and size. Native numerics, so that ragged batches can be compared to the last bit.
MODEL = {
    "numerics": "native",
    "chunk_size": LIBERO_CHUNK,
    "n_action_steps": LIBERO_CHUNK,
    "setup_type": "single franka robotic arm in libero",
    "control_mode": "delta end-effector pose",
}
TEXT = 102  # tokens of a LIBERO Spatial prompt beside the image patches: the measured mean, 494 with two images
SPLIT = ("vision", "prefix_language_model", "expert_forward", "expert_backward")
NATIVE_TEXT = 105  # native pads a batch to its longest prompt, 497


@contextlib.contextmanager
def checkpointed(module: MolmoAct2Policy, enabled: bool) -> Iterator[None]:
    """LeRobot's own activation checkpointing, while in the context.

    It also makes the embeddings require gradients, so that the frozen language model is run backward.
    """
    module.config.gradient_checkpointing = enabled
    if enabled:
        module._enable_gradient_checkpointing()
    try:
        yield
    finally:
        module.config.gradient_checkpointing = False
        if enabled:
            module.model.gradient_checkpointing_disable()
            module.model.disable_input_require_grads()
            module.model.model.transformer.gradient_checkpointing = False
            module.model.model.vision_backbone.gradient_checkpointing = False


def native_mode(policy: MolmoAct2, variant: Variant) -> contextlib.AbstractContextManager[None]:
    """The context in which a variant's forward and backward run."""
    return checkpointed(policy.module, variant.checkpointing)


def native_batch(policy: MolmoAct2, inputs: Inputs) -> dict[str, Tensor]:
    """What LeRobot's pre-processor makes of the same samples: left-padded prompts, float patches, padded actions."""
    batch, cameras, count, _ = inputs.patches.shape
    longest = int(inputs.lengths.max())
    places = torch.arange(longest, device=policy.device) - (longest - inputs.lengths)[:, None]
    valid = places >= 0
    tokens = torch.where(valid, inputs.tokens.gather(1, places.clamp_min(0)), policy.prompts.pad)
    image_ids = torch.tensor(policy.prompts.processor.image_token_ids, device=policy.device)
    side = round(len(policy.pooling) ** 0.5)
    images = batch * cameras
    unused = MAX_ACTION_DIM - inputs.actions.shape[-1]
    action_dim_is_pad = torch.arange(MAX_ACTION_DIM, device=policy.device) >= policy.trained_dim
    return {
        "input_ids": tokens,
        "attention_mask": valid.long(),
        "token_type_ids": torch.isin(tokens, image_ids).long(),
        "pixel_values": inputs.patches.flatten(0, 1).float() / 255 * 2 - 1,
        "image_token_pooling": policy.layout.pooling.repeat(images, 1),
        "image_grids": torch.tensor([[side, side, 0, 0]], device=policy.device).repeat(images, 1),
        "image_num_crops": torch.ones(images, dtype=torch.int64, device=policy.device),
        ACTION: torch.nn.functional.pad(inputs.actions, (0, unused)),
        "action_horizon_is_pad": inputs.is_pad,
        "action_dim_is_pad": action_dim_is_pad.expand(batch, -1),
    }


def native_loss(policy: MolmoAct2, variant: Variant, inputs: Inputs, noise: Tensor, time: Tensor) -> Tensor:
    """LeRobot's own loss under the policy's precision. Run it and its backward inside `native_mode`."""
    batch = native_batch(policy, inputs)
    padded = torch.nn.functional.pad(noise, (0, MAX_ACTION_DIM - noise.shape[-1]))
    with policy.precision():
        loss, _ = policy.module._compute_flow_matching_loss_joint_per_layer(
            batch=batch, model_inputs=policy.module._model_inputs(batch), timesteps=time, noise=padded
        )
    return loss


def native_prepare(policy: MolmoAct2, batch: Batch) -> Callable[[], dict[str, Any]]:
    """LeRobot's pre-processing of decoded frames, as its trainer's main process runs it, ready to be called."""
    raw: dict[str, Any] = {
        OBS_STATE: batch.columns[OBS_STATE].cpu(),
        ACTION: batch.columns[ACTION].cpu(),
        f"{ACTION}_is_pad": batch.is_pad[ACTION].cpu(),
        "task": [policy.tasks[task] for task in batch.task.tolist()],
    }
    for camera in policy.cameras:
        raw[f"{OBS_IMAGES}.{camera}"] = batch.images[camera].permute(0, 3, 1, 2).float().cpu() / 255
    return lambda: policy.preprocessor(dict(raw))


def meta_policy(size: Size) -> MolmoAct2Policy:
    """LeRobot's policy of `size` for the LIBERO recipe, on the meta device."""
    image = PolicyFeature(FeatureType.VISUAL, (3, 256, 256))
    config = MolmoAct2Config(
        input_features={
            **{f"{OBS_IMAGES}.camera{index}": image for index in range(LIBERO_CAMERAS)},
            OBS_STATE: PolicyFeature(FeatureType.STATE, (LIBERO_STATE,)),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (LIBERO_ACTION,))},
        action_mode="continuous",
        train_action_expert_only=True,
        chunk_size=LIBERO_CHUNK,
        n_action_steps=LIBERO_CHUNK,
        device="cpu",
    )
    return wrap(config, build_on_meta(model_config(size, {})))


@contextlib.contextmanager
def on_meta(module: MolmoAct2Policy, length: int, hook: bool) -> Iterator[None]:
    """LeRobot's forward without what reads values: masks and embeddings of `length` tokens are given.

    `hook`: the embeddings require gradients, as activation checkpointing makes them.
    """
    core = module.model.model
    rotary = core.transformer.rotary_emb
    table = torch.empty(1, 1, rotary.config.max_position_embeddings, rotary.config.head_dim, device="meta")
    rotary._pos_sin_cache, rotary._pos_cos_cache = table, table
    places = torch.arange(length, device="meta")

    def inputs(_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = torch.empty(1, length, core.config.hidden_size, device="meta", requires_grad=hook)
        return x, torch.empty(1, 1, length, length, device="meta"), places[None], places

    def seen(**_: Any) -> Tensor:
        return torch.ones(1, length, dtype=torch.bool, device="meta")

    with (
        mock.patch.object(module, "_prepare_joint_training_backbone_inputs", inputs),
        mock.patch.object(module, "_encoder_attention_mask_for_action_expert", seen),
        mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),  # knows no meta device
    ):
        yield


def native_meta_loss(module: MolmoAct2Policy) -> Tensor:
    """LeRobot's forward of language model and expert for one sample. Run it inside `on_meta`."""
    times = module.config.num_flow_timesteps
    with torch.device("meta"):
        batch = {
            ACTION: torch.empty(1, LIBERO_CHUNK, MAX_ACTION_DIM),
            "action_dim_is_pad": torch.zeros(1, MAX_ACTION_DIM, dtype=torch.bool),
            "action_horizon_is_pad": torch.zeros(1, LIBERO_CHUNK, dtype=torch.bool),
        }
        noise, time = torch.empty(1, times, LIBERO_CHUNK, MAX_ACTION_DIM), torch.empty(1, times)
    loss, _ = module._compute_flow_matching_loss_joint_per_layer(
        batch=batch, model_inputs={}, timesteps=time, noise=noise
    )
    return loss


def flops(size: str) -> dict[str, Any]:
    """TFLOP per sample, forward and backward, at the LIBERO recipe, counted on the meta device at batch 1.

    Ours runs the mean prompt rounded up, native the longest, to which it pads. Ours pads a batch as well, to its
    longest rounded up: a batch with the longest prompt computes what `longest_prompt` says. Layers of language model
    and expert are alike, so one and two of them are counted, and the rest follows. That all of our step runs on the
    meta device also shows that nothing in it reads a value: there is no host sync.
    """
    whole = SIZES[size]
    split = over_depth(whole, functools.partial(count, text=TEXT))
    native = {name: split["vision"] + value for name, value in over_depth(whole, count_native).items()}
    module = meta_policy(whole)
    return {
        "policy": "molmoact2",
        "size": size,
        "parameters": sum(p.numel() for p in module.parameters()),
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "native": next(native[variant.name] for variant in VARIANTS if variant.published),
        **summed(split),
        "native_variants": native,
        "somaspeed_split": split,
        "longest_prompt": summed(over_depth(whole, functools.partial(count, text=NATIVE_TEXT))),
        "tokens": {"somaspeed": prompt_length(whole, TEXT), "native": image_tokens(whole) + NATIVE_TEXT},
    }


def summed(split: dict[str, float]) -> dict[str, float]:
    """The whole step, and the step whose connector features come from the cache."""
    total = sum(split.values())
    return {"somaspeed": total, "somaspeed_cached": total - split["vision"]}


def over_depth(size: Size, counting: Callable[[Size], dict[str, int]]) -> dict[str, float]:
    """What `counting` finds, in TFLOP, extrapolated from one and two layers to all of them."""
    one, two = (counting(msgspec.structs.replace(size, text=replaced_depth(size, depth))) for depth in (1, 2))
    rest = size.text.depth - 1
    return {name: (one[name] + rest * (two[name] - one[name])) / 1e12 for name in one}


def replaced_depth(size: Size, depth: int) -> Text:
    return msgspec.structs.replace(size.text, depth=depth)


def image_tokens(size: Size) -> int:
    """Image patches in a LIBERO prompt."""
    return LIBERO_CAMERAS * len(pooling_index(size.vision.resolution // PATCH))


def prompt_length(size: Size, text: int) -> int:
    """Tokens of a batch whose longest prompt has `text` beside the image patches."""
    return -(-(image_tokens(size) + text) // MULTIPLE) * MULTIPLE


def count(size: Size, text: int) -> dict[str, int]:
    """FLOP of each part of our step, by the names of `SPLIT`, with `text` tokens beside the image patches."""
    module = meta_policy(size)
    core = module.model.model
    images, length = image_tokens(size), prompt_length(size, text)
    side = size.vision.resolution // PATCH
    times = module.config.num_flow_timesteps
    with torch.device("meta"):
        pooling = torch.empty(images // LIBERO_CAMERAS, 4, dtype=torch.int64)
        patches = torch.empty(1, LIBERO_CAMERAS, side * side, PATCH * PATCH * 3, dtype=torch.uint8)
        layout = Layout(torch.empty(images, dtype=torch.int64), torch.empty(images, dtype=torch.bool), pooling)
        tokens = torch.empty(1, length, dtype=torch.int64)
        actions = torch.empty(1, LIBERO_CHUNK, LIBERO_ACTION)
        noise, time = torch.empty(1, times, LIBERO_CHUNK, MAX_ACTION_DIM), torch.empty(1, times)
        seen = torch.ones(1, length, dtype=torch.bool)
        valid = torch.ones(1, LIBERO_CHUNK, dtype=torch.bool)
    counters = [FlopCounterMode(display=False) for _ in SPLIT]
    with counters[0]:
        features = connector_features(core, patches, pooling)
    with counters[1]:
        kv = prefix_kv(core, layout, features, tokens)
    with counters[2]:
        velocity = expert_velocity(core, Context(kv, seen, valid), noise, time)
        loss = flow_loss(velocity[..., :LIBERO_ACTION], actions, noise[..., :LIBERO_ACTION], valid, False)
    with counters[3]:
        loss.backward()
    return {name: counter.get_total_flops() for name, counter in zip(SPLIT, counters, strict=True)}


def count_native(size: Size) -> dict[str, int]:
    """FLOP of each native variant without its vision, at the longest prompt."""
    module, padded, counted = meta_policy(size), image_tokens(size) + NATIVE_TEXT, {}
    for variant in VARIANTS:
        with checkpointed(module, variant.checkpointing), on_meta(module, padded, hook=variant.checkpointing):
            with FlopCounterMode(display=False) as counter:
                native_meta_loss(module).backward()
        counted[variant.name] = counter.get_total_flops()
    return counted
