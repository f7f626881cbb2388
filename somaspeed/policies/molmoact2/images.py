"""Images as MolmoAct2's native processor makes them, bit for bit, in torch on any device.

The native processor resizes uint8 frames on the CPU and hands the model float patches, which the model rounds back to
the uint8 grid. Here patches stay uint8: a quarter of the bytes, and the model's first step becomes exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

POOL = 2  # patches per side that are pooled into one token


def resize(frames: Tensor, side: int) -> Tensor:
    """Bilinear uint8 [N, H, W, 3] → uint8 [N, side, side, 3], equal to torchvision's resize on a CPU."""
    if not len(frames):
        return frames.new_empty(0, side, side, 3)
    if frames.device.type != "cpu":
        return resize_exactly(frames, side)
    scaled = F.interpolate(frames.permute(0, 3, 1, 2).float(), size=(side, side), mode="bilinear", align_corners=False)
    return scaled.round_().to(torch.uint8).permute(0, 2, 3, 1)


def resize_exactly(frames: Tensor, side: int) -> Tensor:
    """`resize` from elementwise IEEE operations only, so that every device rounds as torch's CPU kernel does.

    Other devices' interpolation kernels add the four corners in another order, which moves ties by one level.
    The CPU kernel multiplies the weights of both axes first, then accumulates with fused multiply-adds.
    """
    pixels = frames.float()
    top, bottom, above, below = axis(frames.shape[1], side, frames.device)
    left, right, before, after = axis(frames.shape[2], side, frames.device)
    rows = (pixels.index_select(1, top), pixels.index_select(1, bottom))
    corners = [rows[i].index_select(2, column) for i in (0, 1) for column in (left, right)]
    weights = [(v[:, None] * h[None])[..., None] for v in (above, below) for h in (before, after)]
    total = weights[1] * corners[1]
    for index in (0, 2, 3):
        total = multiply_add(weights[index], corners[index], total)
    return total.round_().to(torch.uint8)


def axis(size: int, side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Along one axis, for each of `side` target pixels: both source indices, int64, and their weights, float32."""
    centre = torch.arange(side, dtype=torch.float32, device=device) + 0.5
    scale = torch.full((), size / side, dtype=torch.float32, device=device)
    source = multiply_add(centre, scale, torch.full((), -0.5, device=device)).clamp_min_(0)
    low = source.floor().long()
    weight = source - low
    return low, (low + 1).clamp_max(size - 1), 1 - weight, weight


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c in float32, rounded once: the product of two float32 is exact in float64."""
    return (a.double() * b.double()).add_(c.double()).float()


def patches(images: Tensor, patch: int) -> Tensor:
    """uint8 [N, S, S, 3] → uint8 [N, (S/patch)², patch² · 3], rows of pixels, channels innermost."""
    blocks = images.unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
    return blocks.transpose(2, 3).flatten(3).flatten(1, 2)


def unpatch(rows: Tensor, patch: int) -> Tensor:
    """The images that `patches` took apart: [N, P, patch² · 3] → [N, S, S, 3]."""
    side = round(rows.shape[1] ** 0.5)
    blocks = rows.unflatten(2, (patch, patch, 3)).unflatten(1, (side, side))
    return blocks.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def pooling_index(side: int) -> Tensor:
    """For every pooled token of a `side` × `side` grid, the patches that it pools, int64 [T, 4]; −1 is none.

    The grid is padded on the right and at the bottom to a multiple of the pooling window.
    """
    grid = torch.arange(side * side).view(side, side)
    padding = -side % POOL
    grid = F.pad(grid, (padding // 2, padding - padding // 2) * 2, value=-1)
    return grid.unflatten(1, (-1, POOL)).unflatten(0, (-1, POOL)).transpose(1, 2).reshape(-1, POOL * POOL)
