"""The training forward of MolmoAct2 with the frozen vision-language model taken out of autograd.

LeRobot runs language-model layer and expert block side by side, in one graph, for a left-padded sequence. The model
never reads the expert, so `connector_features` and `prefix_kv` compute what the expert needs of it once, without
autograd and pads; of the last layer only keys and values. `expert_velocity` then runs all flow times of a sample
against one projection of those keys and values: the flow times are queries, so nothing is copied per flow time.

Shapes: B samples, C cameras, P patches and T tokens per image, L prompt tokens, N flow times, S action steps,
W widths (of the model in the prefix, of the expert in the expert), H heads, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import MolmoAct2Model
from torch import Tensor

LayerKV = tuple[Tensor, Tensor]


class Layout(NamedTuple):
    """What is the same in every prompt: see `prompts.Prompts` and `images.pooling_index`. On the model's device."""

    image_rows: Tensor  # int64 [C · T]
    bidirectional: Tensor  # bool [·]
    pooling: Tensor  # int64 [T, 4]


@torch.no_grad()
def connector_features(core: MolmoAct2Model, patches: Tensor, pooling: Tensor) -> Tensor:
    """Image features in the language model's width, [B, C · T, W], of uint8 `patches` [B, C, P, pixels].

    All cameras go through the tower in one call, and only up to the last layer whose output is read.
    """
    vision: Any = core.vision_backbone
    tower = vision.image_vit
    pixels = patches.flatten(0, 1).float() / 255.0 * 2.0 - 1.0
    x = tower.patch_embedding(pixels.to(tower.patch_embedding.weight.dtype))
    x = tower.add_pos_emb(x, tower.config.image_num_patch)
    read = {}
    for index, block in enumerate(tower.transformer.resblocks):
        x = block(x)
        if index in vision.vit_layers:
            read[index] = x
    features = torch.cat([read[index] for index in vision.vit_layers], dim=-1)
    valid = pooling >= 0
    images, tokens = len(features), len(pooling)
    windows = features[:, pooling.clamp_min(0)] * valid[..., None].to(features.dtype)
    windows = windows.flatten(0, 1)
    if vision.adapter_config.pooling_attention_mask:
        seen = valid.repeat(images, 1)
        query = windows.sum(dim=1, keepdim=True) / seen.sum(dim=1)[:, None, None].to(windows.dtype)
        pooled = vision.image_pooling_2d(query, windows, attn_mask=seen[:, None, None])
    else:
        pooled = vision.image_pooling_2d(windows.mean(dim=1, keepdim=True), windows)
    projected = vision.image_projector(pooled.view(images, tokens, -1))
    return projected.view(*patches.shape[:1], -1, projected.shape[-1])


def embed(core: MolmoAct2Model, tokens: Tensor) -> Tensor:
    """Embeddings [B, L, W] of `tokens` int64 [B, L] from two tables, which are not copied into one."""
    table = core.transformer.wte
    split = table.embedding.shape[0]
    base = F.embedding(tokens.clamp_max(split - 1), table.embedding)
    added = F.embedding((tokens - split).clamp_min(0), table.new_embedding)
    return torch.where((tokens >= split)[..., None], added, base)


class UnitNorm(torch.autograd.Function):
    """Root-mean-square norm over the last axis that keeps its output for backward, not its input.

    What reads the output keeps it as well, so a norm costs no memory of its own: for y = r · x with
    r = (mean x² + eps)^(-1/2), the gradient of x is r · (g - y · mean(g · y)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], None, eps)
        y = y.to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        wide = gradient.float()
        along = (wide * y).mean(dim=-1, keepdim=True)
        return ((wide - y * along) * scale).to(gradient.dtype), None


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32, in the dtype of `x`."""
    normed = UnitNorm.apply(x, eps)
    return normed if weight is None else normed * weight.to(x.dtype)


def rotary_tables(core: MolmoAct2Model, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines [·, 1, L, D] of integer `positions` [·, L] (half-split convention)."""
    config = core.transformer.config
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angles = positions.float()[:, None, :, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary `tables` to `x` [B, H, L, D]."""
    half = x.shape[-1] // 2
    return x * tables[0] + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * tables[1]


def prefix_mask(bidirectional: Tensor, length: int) -> Tensor:
    """Which of `length` positions each may see, bool [length, length]: the ones before it, and images one another."""
    image = F.pad(bidirectional, (0, length - len(bidirectional)))
    causal = torch.ones(length, length, dtype=torch.bool, device=image.device).tril_()
    return causal | (image[:, None] & image)


@torch.no_grad()
def prefix_kv(
    core: MolmoAct2Model, layout: Layout, features: Tensor, tokens: Tensor, offset: Tensor | None = None
) -> list[LayerKV]:
    """Keys (rotary applied) and values of every layer, each [B, L, kv heads · D].

    `features` are those of `connector_features`, `tokens` int64 [B, L] are padded on the right: causality keeps the
    pads out of every valid row, so they need no mask here. `offset` int64 [B] shifts a sample's positions, as
    LeRobot's left pads do.
    """
    language = core.transformer
    x = embed(core, tokens)
    x = x.index_add(1, layout.image_rows, features.to(x.dtype))
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)[None]
    tables = rotary_tables(core, positions if offset is None else positions + offset[:, None], x.dtype)
    first = language.blocks[0].self_attn
    group = first.num_heads // first.num_key_value_heads
    mask = prefix_mask(layout.bidirectional, length).repeat(group, 1)[None, None]
    collected: list[LayerKV] = []
    for index, block in enumerate(language.blocks):
        attention = block.self_attn
        hidden = rms_norm(x, block.attn_norm.eps, block.attn_norm.weight)
        heads, width = attention.num_key_value_heads, attention.head_dim
        last = index + 1 == len(language.blocks)
        queries = 0 if last else attention.num_heads
        rows = slice((attention.num_heads - queries) * width, None)
        bias = attention.att_proj.bias
        projected = F.linear(hidden, attention.att_proj.weight[rows], None if bias is None else bias[rows])
        split = projected.unflatten(-1, (-1, width)).transpose(1, 2).split((queries, heads, heads), dim=1)
        query, key, value = split
        key = rotate(rms_norm(key, attention.k_norm.eps, attention.k_norm.weight), tables)
        # Contiguous copies, so that the projection's output is not kept alive.
        collected.append((key.transpose(1, 2).flatten(2), value.transpose(1, 2).flatten(2).contiguous()))
        if last:
            break
        query = rotate(rms_norm(query, attention.q_norm.eps, attention.q_norm.weight), tables)
        seen = attend_grouped(query, key, value, mask)
        x = x + attention.attn_out(seen)
        x = x + block.mlp(rms_norm(x, block.ff_norm.eps, block.ff_norm.weight))
    return collected


def attend_grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention, [B, L, H · D]: the queries of a group are rows, so keys are read once, not repeated.

    `query` [B, H, L, D], `key` and `value` [B, kv heads, L, D], `mask` bool [1, 1, H / kv heads · L, L].
    """
    batch, heads, length, width = query.shape
    rows = query.reshape(batch, key.shape[1], -1, width)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return out.view(batch, heads, length, width).transpose(1, 2).flatten(2)


class Context(NamedTuple):
    """What the expert reads beside its own input; a sample's flow times share it."""

    kv: list[LayerKV]
    seen: Tensor  # bool [B, L]: prompt tokens that the expert attends to
    valid: Tensor  # bool [B, S]: action steps within the episode


def expert_velocity(core: MolmoAct2Model, context: Context, noisy: Tensor, time: Tensor) -> Tensor:
    """The expert's velocity [B, N, S, A] at noisy actions `noisy` [B, N, S, A] and flow times `time` [B, N].

    Steps past the episode's end are zero and seen by no other, as in LeRobot's forward.
    """
    expert: Any = core.action_expert
    batch, times, steps, _ = noisy.shape
    condition = expert._time_conditioning(time.flatten())
    condition = F.silu(condition).view(batch, times, 1, -1)
    x = expert.action_embed(noisy.to(expert.action_embed.weight.dtype))
    valid = context.valid[:, None, :, None].to(x.dtype)
    x = x * valid
    inside = context.valid.repeat_interleave(times, dim=0, output_size=batch * times)[:, None, None]
    seen = context.seen[:, None, None]
    tables = expert.blocks[0].self_attn.rope.build_cache(seq_len=steps, device=x.device, dtype=x.dtype)
    for block, kv in zip(expert.blocks, context.kv, strict=True):
        modulation = block.modulation.linear(condition).unflatten(-1, (3, 3, -1))
        for_self, for_cross, for_mlp = (part.unbind(-2) for part in modulation.unbind(-3))
        shift, scale, gate = for_self
        x = x + gate * self_attention(block.self_attn, modulate(x, block.self_norm.eps, shift, scale), inside, tables)
        shift, scale, gate = for_cross
        hidden = modulate(x, block.cross_norm.eps, shift, scale)
        x = x + gate * cross_attention(expert, block.cross_attn, hidden, kv, seen)
        shift, scale, gate = for_mlp
        x = x + gate * block.mlp(modulate(x, block.ff_norm.eps, shift, scale))
        x = x * valid
    final = expert.final_layer
    shift, scale = final.modulation.linear(condition).chunk(2, dim=-1)
    return final.linear(modulate(x, final.norm.eps, shift, scale)) * valid


def modulate(x: Tensor, eps: float, shift: Tensor, scale: Tensor) -> Tensor:
    return rms_norm(x, eps) * (1 + scale) + shift


def self_attention(attention: Any, x: Tensor, inside: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of one flow time's action steps to one another: `x` [B, N, S, W], `inside` bool [B · N, 1, 1, S]."""
    qkv = attention.qkv(x).flatten(0, 1).unflatten(-1, (3, attention.num_heads, attention.head_dim))
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    query, key = attention.rope(
        rms_norm(query, attention.q_norm.eps), rms_norm(key, attention.k_norm.eps), rope_cache=tables
    )
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=inside)
    return attention.out_proj(out.transpose(1, 2).reshape(x.shape))


def cross_attention(expert: Any, attention: Any, x: Tensor, kv: LayerKV, seen: Tensor) -> Tensor:
    """Attention of all flow times' action steps `x` [B, N, S, W] to one projection of the prefix's `kv`."""
    shape = (attention.num_heads, attention.head_dim)
    key, value = (
        rms_norm(projection(states), expert.context_norm.eps).unflatten(-1, shape).transpose(1, 2)
        for projection, states in zip((expert.context_k_proj, expert.context_v_proj), kv, strict=True)
    )
    query = attention.q_proj(x).flatten(1, 2).unflatten(-1, shape).transpose(1, 2)
    query, key = rms_norm(query, attention.q_norm.eps), rms_norm(key, attention.k_norm.eps)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    return attention.out_proj(out.transpose(1, 2).reshape(x.shape))


def flow_loss(velocity: Tensor, actions: Tensor, noise: Tensor, valid: Tensor, mask_padded: bool) -> Tensor:
    """Flow-matching loss: mean squared error to `actions - noise` over the valid action steps.

    `velocity` and `noise` [B, N, S, A], `actions` [B, S, A], `valid` bool [B, S]. LeRobot counts the steps past the
    episode's end in the denominator; `mask_padded` leaves them out of it.
    """
    weight = valid[:, None, :, None].to(velocity.dtype)
    error = (actions[:, None] - noise - velocity).square() * weight
    if not mask_padded:
        return error.mean()
    return error.sum() / (weight.sum() * velocity.shape[1] * velocity.shape[3])
