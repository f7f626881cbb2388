"""π0.5 built from LeRobot's own modules at any size, without a download.

LeRobot hard-codes the published widths, so a reduced model is built by constructing `PI05Pytorch` on the meta
device and exchanging the modules whose sizes cannot be configured. The state-dict keys stay LeRobot's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lerobot.policies.pi05.modeling_pi05 as upstream
import msgspec
import torch
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding

HEADS = 8  # LeRobot's attention reshapes to eight query heads, whatever the configuration says


class Transformer(msgspec.Struct, frozen=True):
    """Widths of one Gemma stack (one key/value head, eight query heads)."""

    width: int
    depth: int
    mlp_dim: int
    head_dim: int


class Vision(msgspec.Struct, frozen=True):
    """Widths of the SigLIP tower (patch size 14)."""

    width: int
    depth: int
    mlp_dim: int
    heads: int


class Size(msgspec.Struct, frozen=True):
    """A reduced π0.5. `resolution` is the side of the square image the policy sees, in pixels.

    With `whole_numbers` each number of the prompt's state is one token; published, each digit is one, which a small
    model learns to read only slowly.
    """

    vlm: Transformer
    expert: Transformer
    vision: Vision
    vocabulary: int
    resolution: int
    whole_numbers: bool = False


SIZES: dict[str, Size | None] = {
    "tiny": Size(
        vlm=Transformer(width=64, depth=3, mlp_dim=128, head_dim=16),
        expert=Transformer(width=32, depth=3, mlp_dim=64, head_dim=16),
        vision=Vision(width=32, depth=2, mlp_dim=64, heads=2),
        vocabulary=512,
        resolution=56,
    ),
    # Small enough to be trained on a few CPU cores until it drives a simulated robot.
    "small": Size(
        vlm=Transformer(width=128, depth=4, mlp_dim=256, head_dim=32),
        expert=Transformer(width=192, depth=4, mlp_dim=768, head_dim=32),
        vision=Vision(width=128, depth=4, mlp_dim=384, heads=4),
        vocabulary=1024,
        resolution=84,
        whole_numbers=True,
    ),
    # Every width a quarter of the published one; depths and token counts as published.
    "mid": Size(
        vlm=Transformer(width=512, depth=18, mlp_dim=4096, head_dim=64),
        expert=Transformer(width=256, depth=18, mlp_dim=1024, head_dim=64),
        vision=Vision(width=288, depth=27, mlp_dim=1076, heads=4),
        vocabulary=4096,
        resolution=224,
    ),
    "full": None,
}


@contextlib.contextmanager
def sized(size: str, seed: int = 0) -> Iterator[None]:
    """Within this context `PI05Policy` and `PI05Policy.from_pretrained` build the model at `size`.

    LeRobot's configuration cannot express other sizes than the published one, so a reduced checkpoint loads in
    LeRobot only inside this context. Weights start random, drawn from `seed`.

    Raises KeyError when `size` is not one of `SIZES`.
    """
    dimensions = SIZES[size]

    def construct(config: PI05Config, rtc_processor: Any = None) -> PI05Pytorch:
        core = build_on_meta(config, dimensions)
        core.rtc_processor = rtc_processor
        return materialise(core, torch.device(config.device or "cpu"), seed)

    with mock.patch.object(upstream, "PI05Pytorch", construct):
        yield


def build_on_meta(config: PI05Config, size: Size | None) -> PI05Pytorch:
    """`PI05Pytorch` of the given size on the meta device (`None`: the published architecture, unpatched)."""
    if size is None:
        with torch.device("meta"):
            return PI05Pytorch(config)
    stacks = iter((size.vlm, size.expert))

    def reduced(_variant: str) -> upstream.GemmaConfig:
        stack = next(stacks)
        return upstream.GemmaConfig(stack.width, stack.depth, stack.mlp_dim, HEADS, 1, stack.head_dim)

    with mock.patch.object(upstream, "get_gemma_config", reduced), torch.device("meta"):
        core = PI05Pytorch(config)
        pair = core.paligemma_with_expert
        vlm = pair.paligemma
        vision = SiglipVisionConfig(  # type: ignore[call-arg]
            hidden_size=size.vision.width,
            intermediate_size=size.vision.mlp_dim,
            num_hidden_layers=size.vision.depth,
            num_attention_heads=size.vision.heads,
            image_size=config.image_resolution[0],
            patch_size=14,
            vision_use_head=False,
        )
        vlm.model.vision_tower = SiglipVisionModel(vision)
        vlm.model.multi_modal_projector.linear = nn.Linear(size.vision.width, size.vlm.width)
        embedding = type(vlm.model.language_model.embed_tokens)
        vlm.model.language_model.embed_tokens = embedding(
            size.vocabulary, size.vlm.width, 0, embed_scale=size.vlm.width**0.5
        )
        vlm.lm_head = nn.Linear(size.vlm.width, size.vocabulary, bias=False)
        pair.gemma_expert.lm_head = nn.Linear(size.expert.width, size.vocabulary, bias=False)
    pair.to_bfloat16_for_selected_params(config.dtype)
    pair._set_requires_grad()
    return core


@torch.no_grad()
def materialise(core: PI05Pytorch, device: torch.device, seed: int) -> PI05Pytorch:
    """Move a meta model to `device` with random weights of variance 1/fan-in, the same for every device.

    Buffers are not in the state dict, so they are computed again: rotary frequencies, embedding scale, position ids.
    """
    core.to_empty(device=device)
    generator = torch.Generator().manual_seed(seed)
    for parameter in core.parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.05
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    pair = core.paligemma_with_expert
    for model in (pair.paligemma.model.language_model, pair.gemma_expert.model):
        frequencies = model.rotary_emb.inv_freq
        model.rotary_emb = GemmaRotaryEmbedding(model.config).to(device, frequencies.dtype)
    embedding = pair.paligemma.model.language_model.embed_tokens
    embedding.embed_scale.fill_(embedding.scalar_embed_scale)
    for module in pair.paligemma.model.vision_tower.modules():
        if isinstance(getattr(module, "position_ids", None), torch.Tensor):
            module.position_ids.copy_(torch.arange(module.position_ids.shape[-1])[None])
    return core
