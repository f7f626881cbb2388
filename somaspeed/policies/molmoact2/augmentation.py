"""LeRobot's image augmentation for a whole batch on its device, drawn per sample.

LeRobot's `ImageTransforms` applies three of six transforms to one image at a time in the loader's workers, 6 to 10 ms
each. Here the draws are numbers made beside the sample's noise, and the arithmetic, torchvision's, runs once per
batch on a device, where a transform that an image did not draw has the factor that changes nothing. A CPU, whose time
goes into arithmetic and not into launches, takes images one by one through what each drew: the same bits.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from lerobot.transforms.transforms import ImageTransformsConfig
from torch import Tensor

NAMES = ("brightness", "contrast", "saturation", "hue", "sharpness", "affine")
GREY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue
SHARPNESS_KERNEL = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # over 13
NEUTRAL = (1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0)  # the draw that changes nothing
MARKS = (0, 1, 2, 5, 4, 6)  # where a draw shows that the image drew a transform, in the order of NAMES


class ImageAugmentation:
    """LeRobot's default `ImageTransformsConfig`, which is what `dataset.image_transforms.enable` turns on.

    One image's draw is a row of 13 numbers: five factors, whether hue and affine apply, and the affine matrix.
    """

    def __init__(self) -> None:
        config = ImageTransformsConfig()
        assert tuple(config.tfs) == NAMES and all(tf.weight == 1.0 for tf in config.tfs.values())
        self.count = config.max_num_transforms
        self.ranges = [next(iter(config.tfs[name].kwargs.values())) for name in NAMES[:5]]
        affine = config.tfs["affine"].kwargs
        self.degrees, self.translate = affine["degrees"], affine["translate"]

    def draw(self, generator: np.random.Generator, height: int, width: int) -> np.ndarray:
        """The draw of one image of `height` × `width` pixels, float64 [13]."""
        row = np.array(NEUTRAL, dtype=np.float64)
        for index in sorted(generator.choice(len(NAMES), self.count, replace=False)):
            if NAMES[index] == "affine":
                angle = math.radians(generator.uniform(*self.degrees))
                limits = (self.translate[0] * width, self.translate[1] * height)
                shift = [round(generator.uniform(-limit, limit)) for limit in limits]
                row[6:] = (1, *inverse_affine(angle, shift))
            else:
                row[index] = generator.uniform(*self.ranges[index])
                row[5] = max(row[5], float(NAMES[index] == "hue"))
        return row

    def __call__(self, frames: Tensor, draws: Tensor) -> Tensor:
        """Change uint8 `frames` [B, H, W, 3] as `draws` float32 [B, 13] say; uint8, as LeRobot's processor rounds."""
        if frames.device.type != "cpu":
            return changed(frames, draws, set(NAMES))
        result = torch.empty_like(frames)
        for index, row in enumerate(draws.tolist()):
            drawn = {name for name, mark in zip(NAMES, MARKS, strict=True) if row[mark] != NEUTRAL[mark]}
            one = slice(index, index + 1)
            result[one] = changed(frames[one], draws[one], drawn)
        return result


def changed(frames: Tensor, draws: Tensor, transforms: set[str]) -> Tensor:
    """uint8 `frames` [B, H, W, 3] through those of `transforms`, with the factors in `draws` float32 [B, 13]."""
    images = frames.permute(0, 3, 1, 2).contiguous().float() / 255
    factor = draws[:, :5, None, None, None]
    if "brightness" in transforms:
        images = (images * factor[:, 0]).clamp_(0, 1)
    if "contrast" in transforms:
        images = blend(images, grey(images).mean(dim=(1, 2, 3), keepdim=True), factor[:, 1])
    if "saturation" in transforms:
        images = blend(images, grey(images), factor[:, 2])
    if "hue" in transforms:
        images = torch.where(draws[:, 5, None, None, None] > 0, shift_hue(images, factor[:, 3, 0]), images)
    if "sharpness" in transforms:
        images = sharpen(images, factor[:, 4])
    if "affine" in transforms:
        images = torch.where(draws[:, 6, None, None, None] > 0, move(images, draws[:, 7:].view(-1, 2, 3)), images)
    return (images * 255).clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def inverse_affine(angle: float, shift: list[int]) -> tuple[float, ...]:
    """From target to source pixels of a rotation by `angle` radians about the centre, then `shift` (x, y)."""
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = shift
    return cosine, sine, -cosine * x - sine * y, -sine, cosine, sine * x - cosine * y


def grey(images: Tensor) -> Tensor:
    """Luminance, [B, 1, H, W]."""
    weights = torch.tensor(GREY).to(images.device, non_blocking=True)
    return (images * weights[:, None, None]).sum(dim=1, keepdim=True)


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (images * factor + other * (1 - factor)).clamp_(0, 1)


def sharpen(images: Tensor, factor: Tensor) -> Tensor:
    """Away from (factor above one) or towards a 3 × 3 blur; the outermost pixels keep their values."""
    kernel = torch.tensor(SHARPNESS_KERNEL, dtype=images.dtype).to(images.device, non_blocking=True) / 13
    blurred = F.conv2d(images, kernel.expand(3, 1, 3, 3), groups=3)
    inner = images[..., 1:-1, 1:-1]
    result = images.clone()
    result[..., 1:-1, 1:-1] = inner + (1 - factor) * (blurred - inner)
    return result.clamp_(0, 1)


def modulo(x: Tensor, base: int) -> Tensor:
    """`x` modulo `base`; a CPU's floor is vectorised, its remainder is not."""
    return x - (x / base).floor_().mul_(base)


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of `images` by `shift` [B, 1, 1] turns."""
    red, green, blue = images.unbind(1)
    high, low = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    span = high - low
    distance = (high[:, None] - images) / (span + (span == 0))[:, None]
    most_red, most_green = high == red, high == green
    red, green, blue = distance.unbind(1)
    sextant = torch.where(most_red, blue - green, torch.where(most_green, 2 + red - blue, 4 + green - red))
    hue = modulo(modulo(sextant / 6 + 1, 1) + shift, 1) * 6
    saturation = span / (high + (high == 0))
    # Each channel is a trapezoid over the hue, at a third of a turn from the next.
    offsets = torch.tensor([5.0, 3.0, 1.0]).to(images.device, non_blocking=True)
    place = modulo(hue[:, None] + offsets[:, None, None], 6)
    weight = torch.minimum(place, 4 - place).clamp_(0, 1)
    return high[:, None] * (1 - saturation[:, None] * weight)


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Nearest-pixel affine transform with zeros outside; `matrices` [B, 2, 3] lead from target to source pixels."""
    height, width = images.shape[-2:]
    device = images.device
    xs = torch.linspace((1.0 - width) * 0.5, (width - 1.0) * 0.5, width, device=device)
    ys = torch.linspace((1.0 - height) * 0.5, (height - 1.0) * 0.5, height, device=device)[:, None]
    half = torch.tensor([0.5 * width, 0.5 * height]).to(device, non_blocking=True)
    by_x, by_y, shift = (matrices / half[:, None])[..., None, None].unbind(2)
    grid = (xs * by_x + (ys * by_y + shift)).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, mode="nearest", align_corners=False)
