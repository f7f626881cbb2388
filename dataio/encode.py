"""Frames to stored images, each decoded once as a check."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image

from dataio.frames import CorruptEpisode, decode_image
from dataio.manifest import Codec, DataError

SUBSAMPLINGS = ("4:4:4", "4:2:0")
MIN_PSNR = 20.0  # dB; real frames are above 30 at any sensible quality, so below it something is broken


def make_codec(name: str, quality: int, subsampling: str) -> Codec:
    """A checked `Codec`; quality (1…100) and subsampling are for JPEG. Raises DataError."""
    if name == "png":
        return Codec("png")
    if name != "jpeg":
        raise DataError(f"codec {name!r} is unknown; use jpeg or png.")
    if not 1 <= quality <= 100:
        raise DataError(f"quality {quality}: JPEG's goes from 1 to 100.")
    if subsampling not in SUBSAMPLINGS:
        raise DataError(f"subsampling {subsampling!r} is unknown; use {' or '.join(SUBSAMPLINGS)}.")
    return Codec("jpeg", quality, subsampling)


def encode(frame: np.ndarray, codec: Codec) -> bytes:
    """Encode uint8 [H, W, 3] RGB."""
    stream = io.BytesIO()
    image = Image.fromarray(frame)
    if codec.name == "png":
        image.save(stream, "PNG")
    else:
        image.save(stream, "JPEG", quality=codec.quality, subsampling=codec.subsampling, optimize=True)
    return stream.getvalue()


def squared_error(encoded: bytes, frame: np.ndarray, codec: Codec) -> int:
    """Decode `encoded` and compare with `frame`: the sum of squared differences over all values.

    Raises CorruptEpisode when it is not the same picture: other size, any difference (PNG), PSNR below 20 dB
    (JPEG).
    """
    decoded = decode_image(encoded)
    if decoded.shape != frame.shape:
        raise CorruptEpisode(f"encoded as {decoded.shape}, the frame is {frame.shape}")
    difference = np.subtract(decoded, frame, dtype=np.int32).ravel()
    error = int(np.square(difference).sum(dtype=np.int64))  # integers: the same on every machine
    if codec.name == "png" and error:
        raise CorruptEpisode("encoded as PNG it has other pixels")
    if psnr(error, frame.size) < MIN_PSNR:
        raise CorruptEpisode(
            f"as JPEG of quality {codec.quality}, {codec.subsampling}, it has a PSNR of "
            f"{psnr(error, frame.size):.1f} dB; below {MIN_PSNR:g} it is not the same picture. Use a higher "
            "quality"
        )
    return error


def psnr(squared: int, values: int) -> float:
    """Peak signal-to-noise ratio in dB of 8-bit values: 10 log10(255² / mean squared error)."""
    return 10 * math.log10(255**2 * values / squared) if squared else math.inf
