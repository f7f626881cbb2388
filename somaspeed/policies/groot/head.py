"""The trainable action head of GR00T: LeRobot's modules, with only the rows, keys and weights that the loss needs.

- Keys and values of a cross-attention are computed for the tokens that it attends to, not for all of them.
- The weights of the one embodiment are indexed once, as parameters of their own (`rows.py`), not per sample.
- The last block computes the rows that the loss reads. Dropout there draws for all rows and keeps those, so the
  same random state gives the same masks as in LeRobot's forward, call by call.

Shapes: B samples, S feature tokens, W their width, H action steps in the model, D inner width of the transformer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lerobot.policies.groot.groot_n1_7 import GR00TN17ActionHead
from torch import Tensor, nn

from somaspeed.policies.groot.rows import LiveRows


class Features(NamedTuple):
    """What the head reads of the frozen backbone.

    features: [B, S, W], pads behind the valid tokens.
    lengths: int64 [B], valid tokens.
    as_padded: the self-attention over the features sees the tokens as LeRobot pads them: on the left, unmasked.
    """

    features: Tensor
    lengths: Tensor
    as_padded: bool


class Places(NamedTuple):
    """Which features are images and which are text, int64 [..]; they are the same for every sample."""

    image: Tensor
    text: Tensor


def attend(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Heads of `query` [B, T, D] over `key` and `value` [B, N, D], and the output projection (no dropout)."""
    heads = attention.heads
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attention.to_out[0](out.transpose(1, 2).flatten(2))


def drop(dropout: nn.Dropout | None, x: Tensor, kept: slice | None, rows: int) -> Tensor:
    """`dropout` of `x` [B, T, D], where `x` is the rows `kept` of `rows` rows (None: all of them).

    Draws for all rows, so that the random state moves as if all had been computed.
    """
    if dropout is None:
        return x
    if kept is None or not dropout.training or dropout.p == 0:
        return dropout(x)
    return x * dropout(x.new_ones(len(x), rows, x.shape[-1]))[:, kept]


def finish(block: Any, attended: Tensor, residual: Tensor, kept: slice | None = None, rows: int = 0) -> Tensor:
    """The rest of a transformer block after its attention: dropout, residual and feed-forward."""
    attended = drop(block.attn1.to_out[1], attended, kept, rows)
    x = drop(block.final_dropout, attended, kept, rows) + residual
    hidden = block.norm3(x)
    for module in block.ff.net:
        hidden = drop(module, hidden, kept, rows) if isinstance(module, nn.Dropout) else module(hidden)
    return hidden + x


def vision_language(head: GR00TN17ActionHead, features: Features, valid: Tensor) -> Tensor:
    """The self-attention over the features, [B, S, W]; without `as_padded`, keys that are not `valid` are masked."""
    x, lengths, as_padded = features
    x = head.vlln(rolled(x, lengths) if as_padded else x)
    if isinstance(head.vl_self_attention, nn.Identity):
        return rolled(x, -lengths) if as_padded else x
    mask = None if as_padded else valid[:, None, None]
    for block in head.vl_self_attention.transformer_blocks:
        hidden, attention = block.norm1(x), block.attn1
        query, key, value = (project(hidden) for project in (attention.to_q, attention.to_k, attention.to_v))
        x = finish(block, attend(attention, query, key, value, mask), x)
    return rolled(x, -lengths) if as_padded else x


def rolled(x: Tensor, shift: Tensor) -> Tensor:
    """`x` [B, S, W] with the tokens of sample b moved `shift[b]` to the left, those that leave coming back."""
    index = (torch.arange(x.shape[1], device=x.device) + shift[:, None]) % x.shape[1]
    return x.gather(1, index[..., None].expand_as(x))


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x` [B, T, D] · (1 + scale) + shift, with scale and shift [B, D]."""
    return torch.addcmul(shift[:, None], x, 1 + scale[:, None])


def encode_actions(head: GR00TN17ActionHead, rows: LiveRows, noisy: Tensor, bucket: Tensor) -> Tensor:
    """Action tokens [B, H, D] of `noisy` [B, H, A] at the time `bucket` int64 [B].

    The time embedding is the same for all steps, so its half of the second layer runs once per sample.
    """
    encoder = head.action_encoder
    x = rows.linear(encoder.W1, noisy)
    width = x.shape[-1]
    weight, bias = rows.weights(encoder.W2)
    time = encoder.pos_encoding(bucket[:, None]).to(x.dtype)
    x = F.silu(x @ weight[:width] + (time @ weight[width:] + bias))
    x = rows.linear(encoder.W3, x)
    return x + rows.positions(x.shape[1]) if head.config.add_pos_embed else x


def velocity(
    head: GR00TN17ActionHead,
    rows: LiveRows,
    places: Places,
    features: Features,
    state: Tensor,
    noisy: Tensor,
    bucket: Tensor,
    steps: int,
    dimensions: int,
) -> Tensor:
    """The predicted velocity [B, steps, dimensions] of the first `steps` steps and `dimensions` action dimensions.

    `state` [B, 1, state dimensions], `noisy` [B, H, A], `bucket` int64 [B] the discretised flow time.
    """
    size = features.features.shape[1]
    valid = torch.arange(size, device=noisy.device) < features.lengths[:, None]
    seen = vision_language(head, features, valid)
    encoded = rows.linear(head.state_encoder.layer2, F.relu(rows.linear(head.state_encoder.layer1, state)))
    if head.training and torch.is_grad_enabled() and head.state_dropout_prob > 0:
        dropped = torch.rand(len(encoded), device=encoded.device) < head.state_dropout_prob
        encoded = encoded * (~dropped)[:, None, None].to(encoded.dtype)
    x = torch.cat([encoded, encode_actions(head, rows, noisy, bucket)], dim=1)
    x, condition = transform(head.model, places, seen, valid, x, bucket, steps)
    shift, scale = head.model.proj_out_1(condition).chunk(2, dim=1)
    x = head.model.proj_out_2(modulated(head.model.norm_out(x), scale, shift))
    decoder = head.action_decoder
    weight, bias = rows.weights(decoder.layer2)
    return F.relu(rows.linear(decoder.layer1, x)) @ weight[:, :dimensions] + bias[:dimensions]


def transform(
    model: Any, places: Places, seen: Tensor, valid: Tensor, x: Tensor, bucket: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """The diffusion transformer: the rows of the first `steps` actions [B, steps, D], and the time condition [B, D].

    `x` [B, 1 + H, D] holds the state and the actions. Odd blocks attend to these, the others to text and images in
    turn.
    """
    image, text = seen[:, places.image], seen[:, places.text]
    valid_text = valid[:, places.text][:, None, None]
    condition = F.silu(model.timestep_encoder(bucket))
    last, rows = len(model.transformer_blocks) - 1, x.shape[1]
    kept = slice(1, 1 + steps)
    for index, block in enumerate(model.transformer_blocks):
        scale, shift = block.norm1.linear(condition).chunk(2, dim=1)
        hidden, attention = modulated(block.norm1.norm(x), scale, shift), block.attn1
        context, mask = hidden, None
        if index % 2 == 0:
            is_text = index % (2 * model.attend_text_every_n_blocks) == 0
            context, mask = (text, valid_text) if is_text else (image, None)
        key, value = attention.to_k(context), attention.to_v(context)
        if index < last:
            x = finish(block, attend(attention, attention.to_q(hidden), key, value, mask), x)
        else:
            attended = attend(attention, attention.to_q(hidden[:, kept]), key, value, mask)
            x = finish(block, attended, x[:, kept], kept, rows)
    return x, condition


def flow_loss(predicted: Tensor, actions: Tensor, noise: Tensor, valid: Tensor, per_batch: bool) -> Tensor:
    """The flow-matching loss: mean squared error to `actions - noise` over the valid steps, all [B, steps, A].

    valid: float [B, steps], 1 where the step lies in the episode.
    per_batch: divide by the valid entries of the batch, as LeRobot does: a sample's weight then depends on its
        batch-mates. Otherwise by those of each sample, and average: the mean of LeRobot's loss of every sample alone.
    """
    dimensions = predicted.shape[-1]
    error = (predicted - (actions - noise)).square().sum(dim=-1) * valid
    if per_batch:
        return error.sum() / (valid.sum() * dimensions + 1e-6)
    return (error.sum(dim=1) / (valid.sum(dim=1) * dimensions + 1e-6)).mean()
