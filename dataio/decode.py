"""Decoding with DALI, and only decoding: geometry and normalisation belong to the policy, on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, types
from nvidia.dali.plugin.pytorch import feed_ndarray

from dataio.manifest import Camera, DataError, did_you_mean

Device = Literal["cpu", "mixed"]


class Decoder:
    """Decodes batches of JPEG or PNG images, one DALI pipeline for all cameras.

    `device` "cpu" decodes on the host with `threads` threads, "mixed" on the current CUDA device, through the
    same pipeline. On the host JPEG pixels are PIL's; on a device they may differ in the last bits.
    """

    def __init__(self, cameras: Sequence[Camera], batch: int, threads: int = 2, device: Device = "cpu"):
        """`batch` is the largest number of samples per call. Raises DataError when `device` cannot be had."""
        if device not in get_args(Device):
            raise DataError(f"decode device {device!r}{did_you_mean(str(device), get_args(Device))}")
        if device == "mixed" and not torch.cuda.is_available():
            raise DataError(
                'decode device "mixed" needs a CUDA device and this process sees none; use "cpu".'
            )
        self.cameras = {camera.name: camera for camera in cameras}
        self.batch = batch
        self.threads = threads
        self.device = device
        self._device_id = torch.cuda.current_device() if device == "mixed" else None
        self._pipeline = self._build(list(self.cameras), batch) if cameras else None

    def decode(
        self,
        encoded: Mapping[str, Sequence[np.ndarray]],
        out: Mapping[str, torch.Tensor],
        where: Callable[[int], str],
        stream: torch.cuda.Stream | None = None,
        rows: np.ndarray | None = None,
    ) -> None:
        """Decode `encoded` (camera → B arrays, uint8 [bytes]) into `out` (camera → uint8 [B, H, W, 3], RGB).

        For "mixed", `out` lies on the device; the copy runs on `stream` and is complete on return. On the host `out`
        may hold more: the images then go to its `rows`, int64 [B].
        `where(row)` names a sample in errors: DataError for an image that does not decode, or is not of the
        camera's size.
        """
        if self._pipeline is None:
            return
        try:
            outputs = run(self._pipeline, encoded)
        except RuntimeError as error:
            # After an error a DALI pipeline is dead.
            self._pipeline = self._build(list(self.cameras), self.batch)
            raise self._diagnosis(encoded, where, error) from None
        for (name, camera), images in zip(self.cameras.items(), outputs, strict=True):
            expected = (camera.height, camera.width, 3)
            for row, shape in enumerate(images.shape()):
                if tuple(shape) != expected:
                    raise DataError(
                        f"{where(row)}: {name!r} is {shape[1]}×{shape[0]} (width × height), the manifest "
                        f"says {camera.width}×{camera.height}. Shard the dataset again."
                    )
            if self.device == "mixed":
                feed_ndarray(images.as_tensor(), out[name], cuda_stream=stream)
            elif rows is None:
                np.copyto(out[name].numpy(), np.asarray(images.as_tensor()))
            else:
                out[name].numpy()[rows] = np.asarray(images.as_tensor())
        if stream is not None:
            stream.synchronize()  # the next run reuses the pipeline's outputs

    def _build(self, cameras: list[str], batch: int) -> Pipeline:
        pipeline = Pipeline(
            batch_size=batch, num_threads=self.threads, device_id=self._device_id, prefetch_queue_depth=1
        )
        with pipeline:
            encoded = [
                fn.external_source(name=name, device="cpu", dtype=types.DALIDataType.UINT8, ndim=1)
                for name in cameras
            ]
            # Fancy upsampling is what libjpeg does to chroma; on a device it is not the default.
            pipeline.set_outputs(
                *(
                    fn.decoders.image(
                        images,
                        device=self.device,
                        output_type=types.DALIImageType.RGB,
                        jpeg_fancy_upsampling=True,
                    )
                    for images in encoded
                )
            )
        pipeline.build()
        return pipeline

    def _diagnosis(
        self, encoded: Mapping[str, Sequence[np.ndarray]], where: Callable[[int], str], error: RuntimeError
    ) -> DataError:
        """DALI does not say which image it was: decode one by one until it fails again."""
        for name in self.cameras:
            pipeline = self._build([name], 1)
            for row, image in enumerate(encoded[name]):
                try:
                    run(pipeline, {name: [image]})
                except RuntimeError:
                    return DataError(
                        f"{where(row)}: {name!r} is not an image that decodes ({image.size} bytes, beginning "
                        f"with {image[:4].tobytes().hex()}). Shard the dataset again."
                    )
        return DataError(f"decoding failed for a batch whose images decode one by one: {error}")


def run(pipeline: Pipeline, encoded: Mapping[str, Sequence[np.ndarray]]) -> Sequence[Any]:
    """One batch through a pipeline: DALI tensor lists, valid until its next run."""
    for name, images in encoded.items():
        pipeline.feed_input(name, list(images))
    return pipeline.run()
