"""The frozen backbone of GR00T: Qwen3-VL up to the selected layer, without pads, logits or per-image loops.

All samples share one layout, so positions, rotary tables and the interpolated position embedding of the grid are
constants, and so are keys and values of the tokens before the first image: attention is causal. Pads stand behind
the text, where no valid token sees them.

Shapes: B samples, C cameras, P patches per camera, F fixed tokens, L text tokens, S = F + L, W language width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lerobot.policies.groot.groot_n1_7 import GR00TN17
from torch import Tensor

from somaspeed.policies.groot.images import normalize, patch_weight, patchify
from somaspeed.policies.groot.prompt import PATCH, Layout

Tables = tuple[Tensor, Tensor]


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotary embedding of `x` [..., T, D] by cosines and sines [T, D], half-split."""
    cos, sin = tables
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((-second, first), -1), sin)


class Opening(NamedTuple):
    """The tokens before the first image, the same for every sample: features [1, T, W], keys and values by layer."""

    features: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


class Backbone:
    """The frozen features of a batch. Build it anew when the weights, their dtype or the precision change.

    `longest` is the largest number of text tokens it will see.
    """

    @torch.no_grad()
    def __init__(self, core: GR00TN17, layout: Layout, resolution: int, longest: int) -> None:
        self.layout = layout
        self.visual: Any = core.backbone.visual
        self.language: Any = core.backbone.language_model
        self.device, self.dtype = core.device, self.language.embed_tokens.weight.dtype
        self.opening_length = layout.images[0]

        vision = self.visual
        side = resolution // PATCH
        grid = torch.tensor([[1, side, side]])
        self.patch_weight = patch_weight(vision.patch_embed.proj.weight)
        self.patch_positions = vision.fast_pos_embed_interpolate(grid)
        angles = vision.rot_pos_emb(grid).reshape(side * side, -1)
        angles = torch.cat((angles, angles), -1)
        self.rotation_dtype = torch.promote_types(self.dtype, torch.float32)  # as transformers: never narrower
        self.patch_tables = (angles.cos().to(self.rotation_dtype), angles.sin().to(self.rotation_dtype))

        text = layout.text_position + torch.arange(longest)
        positions = torch.cat([layout.positions, text.expand(3, -1)], dim=1).to(self.device)
        cos, sin = self.language.rotary_emb(self.language.embed_tokens.weight, positions[:, None])
        self.tables: Tables = (cos[0], sin[0])
        size, start = positions.shape[1], self.opening_length
        everything = torch.ones(size, size, dtype=torch.bool, device=self.device).tril()
        self.visible = everything[start:]
        self.fixed = self.language.embed_tokens(layout.fixed.to(self.device))
        self.opening = self.open(everything[:start, :start])

    def open(self, visible: Tensor) -> Opening:
        """Run the tokens before the first image once."""
        x = self.fixed[None, : self.opening_length]
        tables = self.slice_tables(0, self.opening_length)
        keys_values = []
        for layer in self.language.layers:
            x, key_value = self.layer(layer, x, tables, visible, None)
            keys_values.append(key_value)
        return Opening(x, keys_values)

    def slice_tables(self, start: int, stop: int) -> Tables:
        return self.tables[0][start:stop], self.tables[1][start:stop]

    @torch.no_grad()
    def features(self, images: Tensor, text: Tensor) -> Tensor:
        """What the action head reads: `images` uint8 [B, C, R, R, 3], `text` int64 [B, L] → [B, S, W].

        Rows of pads are finite and mean nothing.
        """
        batch = len(images)
        tokens, deepstack = self.see(images)
        start, size = self.opening_length, len(self.fixed) + text.shape[1]
        pieces = []
        for camera, first in enumerate(self.layout.images):
            after = first + self.layout.tokens
            until = self.layout.images[camera + 1] if camera + 1 < len(self.layout.images) else len(self.fixed)
            pieces += [tokens[:, camera].to(self.fixed.dtype), self.fixed[after:until].expand(batch, -1, -1)]
        x = torch.cat([*pieces, self.language.embed_tokens(text)], dim=1)
        tables, visible = self.slice_tables(start, size), self.visible[: size - start, :size]
        layers = self.language.layers
        for index, layer in enumerate(layers):
            x, _ = self.layer(layer, x, tables, visible, self.opening.keys_values[index])
            # LeRobot's hook takes the last layer's output before anything is added to it.
            if index < len(deepstack) and index + 1 < len(layers):
                for camera, first in enumerate(self.layout.images):
                    at = first - start
                    x[:, at : at + self.layout.tokens] += deepstack[index][:, camera]
        return torch.cat([self.opening.features.expand(batch, -1, -1), x], dim=1)

    def layer(
        self, layer: Any, x: Tensor, tables: Tables, visible: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One language layer on `x` [B, T, W], whose tokens also see the keys and values `before` them.

        Returns its output and its own keys and values [B, heads, T, D].
        """
        attention, hidden = layer.self_attn, layer.input_layernorm(x)
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(hidden).view(shape)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(hidden).view(shape)).transpose(1, 2)
        query, key = rotate(query, tables), rotate(key, tables)
        value = attention.v_proj(hidden).view(shape).transpose(1, 2)
        own = (key, value)
        if before is not None:
            key, value = (
                torch.cat([past.expand(len(x), -1, -1, -1), new], dim=2) for past, new in zip(before, own, strict=True)
            )
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=attention.scaling, enable_gqa=True
        )
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        return x + layer.mlp(layer.post_attention_layernorm(x)), own

    def see(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Image tokens [B, C, tokens, W] of `images` uint8 [B, C, R, R, 3], and those of every deepstack level."""
        vision, lead = self.visual, images.shape[:2]
        patches = normalize(patchify(images.flatten(0, 1))).to(self.dtype)
        x = F.linear(patches, self.patch_weight, vision.patch_embed.proj.bias) + self.patch_positions
        levels = list(vision.deepstack_visual_indexes)
        deepstack: list[Tensor] = []
        for index, block in enumerate(vision.blocks):
            x = x + block.attn.proj(self.attend(block.attn, block.norm1(x)))
            x = x + block.mlp(block.norm2(x))
            if index in levels:
                deepstack.append(self.merge(vision.deepstack_merger_list[levels.index(index)], x, lead))
        return self.merge(vision.merger, x, lead), deepstack

    def attend(self, attention: Any, hidden: Tensor) -> Tensor:
        """Self-attention among the patches of each image, [N, P, width]."""
        qkv = attention.qkv(hidden).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[:2].to(self.rotation_dtype), self.patch_tables).to(qkv.dtype).unbind(0)
        return F.scaled_dot_product_attention(query, key, qkv[2]).transpose(1, 2).flatten(2)

    @staticmethod
    def merge(merger: Any, x: Tensor, lead: torch.Size) -> Tensor:
        return merger(x.flatten(0, 1)).view(*lead, -1, merger.linear_fc2.out_features)

    @torch.no_grad()
    def pad_feature(self, pad: int) -> Tensor:
        """The feature [W] that LeRobot gives every pad: it sees no token, so attention adds nothing to it."""
        x = self.language.embed_tokens(torch.full((1, 1), pad, device=self.device))
        for layer in self.language.layers:
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x[0, 0]
