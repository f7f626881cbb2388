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
    """uint8 [N, H, W, 3] → uint8 [N, 3, R, R]: the centred window of `crop` pixels of the frame at `resolution`."""
    images = frames.permute(0, 3, 1, 2)
    offset = (resolution - crop) // 2
    images = resize(images, [resolution] * 2, InterpolationMode.BICUBIC, antialias=True)
    window = images[..., offset : offset + crop, offset : offset + crop]
    return resize(window, [resolution] * 2, InterpolationMode.BICUBIC, antialias=True)


def patchify(images: Tensor) -> Tensor:
    """uint8 [N, 3, R, R] → uint8 [N, patches, 3 · 16 · 16], in Qwen3-VL's order: tokens, then the patches of each.

    Qwen3-VL's patches hold two frames in time. A single image fills both, so only one is kept here.
    """
    side = images.shape[-1] // PATCH // MERGE
    blocks = images.view(len(images), 3, side, MERGE, PATCH, side, MERGE, PATCH)
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(images), -1, 3 * PATCH * PATCH)


def normalize(patches: Tensor) -> Tensor:
    """uint8 → float32 in [-1, 1], in the arithmetic of transformers' image processor."""
    return (patches.to(torch.float32) - 127.5) / 127.5


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
    """uint8 [B, cameras, 3, R, R] with the jitter of every sample."""
    images = images.to(torch.float32)
    for turn in jitter.turns.values():
        for index, name in enumerate(OPERATIONS):
            rows = turn[name]
            if len(rows):
                factor = jitter.factors[index, rows][:, None, None, None, None]
                images[rows] = APPLY[name](images[rows], factor)
    return images.to(torch.uint8)


def gray(images: Tensor) -> Tensor:
    """[…, 3, R, R] → [..., 1, R, R], whole numbers."""
    red, green, blue = images.unbind(-3)
    return (red * GRAY[0]).add_(green, alpha=GRAY[1]).add_(blue, alpha=GRAY[2]).floor_()[..., None, :, :]


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).add_(other * (1 - factor)).clamp_(0, 255).floor_()


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).clamp_(0, 255).floor_()


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, gray(images).mean(dim=(-3, -2, -1), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, gray(images), factor)


def hue(images: Tensor, factor: Tensor) -> Tensor:
    """Turn the hue by `factor` of the circle. Value and chroma stay, so each channel is value - chroma · t(hue)."""
    low, value = torch.aminmax(images, dim=-3)
    chroma = value - low
    red, green, blue = images.unbind(-3)
    inverse = chroma.clamp(min=1).reciprocal_()  # chroma is whole: where it is 0 the hue does not matter
    sextant = torch.where(
        value == red,
        (green - blue) * inverse,
        torch.where(value == green, (blue - red) * inverse + 2, (red - green) * inverse + 4),
    )
    sextant = sextant.add_(6 * factor[..., 0])
    channels = []
    for shift in (5, 3, 1):
        k = torch.remainder(sextant + shift, 6)
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    # As torchvision: back to [0, 1] and to whole numbers by 255.999.
    return torch.stack(channels, dim=-3).mul_(255.999 / 255).floor_()


APPLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
}
