"""π0.5 for the benchmarks: LeRobot's own forward in each native variant, and FLOPs at any size on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi05.configuration_pi05 import DEFAULT_IMAGE_SIZE, PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from somaspeed.bench.variants import Variant
from somaspeed.policies.pi05.forward import embed_prefix, expert_velocity, flow_loss, prefix_kv
from somaspeed.policies.pi05.policy import PATCH, PI05, Inputs
from somaspeed.policies.pi05.sizes import SIZES, build_on_meta

# The published run used checkpointing; its number of camera slots is not stated, LeRobot's LIBERO recipe has one empty.
VARIANTS = (
    Variant("checkpointing, 3 slots", published=True, checkpointing=True, empty_slots=1),
    Variant("checkpointing, 2 slots", published=False, checkpointing=True, empty_slots=0),
    Variant("no checkpointing, 3 slots", published=False, checkpointing=False, empty_slots=1),
    Variant("no checkpointing, 2 slots", published=False, checkpointing=False, empty_slots=0),
)
MODEL = {"empty_cameras": 1}  # keys of [model] beside name and size
LIBERO_STATE, LIBERO_ACTION, LIBERO_CAMERAS = 8, 7, 2
PROMPT = 55  # tokens of a LIBERO Spatial prompt: the measured mean; every length up to 64 costs the same here


@contextlib.contextmanager
def checkpointing(core: PI05Pytorch, enabled: bool) -> Iterator[None]:
    """LeRobot's own activation checkpointing, while in the context."""
    if enabled:
        core.gradient_checkpointing_enable()
    try:
        yield
    finally:
        core.gradient_checkpointing_disable()


def native_losses(
    core: PI05Pytorch, empty_slots: int, inputs: Inputs, noise: Tensor, time: Tensor, length: int | None = None
) -> Tensor:
    """The loss of LeRobot's `PI05Pytorch.forward` on the same inputs, with empty slots and prompts padded to `length`
    (default: as LeRobot pads them).
    """
    config = core.config
    batch, cameras = inputs.images.shape[:2]
    patches = cameras * (config.image_resolution[0] // PATCH) ** 2
    images = list(inputs.images.unbind(1))
    images += [torch.full_like(images[0], -1)] * empty_slots
    present = torch.ones(batch, dtype=torch.bool, device=noise.device)
    masks = [present] * cameras + [~present] * empty_slots
    length = length or config.tokenizer_max_length
    tokens = torch.nn.functional.pad(inputs.tokens, (0, length - inputs.tokens.shape[1]))
    valid = torch.arange(length, device=noise.device) < (inputs.lengths - patches)[:, None]
    losses = core(images, masks, tokens, valid, inputs.actions, noise, time)
    return losses[..., : config.output_features[ACTION].shape[0]].mean()


def native_mode(policy: PI05, variant: Variant) -> contextlib.AbstractContextManager[None]:
    """The context in which a variant's forward and backward run."""
    return checkpointing(policy.core, variant.checkpointing)


def native_loss(policy: PI05, variant: Variant, inputs: Inputs, noise: Tensor, time: Tensor) -> Tensor:
    """`native_losses` of a policy under its precision. Run it and its backward inside `native_mode`."""
    with policy.precision():
        return native_losses(policy.core, variant.empty_slots, inputs, noise, time)


def flops(size: str) -> dict[str, Any]:
    """TFLOP per sample, forward and backward, at the LIBERO recipe, counted on the meta device at batch 1."""
    dimensions = SIZES[size]
    resolution = dimensions.resolution if dimensions else DEFAULT_IMAGE_SIZE
    image = PolicyFeature(FeatureType.VISUAL, (3, 256, 256))
    config = PI05Config(
        input_features={
            **{f"{OBS_IMAGES}.camera{index}": image for index in range(LIBERO_CAMERAS)},
            OBS_STATE: PolicyFeature(FeatureType.STATE, (LIBERO_STATE,)),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (LIBERO_ACTION,))},
        image_resolution=(resolution, resolution),
        train_expert_only=True,
        freeze_vision_encoder=True,
        device="cpu",
    )
    core = build_on_meta(config, dimensions)
    core.train()
    patches = LIBERO_CAMERAS * (resolution // PATCH) ** 2
    with torch.device("meta"):
        inputs = Inputs(
            images=torch.empty(1, LIBERO_CAMERAS, 3, resolution, resolution),
            tokens=torch.empty(1, 64, dtype=torch.int64),
            lengths=torch.full((1,), patches + PROMPT),
            actions=torch.empty(1, config.chunk_size, config.max_action_dim),
            is_pad=torch.zeros(1, config.chunk_size, dtype=torch.bool),
        )
        noise, time = torch.empty_like(inputs.actions), torch.empty(1)
    native = {}
    for variant in VARIANTS:
        with FlopCounterMode(display=False) as counter, checkpointing(core, variant.checkpointing):
            native_losses(core, variant.empty_slots, inputs, noise, time).backward()
        native[variant.name] = counter.get_total_flops() / 1e12
    with FlopCounterMode(display=False) as vision, torch.no_grad():
        embed_prefix(core, inputs.images, inputs.tokens)
    with FlopCounterMode(display=False) as prefix:
        kv = prefix_kv(core, inputs.images, inputs.tokens, inputs.lengths)
    with FlopCounterMode(display=False) as forward:
        loss = flow_loss(
            expert_velocity(core, kv, inputs.lengths, noise, time), inputs.actions, noise, LIBERO_ACTION, None
        )
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = {name: counter.get_total_flops() / 1e12 for name, counter in
               (("vision", vision), ("prefix", prefix), ("forward", forward), ("backward", backward))}  # fmt: skip
    expert = counted["forward"] + counted["backward"]
    return {
        "policy": "pi05",
        "size": size,
        "parameters": sum(p.numel() for p in core.parameters()),
        "trainable_parameters": sum(p.numel() for p in core.parameters() if p.requires_grad),
        "native": next(native[variant.name] for variant in VARIANTS if variant.published),
        "somaspeed": counted["prefix"] + expert,
        "somaspeed_cached": expert,
        "native_variants": native,
        "somaspeed_split": {
            "vision": counted["vision"],
            "prefix_language_model": counted["prefix"] - counted["vision"],
            "expert_forward": counted["forward"],
            "expert_backward": counted["backward"],
        },
    }
