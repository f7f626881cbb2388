"""The training forward of π0.5 with the frozen prefix taken out of autograd.

LeRobot runs one joint, padded sequence [images | prompt | actions] through both Gemma stacks. The prefix never
attends to the actions, so its keys and values are constants of the sample: `prefix_kv` computes them once, without
autograd, for real cameras and a short prompt bucket, and `expert_velocity` runs the 50 action tokens against them.

Shapes: B samples, P prefix tokens, S action tokens, H query heads, D head width. There is one key/value head, so
the query heads are folded into rows and keys and values are never repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaMLP


def rotary_tables(inverse_frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines, float32 [B, T, D], of integer `positions` [B, T] (half-split convention)."""
    angles = positions.to(torch.float32)[..., None] * inverse_frequencies.to(torch.float32)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary `tables` [B, T, D] to `x` [B, T, D] or [B, T, H, D]."""
    cos, sin = (table.to(x.dtype) for table in tables)
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Multi-query attention: `query` [B, T, H, D], `key` and `value` [B, N, D], additive `bias` [B, 1, 1, N].

    Returns [B, T, H·D]. The heads are rows of one product, so the single key/value head is read once.
    """
    batch, tokens, heads, width = query.shape
    rows = query.reshape(batch, 1, tokens * heads, width)
    out = F.scaled_dot_product_attention(rows, key[:, None], value[:, None], attn_mask=bias, scale=scale)
    return out.reshape(batch, tokens, heads * width)


def key_bias(lengths: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, 1, size]: zero for the first `lengths[b]` keys, minus infinity for the pads after."""
    pad = torch.arange(size, device=lengths.device)[None] >= lengths[:, None]
    return torch.zeros(pad.shape, dtype=dtype, device=lengths.device).masked_fill_(pad, float("-inf"))[:, None, None]


def embed_prefix(core: PI05Pytorch, images: Tensor, tokens: Tensor) -> Tensor:
    """Embed real cameras and prompt: `images` [B, C, 3, R, R] in [-1, 1], `tokens` int64 [B, L] → [B, P, W].

    All cameras go through SigLIP in one call; P = C · patches + L.
    """
    vlm = core.paligemma_with_expert.paligemma.model
    batch = images.shape[0]
    features = vlm.multi_modal_projector(vlm.vision_tower(images.flatten(0, 1)).last_hidden_state)
    features = features.reshape(batch, -1, features.shape[-1])
    return torch.cat([features, vlm.language_model.embed_tokens(tokens).to(features.dtype)], dim=1)


@torch.no_grad()
def prefix_kv(core: PI05Pytorch, images: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """`live_prefix_kv` without autograd."""
    return live_prefix_kv(core, images, tokens, lengths)


def live_prefix_kv(core: PI05Pytorch, images: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Keys (rotary applied) and values of every prefix layer, [B, layers, 2, P, D], with gradients where enabled.

    `lengths` int64 [B] counts the valid prefix tokens; the pads behind them are masked as keys, and their own rows
    are never read. Of the last layer only keys and values are needed, so nothing after them is computed.
    """
    language = core.paligemma_with_expert.paligemma.model.language_model
    compute = language.embed_tokens.weight.dtype  # of the residual stream, as LeRobot's configuration sets it
    x = embed_prefix(core, images, tokens).to(compute)
    batch, size, _ = x.shape
    positions = torch.arange(size, device=x.device).expand(batch, size)
    tables = rotary_tables(language.rotary_emb.inv_freq, positions[:1])
    bias = key_bias(lengths, size, compute)
    collected = []
    for index, layer in enumerate(language.layers):
        attention = layer.self_attn
        hidden = layer.input_layernorm(x)[0].to(compute)
        key, value = rotate(attention.k_proj(hidden), tables), attention.v_proj(hidden)
        collected.append(torch.stack([key, value], dim=1))
        if index + 1 == len(language.layers):
            break
        query = rotate(attention.q_proj(hidden).unflatten(-1, (-1, attention.head_dim)), tables)
        x = x + attention.o_proj(attend(query, key, value, attention.scaling, bias))
        x = x + feed_forward(layer.mlp, layer.post_attention_layernorm(x)[0].to(compute))
    return torch.stack(collected, dim=1)


def feed_forward(mlp: GemmaMLP, hidden: Tensor) -> Tensor:
    """Gemma's MLP, [B, P, W] → [B, P, W], overwriting its widest activations: without autograd nobody reads them."""
    if torch.is_grad_enabled():
        return mlp(hidden)
    gate = mlp.gate_proj(hidden)
    torch.ops.aten.gelu_(gate, approximate="tanh")
    return mlp.down_proj(gate.mul_(mlp.up_proj(hidden)))


def time_condition(core: PI05Pytorch, time: Tensor) -> Tensor:
    """The expert's conditioning vector [B, W] of flow times `time` float32 [B]."""
    config = core.config
    embedded = create_sinusoidal_pos_embedding(
        time, core.action_in_proj.out_features, config.min_period, config.max_period, device=time.device
    ).to(time.dtype)
    return F.silu(core.time_mlp_out(F.silu(core.time_mlp_in(embedded))))


def expert_velocity(core: PI05Pytorch, kv: Tensor, lengths: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
    """The expert's velocity, float32 [B, S, A], at noisy actions `noisy` [B, S, A] and flow times `time` [B].

    `kv` is what `prefix_kv` returned; action tokens see the valid prefix and one another.
    """
    expert = core.paligemma_with_expert.gemma_expert.model
    compute = expert.layers[0].self_attn.q_proj.weight.dtype
    condition = time_condition(core, time)
    x = core.action_in_proj(noisy).to(compute)
    batch, steps, _ = x.shape
    positions = lengths[:, None] + torch.arange(steps, device=x.device)
    tables = rotary_tables(expert.rotary_emb.inv_freq, positions)
    bias = F.pad(key_bias(lengths, kv.shape[3], compute), (0, steps))
    for layer, layer_kv in zip(expert.layers, kv.unbind(1), strict=True):
        prefix_key, prefix_value = layer_kv.unbind(1)
        attention = layer.self_attn
        hidden, gate = normed(layer.input_layernorm, x, condition, compute)
        query = rotate(attention.q_proj(hidden).unflatten(-1, (-1, attention.head_dim)), tables)
        key = torch.cat([prefix_key, rotate(attention.k_proj(hidden), tables)], dim=1)
        value = torch.cat([prefix_value, attention.v_proj(hidden)], dim=1)
        x = x + attention.o_proj(attend(query, key, value, attention.scaling, bias)) * gate
        hidden, gate = normed(layer.post_attention_layernorm, x, condition, compute)
        x = x + layer.mlp(hidden) * gate
    x, _ = expert.norm(x, condition)
    return core.action_out_proj(x.float())


def normed(norm: nn.Module, x: Tensor, condition: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Adaptive RMS norm of `x`: the normed rows in `dtype` and the residual gate."""
    hidden, gate = norm(x, cond=condition)
    return hidden.to(dtype), gate


def flow_loss(velocity: Tensor, actions: Tensor, noise: Tensor, dimensions: int, is_pad: Tensor | None) -> Tensor:
    """Flow-matching loss: mean squared error to `noise - actions` over the first `dimensions` action dimensions.

    The target is that of LeRobot's `PI05Pytorch.forward`. `is_pad` bool [B, S] leaves steps past the episode's end
    out of sum and denominator; `None` keeps them in, as native does.
    """
    error = (noise - actions - velocity)[..., :dimensions].square()
    if is_pad is None:
        return error.mean()
    valid = (~is_pad)[..., None].to(error.dtype)
    return (error * valid).sum() / (valid.sum() * dimensions)
