"""GR00T N1.7 built from LeRobot's own modules at any size, without a download.

LeRobot builds the policy from a base checkpoint (`base_model_path`). Here the same modules are constructed with
random weights instead; reduced sizes differ from the published one in widths and depths alone, so the state-dict
keys stay LeRobot's. The action space (132 dimensions, 40 steps, 32 embodiments) is the published one at every size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lerobot.policies.groot.groot_n1_7 as upstream
import msgspec
import torch
from lerobot.policies.groot.configuration_groot import GROOT_N1_7_BACKBONE_MODEL, GrootConfig
from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config
from lerobot.policies.groot.modeling_groot import GrootPolicy
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from somaspeed.policies.groot.prompt import SPECIAL

TUNE = ("tune_llm", "tune_visual", "tune_projector", "tune_diffusion_model", "tune_vlln", "tune_top_llm_layers")


class Vision(msgspec.Struct, frozen=True):
    """Widths of the Qwen3-VL tower (patch size 16, 2 × 2 patches merged into a token)."""

    width: int
    depth: int
    mlp_dim: int
    heads: int
    deepstack: tuple[int, int, int]  # blocks whose output is added to the first language layers
    positions: int  # learned position embeddings, a square number


class Language(msgspec.Struct, frozen=True):
    """Widths of the language model; `depth` is the layer whose output is the feature."""

    width: int
    depth: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


class Head(msgspec.Struct, frozen=True):
    """Widths of the action head: diffusion transformer, and the self-attention over the features."""

    hidden: int
    depth: int
    heads: int
    head_dim: int
    vl_depth: int
    vl_heads: int


class Size(msgspec.Struct, frozen=True):
    """A reduced GR00T. `resolution` is the side of the square image it sees in pixels, `crop` of the window before."""

    vision: Vision
    language: Language
    head: Head
    resolution: int
    crop: int


SIZES: dict[str, Size | None] = {
    "tiny": Size(
        vision=Vision(width=32, depth=3, mlp_dim=64, heads=2, deepstack=(0, 1, 2), positions=64),
        language=Language(width=64, depth=4, mlp_dim=128, heads=4, kv_heads=2, head_dim=16, vocabulary=512),
        head=Head(hidden=32, depth=8, heads=4, head_dim=12, vl_depth=2, vl_heads=4),
        resolution=128,
        crop=115,
    ),
    # Every width a quarter of the published one, the vocabulary too; depths and token counts as published.
    "mid": Size(
        vision=Vision(width=256, depth=24, mlp_dim=1024, heads=4, deepstack=(5, 11, 17), positions=2304),
        language=Language(width=512, depth=16, mlp_dim=1536, heads=4, kv_heads=2, head_dim=128, vocabulary=37984),
        head=Head(hidden=256, depth=32, heads=8, head_dim=48, vl_depth=4, vl_heads=8),
        resolution=256,
        crop=230,
    ),
    "full": None,
}


def resolution(size: str) -> tuple[int, int]:
    """Sides in pixels of the image that the policy sees and of the centred window cut before the last resize."""
    dimensions = SIZES[size]
    return (dimensions.resolution, dimensions.crop) if dimensions else (256, 230)


def backbone_config(size: Size) -> Qwen3VLConfig:
    """The Qwen3-VL configuration of a reduced backbone; its special tokens are those of the trained tokenizer."""
    language, vision = size.language, size.vision
    spatial = language.head_dim // 2 * 20 // 64  # rotary frequencies of the height and of the width, as published
    ids = {name: SPECIAL.index(token) for name, token in SPECIAL_IDS.items()}
    return Qwen3VLConfig(  # type: ignore[call-arg]
        **ids,  # type: ignore[arg-type]
        tie_word_embeddings=True,
        text_config={
            "model_type": "qwen3_vl_text",
            "attention_bias": False,
            "hidden_size": language.width,
            "intermediate_size": language.mlp_dim,
            "num_hidden_layers": language.depth,
            "num_attention_heads": language.heads,
            "num_key_value_heads": language.kv_heads,
            "head_dim": language.head_dim,
            "vocab_size": language.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [language.head_dim // 2 - 2 * spatial, spatial, spatial],
            },
            "rope_theta": 5_000_000,
            "tie_word_embeddings": True,
        },
        vision_config={
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": list(vision.deepstack),
            "depth": vision.depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": vision.width,
            "in_channels": 3,
            "intermediate_size": vision.mlp_dim,
            "num_heads": vision.heads,
            "num_position_embeddings": vision.positions,
            "out_hidden_size": language.width,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    )


SPECIAL_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def model_config(size: Size | None, **changes: Any) -> GR00TN17Config:
    """LeRobot's configuration of the whole model. `changes` are keys of `GR00TN17Config`."""
    if size is None:
        return GR00TN17Config(**changes)
    head = size.head
    reduced = {
        "model_name": GROOT_N1_7_BACKBONE_MODEL,
        "backbone_embedding_dim": size.language.width,
        "select_layer": size.language.depth,
        "hidden_size": head.hidden,
        "input_embedding_dim": head.heads * head.head_dim,
        "image_target_size": [size.resolution] * 2,
        "image_crop_size": [size.crop] * 2,
        "diffusion_model_cfg": {
            "positional_embeddings": None,
            "num_layers": head.depth,
            "num_attention_heads": head.heads,
            "attention_head_dim": head.head_dim,
            "norm_type": "ada_norm",
            "dropout": 0.2,
            "final_dropout": True,
            "output_dim": head.hidden,
            "interleave_self_attention": True,
        },
        "vl_self_attention_cfg": {
            "positional_embeddings": None,
            "num_layers": head.vl_depth,
            "num_attention_heads": head.vl_heads,
            "attention_head_dim": size.language.width // head.vl_heads,
            "dropout": 0.2,
            "final_dropout": True,
        },
    }
    return GR00TN17Config(**{**reduced, **changes})


def build_core(size: Size | None, device: torch.device, seed: int, **changes: Any) -> GR00TN17:
    """`GR00TN17` in float32 with LeRobot's own initialisation, drawn from `seed`; `device` may be meta.

    `changes` are keys of `GR00TN17Config`. The seed does not touch the caller's random state.
    """
    reduced = backbone_config(size) if size else None

    def from_config(_self: Any, **_: Any) -> Any:
        return Qwen3VLForConditionalGeneration._from_config(reduced)

    with contextlib.ExitStack() as stack:
        if reduced is not None:
            stack.enter_context(mock.patch.object(upstream.Qwen3Backbone, "_from_backbone_config", from_config))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.device(device))
        torch.manual_seed(seed)
        core = GR00TN17(model_config(size, **changes), load_backbone_weights=False)
    return core.float()


@contextlib.contextmanager
def sized(size: str, seed: int = 0, **changes: Any) -> Iterator[None]:
    """Within this context `GrootPolicy` and its `from_pretrained` build the model at `size`, without a download.

    The base checkpoint that the configuration names is not read: weights start random, drawn from `seed`, until a
    checkpoint's are loaded. `changes` are keys of `GR00TN17Config`. Raises KeyError when `size` is not in `SIZES`.
    """
    dimensions = SIZES[size]

    def create(policy: GrootPolicy) -> GR00TN17:
        config: GrootConfig = policy.config
        tuned = {key: getattr(config, key) for key in TUNE}
        return build_core(dimensions, torch.device(config.device or "cpu"), seed, **{**tuned, **changes})

    with mock.patch.object(GrootPolicy, "_create_groot_model", create):
        yield
