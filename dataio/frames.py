"""Rows and decoded frames of one episode of a LeRobot dataset, image or video kind.

What is wrong with an episode's own bytes is a `CorruptEpisode`: the caller leaves that episode out by name
and goes on. Videos are decoded by the number of the frame in its file, never by a timestamp's tolerance.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import av
import msgspec
import numpy as np
import PIL
import pyarrow
import pyarrow.parquet as parquet
from PIL import Image

from dataio.manifest import Camera, DataError
from dataio.source import UNREADABLE, Source, Span, VideoSpan

# PyAV brings its own FFmpeg, so there is nothing to install; its pixels are LeRobot's, whichever backend
# LeRobot uses.
VIDEO_BACKEND = f"PyAV {av.__version__}"
IMAGE_BACKEND = f"Pillow {PIL.__version__}"


class CorruptEpisode(Exception):
    """An episode's bytes cannot be used; the message says which and why."""


class Rows(msgspec.Struct, frozen=True):
    """The rows of an n-frame episode: int64 [n], timestamp float32 [n], columns [n, *shape] as declared."""

    index: np.ndarray
    frame: np.ndarray
    task: np.ndarray
    timestamp: np.ndarray
    columns: dict[str, np.ndarray]


class EpisodeReader:
    """Reads episodes of `source`; keeps the current video file of every camera open."""

    def __init__(self, source: Source):
        self.source = source
        self._root = Path(source.root)
        self._videos: dict[str, VideoFile] = {}

    def rows(self, span: Span) -> Rows:
        """The low-dimensional part of an episode. Raises CorruptEpisode (unreadable, wrong shape, NaN, …)."""
        keys = [self.source.key_in_dataset(column.key) for column in self.source.columns]
        table = self._table(span, ["index", "frame_index", "task_index", "timestamp", *keys])
        index, frame, task = (
            _array(table, name, "int64", (), span.length) for name in ("index", "frame_index", "task_index")
        )
        timestamp = _array(table, "timestamp", "float32", (), span.length)
        if task.min() < 0 or task.max() >= len(self.source.tasks):
            raise CorruptEpisode(
                f"{span.data}: task_index {task.max()}, but there are {len(self.source.tasks)} tasks"
            )
        columns = {
            column.key: _array(table, key, column.dtype, column.shape, span.length)
            for column, key in zip(self.source.columns, keys, strict=True)
        }
        return Rows(index, frame, task, timestamp, columns)

    def frames(self, span: Span, camera: Camera) -> Iterator[np.ndarray]:
        """The episode's frames of one camera in order, uint8 [height, width, 3]. Raises CorruptEpisode."""
        video = span.videos.get(self.source.key_in_dataset(camera.key))
        frames = self._images(span, camera) if video is None else self._video(span, camera, video)
        number = -1
        for number, frame in enumerate(frames):
            if frame.shape != (camera.height, camera.width, 3):
                raise CorruptEpisode(
                    f"{camera.key}, frame {number}: {frame.shape[1]}x{frame.shape[0]} pixels, the dataset "
                    f"says {camera.width}x{camera.height}"
                )
            yield frame
        if number + 1 != span.length:
            raise CorruptEpisode(f"{camera.key}: {number + 1} frames, the dataset says {span.length}")

    def _table(self, span: Span, columns: list[str]) -> pyarrow.Table:
        path = self._root / span.data
        try:
            return parquet.read_table(path, columns=columns, filters=[("episode_index", "=", span.episode)])
        except UNREADABLE as error:
            raise CorruptEpisode(f"{span.data}: cannot be read: {error}") from None

    def _images(self, span: Span, camera: Camera) -> Iterator[np.ndarray]:
        key = self.source.key_in_dataset(camera.key)
        for number, cell in enumerate(self._table(span, [key])[key]):
            data = (cell.as_py() or {}).get("bytes")
            try:
                if not data:
                    raise CorruptEpisode("no image is stored")
                yield decode_image(data)
            except CorruptEpisode as error:
                raise CorruptEpisode(f"{camera.key}, frame {number}: {error}") from None

    def _video(self, span: Span, camera: Camera, video: VideoSpan) -> Iterator[np.ndarray]:
        if video.frames < span.length:
            raise CorruptEpisode(
                f"{camera.key}: {video.frames} frames in {video.file}, but {span.length} rows in {span.data}"
            )
        opened = self._videos.get(camera.key)
        try:
            if opened is None or opened.name != video.file:
                opened = self._videos[camera.key] = VideoFile(self._root / video.file, video.file)
            yield from opened.frames(video.start, span.length, self.source.fps)
        except (av.FFmpegError, OSError) as error:
            # The decoder's state is unknown after an error: the next episode opens the file anew.
            self._videos.pop(camera.key, None)
            raise CorruptEpisode(f"{video.file}: {VIDEO_BACKEND} cannot decode it: {error}") from None


class VideoFile:
    """A video whose frames are addressed by their number in presentation order."""

    def __init__(self, path: Path, name: str):
        self.name = name
        self._container = av.open(str(path))
        if not self._container.streams.video:
            raise CorruptEpisode(f"{name}: no video stream in it")
        self._stream = self._container.streams.video[0]
        assert self._stream.time_base is not None  # FFmpeg sets it for every stream of a file
        self._seconds = self._stream.time_base
        self._stream.codec_context.thread_count = 1  # parallelism is across shards
        # The timestamp of every frame, from the packets alone: with it a frame number is exact at any frame
        # rate.
        packets = self._container.demux(self._stream)
        self._pts = sorted(p.pts for p in packets if p.pts is not None and not p.is_discard)

    def frames(self, start: int, count: int, fps: float) -> Iterator[np.ndarray]:
        """Frames [start, start + count) as uint8 [H, W, 3] RGB. Raises CorruptEpisode, av.FFmpegError."""
        wanted = self._pts[start : start + count]
        if len(wanted) < count:
            raise CorruptEpisode(
                f"{self.name}: {len(self._pts)} frames, frames [{start}, {start + count}) are needed"
            )
        seconds = float((wanted[0] - self._pts[0]) * self._seconds)
        if abs(seconds * fps - start) > 0.5:
            raise CorruptEpisode(
                f"{self.name}: frame {start} is at {seconds:.3f} s, at {fps:g} fps it belongs at "
                f"{start / fps:.3f} s"
            )
        self._container.seek(wanted[0], stream=self._stream, backward=True)
        number = 0
        for frame in self._container.decode(self._stream):
            if frame.pts is None or frame.pts < wanted[number]:
                continue
            if frame.pts > wanted[number] or frame.is_corrupt:  # corrupt: the decoder painted over damage
                break
            yield frame.to_ndarray(format="rgb24")
            number += 1
            if number == count:
                return
        raise CorruptEpisode(f"{self.name}: frame {start + number} cannot be decoded")


def decode_image(data: bytes) -> np.ndarray:
    """Decode a whole stored image to uint8 [H, W, 3]. Raises CorruptEpisode unless it is complete and RGB."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            if image.mode != "RGB":
                raise CorruptEpisode(f"a {image.mode} image, RGB is needed")
            return np.asarray(image)
    except CorruptEpisode:
        raise
    except Exception as error:  # Pillow's format plugins raise a dozen kinds on bad bytes
        raise CorruptEpisode(f"{IMAGE_BACKEND} cannot decode it: {error}") from None


def _array(table: pyarrow.Table, key: str, dtype: str, shape: tuple[int, ...], length: int) -> np.ndarray:
    """Column `key` as [length, *shape]; LeRobot stores shape (1,) as scalars."""
    try:
        values = np.array(table[key].to_pylist(), dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptEpisode(f"{key}: missing or ragged values: {error}") from None
    if values.shape == (length,) and shape == (1,):
        values = values[:, None]
    if values.shape != (length, *shape):
        raise CorruptEpisode(f"{key}: shape {list(values.shape)}, the dataset says {[length, *shape]}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values.reshape(length, -1)).all(axis=1))[0])
        raise CorruptEpisode(f"{key}, frame {bad}: not a finite number")
    return values


def first_images(source: Source) -> list[np.ndarray]:
    """One decoded frame of every camera, from the first selected episode that decodes.

    Raises DataError, naming the packages that decode, when no episode does.
    """
    reason = ""
    for span in source.spans:
        reader = EpisodeReader(source)
        try:
            return [next(reader.frames(span, camera)) for camera in source.cameras]
        except CorruptEpisode as error:
            reason = reason or f"episode {span.episode}: {error}"
    raise DataError(
        f"{source.dataset}: not one of {len(source.spans)} episodes can be decoded ({VIDEO_BACKEND} for "
        f"videos, {IMAGE_BACKEND} for images). The first: {reason}"
    )
