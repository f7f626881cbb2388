"""Decoding: the pixels of PIL, and errors that name the sample and leave the decoder alive."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from dataio.decode import Decoder
from dataio.manifest import Camera, DataError

CAMERAS = [
    Camera("wrist", "observation.images.wrist", 48, 64),
    Camera("top", "observation.images.top", 33, 21),
]


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """A smooth picture with some noise, uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 5 + seed) * 60 + np.cos(y / (7 + c)) * 50 + 128 for c in range(3)]
    return (np.stack(waves, 2) + rng.normal(0, 6, (height, width, 3))).clip(0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, kind: str = "JPEG", **options) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return np.frombuffer(stream.getvalue(), np.uint8)


def batch_of(size: int, kind: str = "JPEG", **options) -> dict[str, list[np.ndarray]]:
    return {
        camera.name: [
            encode(picture(camera.height, camera.width, 10 * number + row), kind, **options) for row in range(size)
        ]
        for number, camera in enumerate(CAMERAS)
    }


def buffers(size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        camera.name: torch.zeros((size, camera.height, camera.width, 3), dtype=torch.uint8, device=device)
        for camera in CAMERAS
    }


def by_pil(data: np.ndarray) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data.tobytes())).convert("RGB"))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 95, "subsampling": "4:4:4"}),
        ("JPEG", {"quality": 90, "subsampling": "4:2:0"}),
        ("JPEG", {"quality": 90, "subsampling": "4:2:0", "progressive": True}),
        ("PNG", {}),
    ],
)
def test_pixels_are_those_of_pil(kind: str, options: dict) -> None:
    encoded, out = batch_of(5, kind, **options), buffers(5)
    Decoder(CAMERAS, 5).decode(encoded, out, str)
    for name, images in encoded.items():
        for row, data in enumerate(images):
            assert np.array_equal(out[name][row].numpy(), by_pil(data))
            if kind == "PNG":
                number = [camera.name for camera in CAMERAS].index(name)
                assert np.array_equal(by_pil(data), picture(*by_pil(data).shape[:2], 10 * number + row))


def test_grey_images_become_rgb() -> None:
    camera = Camera("top", "top", 16, 16)
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    out = torch.zeros((1, 16, 16, 3), dtype=torch.uint8)
    Decoder([camera], 1).decode({"top": [encode(grey, "PNG")]}, {"top": out}, str)
    assert torch.equal(out[0], torch.from_numpy(grey)[..., None].expand(-1, -1, 3))


def test_batches_of_any_size_up_to_the_largest() -> None:
    decoder = Decoder(CAMERAS, 8, threads=1)
    for size in (8, 1, 3, 8):
        encoded, out = batch_of(size), buffers(size)
        decoder.decode(encoded, out, str)
        assert np.array_equal(out["top"][size - 1].numpy(), by_pil(encoded["top"][size - 1]))


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty header"])
def test_an_image_that_does_not_decode_is_named(damage: str) -> None:
    decoder = Decoder(CAMERAS, 4)
    encoded = batch_of(4)
    good = encoded["top"][2]
    encoded["top"][2] = {
        "cut": good[:200].copy(),
        "garbage": np.frombuffer(b"this is no image at all, but some text" * 9, np.uint8),
        "empty header": good[:3].copy(),
    }[damage]
    with pytest.raises(DataError, match=r"^sample 102: 'top' is not an image that decodes .*Shard the dataset"):
        decoder.decode(encoded, buffers(4), lambda row: f"sample {100 + row}")
    encoded, out = batch_of(4), buffers(4)
    decoder.decode(encoded, out, str)
    assert np.array_equal(out["top"][2].numpy(), by_pil(encoded["top"][2]))


def test_an_image_of_another_size_is_named() -> None:
    encoded = batch_of(4)
    encoded["wrist"][3] = encode(picture(64, 48, 0))
    with pytest.raises(DataError, match=r"sample 3: 'wrist' is 48×64 \(width × height\), the manifest says 64×48"):
        Decoder(CAMERAS, 4).decode(encoded, buffers(4), lambda row: f"sample {row}")


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(DataError, match="decode device 'cuda'"):
        Decoder(CAMERAS, 1, device="cuda")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match='use "cpu"'):
            Decoder(CAMERAS, 1, device="mixed")


@pytest.mark.gpu
def test_device_pixels_are_close_to_pil() -> None:
    stream = torch.cuda.Stream()
    decoder = Decoder(CAMERAS, 5, device="mixed")
    for subsampling in ("4:4:4", "4:2:0"):
        encoded = batch_of(5, quality=95, subsampling=subsampling)
        with torch.cuda.stream(stream):
            out = buffers(5, "cuda")
        decoder.decode(encoded, out, str, stream)
        for name, images in encoded.items():
            for row, data in enumerate(images):
                difference = out[name][row].cpu().numpy().astype(int) - by_pil(data)
                assert np.abs(difference).mean() < 1
