"""Encoding frames: what is stored is compared with the frame it came from."""

from __future__ import annotations

import math

import pytest
from tiny_lerobot import draw_number

from dataio.encode import encode, make_codec, psnr, squared_error
from dataio.frames import CorruptEpisode


def test_stored_images_are_compared_with_their_frames() -> None:
    frame = draw_number(1234, 32)
    other = draw_number(1235, 32)
    jpeg, png = make_codec("jpeg", 95, "4:4:4"), make_codec("png", 95, "4:4:4")
    assert psnr(squared_error(encode(frame, jpeg), frame, jpeg), frame.size) > 40
    assert squared_error(encode(frame, png), frame, png) == 0
    almost = frame.copy()
    almost[5, 7, 2] += 1
    assert psnr(squared_error(encode(frame, png), almost, jpeg), frame.size) == pytest.approx(
        10 * math.log10(255**2 * frame.size)
    )
    for codec, wrong in [(jpeg, other), (jpeg, frame[:16]), (png, almost)]:
        with pytest.raises(CorruptEpisode):
            squared_error(encode(frame, codec), wrong, codec)
