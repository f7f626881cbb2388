"""MolmoAct2 at any size: LeRobot's own Hugging Face configuration with other widths, and modules without a download.

Every width can be configured here, so nothing of LeRobot is patched to build a reduced model, and LeRobot loads a
reduced checkpoint like a published one.
"""

from __future__ import annotations

import msgspec
import torch
from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import MolmoAct2Config as ModelConfig
from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import MolmoAct2ForConditionalGeneration

from somaspeed.policies.weights import randomise

PATCH = 14  # side of a vision patch, in pixels
ADDITIONAL = 128  # rows of the second embedding table, which holds the image tokens
MAX_ACTION_DIM = 32  # fixed by the released checkpoints

# The model configuration's name for each special token.
TOKEN_IDS = {
    "image_start_token_id": "<im_start>",
    "image_end_token_id": "<im_end>",
    "image_patch_id": "<im_patch>",
    "image_col_id": "<im_col>",
    "low_res_image_start_token_id": "<low_res_im_start>",
    "image_low_res_id": "<im_low>",
    "frame_start_token_id": "<frame_start>",
    "frame_end_token_id": "<frame_end>",
    "action_output_token_id": "<action_output>",
    "action_start_token_id": "<action_start>",
    "action_end_token_id": "<action_end>",
    "action_token_start_id": "<action_0>",
    "state_start_token_id": "<state_start>",
    "state_end_token_id": "<state_end>",
    "state_token_start_id": "<state_0>",
    "eos_token_id": "<|im_end|>",
}


class Text(msgspec.Struct, frozen=True):
    """Widths of the language model."""

    width: int
    depth: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int


class Vision(msgspec.Struct, frozen=True):
    """Widths of the vision tower and of the connector, whose attention is as wide; `resolution` in pixels."""

    width: int
    depth: int
    mlp_dim: int
    heads: int
    head_dim: int
    connector_mlp_dim: int
    resolution: int


class Expert(msgspec.Struct, frozen=True):
    """Widths of the action expert, which has one block per layer of the language model."""

    width: int
    heads: int
    time_dim: int
    mlp_multiple: int


class Size(msgspec.Struct, frozen=True):
    """A MolmoAct2. `vocabulary` counts the rows of the first embedding table."""

    text: Text
    vision: Vision
    expert: Expert
    vocabulary: int
    positions: int


SIZES = {
    "tiny": Size(
        text=Text(width=64, depth=4, mlp_dim=128, heads=4, kv_heads=2, head_dim=16),
        vision=Vision(48, depth=10, mlp_dim=96, heads=4, head_dim=12, connector_mlp_dim=96, resolution=84),
        expert=Expert(width=48, heads=4, time_dim=32, mlp_multiple=16),
        vocabulary=1280,
        positions=1024,
    ),
    # Widths and depths about a quarter of the published ones, token counts as published.
    "mid": Size(
        text=Text(width=640, depth=9, mlp_dim=2432, heads=8, kv_heads=2, head_dim=128),
        vision=Vision(288, depth=10, mlp_dim=1076, heads=4, head_dim=72, connector_mlp_dim=2432, resolution=378),
        expert=Expert(width=192, heads=2, time_dim=64, mlp_multiple=64),
        vocabulary=4096,
        positions=1024,
    ),
    "full": Size(
        text=Text(width=2560, depth=36, mlp_dim=9728, heads=32, kv_heads=8, head_dim=128),
        vision=Vision(1152, depth=27, mlp_dim=4304, heads=16, head_dim=72, connector_mlp_dim=9728, resolution=378),
        expert=Expert(width=768, heads=8, time_dim=256, mlp_multiple=256),
        vocabulary=154_624,
        positions=16_384,
    ),
}


def model_config(size: Size, token_ids: dict[str, int]) -> ModelConfig:
    """LeRobot's model configuration of `size`; `token_ids` are those that it names, see `TOKEN_IDS`."""
    text, vision, expert = size.text, size.vision, size.expert
    attention = {"num_attention_heads": vision.heads, "num_key_value_heads": vision.heads, "head_dim": vision.head_dim}
    return ModelConfig(
        text_config={
            "hidden_size": text.width,
            "num_hidden_layers": text.depth,
            "intermediate_size": text.mlp_dim,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "vocab_size": size.vocabulary,
            "additional_vocab_size": ADDITIONAL,
            "max_position_embeddings": size.positions,
            "rope_theta": 5e6,
            "qkv_bias": False,
            "use_qk_norm": True,
            "qk_norm_type": "qwen3",
            "attn_implementation": "sdpa",
        },
        vit_config={
            "hidden_size": vision.width,
            "num_hidden_layers": vision.depth,
            "intermediate_size": vision.mlp_dim,
            "image_num_pos": (vision.resolution // PATCH) ** 2,
            "image_default_input_size": (vision.resolution, vision.resolution),
            "image_patch_size": PATCH,
            "attn_implementation": "sdpa",
            **attention,
        },
        adapter_config={
            "hidden_size": vision.width,
            "intermediate_size": vision.connector_mlp_dim,
            "text_hidden_size": text.width,
            "vit_layers": (-3, -9),
            "pooling_attention_mask": True,
            "attn_implementation": "sdpa",
            **attention,
        },
        action_expert_config={
            "hidden_size": expert.width,
            "num_layers": text.depth,
            "num_heads": expert.heads,
            "mlp_ratio": 4.0,
            "ffn_multiple_of": expert.mlp_multiple,
            "timestep_embed_dim": expert.time_dim,
        },
        max_action_dim=MAX_ACTION_DIM,
        max_action_horizon=30,
        n_obs_steps=1,
        action_mode="both",
        num_state_tokens=256,
        **token_ids,
    )


def build_on_meta(config: ModelConfig) -> MolmoAct2ForConditionalGeneration:
    """LeRobot's model of `config` on the meta device."""
    with torch.device("meta"):
        return MolmoAct2ForConditionalGeneration(config)


def materialise(
    model: MolmoAct2ForConditionalGeneration, device: torch.device, dtype: torch.dtype, seed: int
) -> MolmoAct2ForConditionalGeneration:
    """Move a meta model to `device` in `dtype` with random weights from `seed`; see `randomise`."""
    model.to(dtype).to_empty(device=device)
    randomise(model, seed)
    rotary = model.model.transformer.rotary_emb
    rotary.inv_freq, _ = rotary.rope_init_fn(rotary.config, device)
    return model
