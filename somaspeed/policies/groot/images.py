"""GR00T's images, on the device, from the uint8 frames that the decoder delivers.

Geometry is LeRobot's torch path (resize, centred crop, resize, all bicubic with antialiasing), for all frames of a
batch in one call. Colour jitter is torchvision's `ColorJitter` on uint8 images, drawn once per sample and used for
all of its cameras; LeRobot 0.6.1 has none, NVIDIA's published recipe has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from somaspeed.policies.groot.prompt import MERGE, PATCH

OPERATIONS = ("brightness", "contrast", "saturation", "hue")
GRAY = (0.2989, 0.587, 0.114)  # ITU-R 601 luma, to the digits that torchvision uses


def fit(frames: Tensor, resolution: int, crop: int) -> Tensor:
    """uint8 [N, H, W, 3] → uint8 [N, R, R, 3]: the centred window of `crop` pixels of the frame at `resolution`."""
    images = frames.permute(0, 3, 1, 2)
    offset = (resolution - crop) // 2
    images = resize(images, [resolution] * 2, InterpolationMode.BICUBIC, antialias=True)
    window = images[..., offset : offset + crop, offset : offset + crop]
    resized = resize(window, [resolution] * 2, InterpolationMode.BICUBIC, antialias=True)
    return resized.permute(0, 2, 3, 1).contiguous()


def patchify(images: Tensor) -> Tensor:
    """uint8 [N, R, R, 3] → uint8 [N, patches, 16 · 16 · 3], patches in Qwen3-VL's order: token by token.

    Qwen3-VL orders a patch by channel, frame in time, row and column. Here it is row, column and channel, as the
    pixels lie, and the two frames, which are the same, are one: `patch_weight` takes it so. A patch's row is moved as
    six 64-bit words.
    """
    side, words = images.shape[1] // PATCH // MERGE, PATCH * 3 // 8
    blocks = images.flatten(2).view(torch.int64).view(len(images), side, MERGE, PATCH, side, MERGE, words)
    return blocks.permute(0, 1, 4, 2, 5, 3, 6).reshape(len(images), -1, PATCH * words).view(torch.uint8)


def patch_weight(weight: Tensor) -> Tensor:
    """The weight [width, 768] for `patchify`'s patches, of Qwen3-VL's own [width, 3, 2, 16, 16]."""
    return weight.sum(dim=2).permute(0, 2, 3, 1).flatten(1)


def normalize(patches: Tensor) -> Tensor:
    """uint8 → float32 in [-1, 1], in the arithmetic of transformers' image processor."""
    return patches.to(torch.float32).sub_(127.5).div_(127.5)


class JitterRanges(NamedTuple):
    """How far each property may move, as torchvision's `ColorJitter` takes it."""

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0


class Jitter(NamedTuple):
    """The jitter of one batch.

    factors: float32 [4, B], by `OPERATIONS`.
    turns: of each of the four turns, by operation, which samples have that operation then, int64 [any].
    """

    factors: Tensor
    turns: dict[int, dict[str, Tensor]]


def draw_jitter(ranges: JitterRanges, generators: Sequence[np.random.Generator]) -> Jitter:
    """The jitter of a batch, each sample from its own generator: four factors and the order of the operations."""
    spread = np.array(ranges)
    center = np.array([1.0, 1.0, 1.0, 0.0])
    low, high = np.maximum(center - spread, [0.0, 0.0, 0.0, -0.5]), center + spread
    factors = np.stack([generator.uniform(low, high) for generator in generators], axis=1)
    orders = np.stack([generator.permutation(len(OPERATIONS)) for generator in generators])
    turns = {
        number: {name: torch.from_numpy(np.flatnonzero(turn == index)) for index, name in enumerate(OPERATIONS)}
        for number, turn in enumerate(orders.T)
    }
    return Jitter(torch.from_numpy(factors.astype(np.float32)), turns)


def jittered(images: Tensor, jitter: Jitter) -> Tensor:
    """uint8 [B, cameras, R, R, 3] with the jitter of every sample.

    A device takes the samples that have an operation in the same turn together; a CPU one by one, which its caches
    hold.
    """
    planes = images.permute(0, 1, 4, 2, 3).to(torch.float32, memory_format=torch.contiguous_format)
    for turn in jitter.turns.values():
        for index, name in enumerate(OPERATIONS):
            operation, rows = APPLY[name], turn[name]
            factors = jitter.factors[index, :, None, None, None, None]
            if planes.device.type == "cpu":
                for row in rows.tolist():
                    operation(planes[row : row + 1], factors[row : row + 1])
            elif len(rows):
                chosen = planes[rows]
                operation(chosen, factors[rows])
                planes[rows] = chosen
    return planes.permute(0, 1, 3, 4, 2).to(torch.uint8, memory_format=torch.contiguous_format)


def gray(images: Tensor) -> Tensor:
    """[…, 3, R, R] → [..., 1, R, R], whole numbers."""
    red, green, blue = images.unbind(-3)
    return (red * GRAY[0]).add_(green, alpha=GRAY[1]).add_(blue, alpha=GRAY[2]).floor_()[..., None, :, :]


def blend(images: Tensor, other: Tensor, factor: Tensor) -> None:
    images.mul_(factor).add_(other.mul_(1 - factor)).clamp_(0, 255).floor_()


def brightness(images: Tensor, factor: Tensor) -> None:
    images.mul_(factor).clamp_(0, 255).floor_()


def contrast(images: Tensor, factor: Tensor) -> None:
    blend(images, gray(images).mean(dim=(-3, -2, -1), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> None:
    blend(images, gray(images), factor)


def hue(images: Tensor, factor: Tensor) -> None:
    """Turn the hue by `factor` of the circle. Each channel is value - chroma · loss(hue)."""
    red, green, blue = images.unbind(-3)
    value, low = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    chroma = value - low
    inverse = chroma.clamp(min=1).reciprocal_()  # chroma is whole: where it is 0 the hue does not matter
    # The hue in sixths of the circle, counted from the largest channel.
    sixths = torch.where(
        value == red,
        (green - blue).mul_(inverse),
        torch.where(value == green, (blue - red).mul_(inverse).add_(2), (red - green).mul_(inverse).add_(4)),
    )
    sixths.add_(6 * factor[..., 0])
    sixths.sub_((sixths / 6).floor_().mul_(6))
    red_loss = (sixths - 3).abs_().neg_().add_(2).clamp_(0, 1)
    green_loss = (sixths - 2).abs_().sub_(1).clamp_(0, 1)
    blue_loss = (sixths - 4).abs_().sub_(1).clamp_(0, 1)
    chroma.neg_()
    for channel, loss in zip((red, green, blue), (red_loss, green_loss, blue_loss), strict=True):
        torch.addcmul(value, chroma, loss, out=channel)
    # As torchvision: back to [0, 1] and to whole numbers by 255.999.
    images.mul_(255.999 / 255).floor_()


APPLY: dict[str, Callable[[Tensor, Tensor], None]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
}
