"""What the loader delivers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dataio.ring import Lease


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples. Its tensors stay as they are for as long as anybody holds them; treat them as read-only.

    sample: int64 [B], ids in the shard set.
    epoch, position: int64 [B], where each sample stands in the order; with the seed they key its draws.
    images: camera → uint8 [b, H, W, 3], RGB at source size, on the host or (decoded there) on the device.
    image_rows: int64 [b], the rows that `images` holds, in order: all B, but for those that the loader's `skip` named.
    columns: LeRobot key → [B, *shape], or [B, T, *shape] where windowed, in the column's own dtype.
    is_pad: windowed LeRobot key → bool [B, T], True where the window left the episode.
    task: int64 [B], index into the manifest's tasks.
    episode, frame, index: int64 [B]; the episode's number, the frame in it, the frame in the source dataset.
    timestamp: float32 [B], seconds since the episode's start.
    extra: what the loader's `transform` made of this batch.
    """

    sample: torch.Tensor
    epoch: torch.Tensor
    position: torch.Tensor
    images: dict[str, torch.Tensor]
    columns: dict[str, torch.Tensor]
    is_pad: dict[str, torch.Tensor]
    task: torch.Tensor
    episode: torch.Tensor
    frame: torch.Tensor
    index: torch.Tensor
    timestamp: torch.Tensor
    image_rows: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)
    lease: Lease | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.sample)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """This batch with every tensor, those in `extra` too, on `device`.

        With `non_blocking`, copies from page-locked memory run on the current stream; the host buffer is
        fenced, so this batch may be dropped at once. Copying `images` by other means needs its own fence.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if self.lease is None or torch.device(device).type != "cuda":
            return moved
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(torch.device(device)))
        self.lease.fence(event)
        return dataclasses.replace(moved, lease=None)

    def with_images(self) -> Batch:
        """The batch of the rows that have images. `extra` is taken along row by row."""
        rows = self.image_rows

        def take(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: take(item) for key, item in value.items()}
            return value[rows] if isinstance(value, torch.Tensor) and len(value) == len(self) else value

        taken = {item.name: take(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return Batch(**{**taken, "images": self.images, "image_rows": torch.arange(len(rows), device=rows.device)})

    def pin(self) -> Batch:
        """This batch with every host tensor in page-locked memory; one that is so already is not copied."""
        return self._map(
            lambda tensor: tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        )

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        def apply(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return function(value)
            if isinstance(value, dict):
                return {key: apply(item) for key, item in value.items()}
            return value

        return Batch(**{item.name: apply(getattr(self, item.name)) for item in dataclasses.fields(self)})
