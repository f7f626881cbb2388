"""`first_batch.png`: what the policy sees, camera by camera, with each sample's prompt below."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from dataio.atomic import write_bytes
from somaspeed.policies.base import Policy

SIDE = 224  # pixels of one picture
MARGIN = 8
LINE = 15
SAMPLES = 4


def save_preview(path: Path, policy: Policy, inputs: Any) -> None:
    """Draw the first samples of a batch as the policy gets them: a row each, one picture per camera."""
    images, texts = policy.preview(inputs)
    rows, slots = min(len(images), SAMPLES), images.shape[1]
    font = ImageFont.load_default(12)
    width = MARGIN + slots * (SIDE + MARGIN)
    wrapped = [textwrap.wrap(text, width=max(width // 7, 20)) for text in texts[:rows]]
    heights = [LINE + SIDE + len(lines) * LINE + 2 * MARGIN for lines in wrapped]
    canvas = Image.new("RGB", (width, sum(heights) + MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    top = MARGIN
    for row in range(rows):
        for slot, camera in enumerate(policy.cameras):
            left = MARGIN + slot * (SIDE + MARGIN)
            shown = Image.fromarray(images[row, slot])
            draw.text((left, top), f"{camera}  {shown.width}x{shown.height}", fill="black", font=font)
            canvas.paste(shown.resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, top + LINE))
        for number, line in enumerate(wrapped[row]):
            draw.text((MARGIN, top + LINE + SIDE + 4 + number * LINE), line, fill="black", font=font)
        top += heights[row]
    buffer = io.BytesIO()
    canvas.save(buffer, format="PNG")
    write_bytes(path, buffer.getvalue())
