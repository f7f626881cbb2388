"""The stages between order and batch, as torchdata nodes: order → read → decode → prepare → prefetch.

order     which samples come next                                            (the source node)
read      encoded images from the mapped tars, checked, or frames from the
          frame cache; columns and windows                                   (`workers` threads, in order)
decode    pixels into a buffer of the ring                                   (DALI's threads)
prepare   the caller's host-side transform, page-locking                     (the prefetch thread)
prefetch  finished batches, waiting                                          (a queue)
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchdata.nodes import BaseNode, Mapper, ParallelMapper, Prefetcher

from dataio.batch import Batch
from dataio.blocks import BlockStream
from dataio.decode import Decoder
from dataio.frame_cache import FrameCache
from dataio.manifest import DataError
from dataio.order import Stream
from dataio.reader import ShardReader
from dataio.ring import Lease, Ring
from dataio.windows import Windows

LOOK_AHEAD = 4096  # positions whose samples are computed together: one by one, the order costs more than reading
Transform = Callable[[Batch], dict[str, Any]]
Skip = Callable[[np.ndarray], np.ndarray]  # sample ids [B] → bool [B], True where no image is needed


@dataclass(frozen=True)
class Request:
    """The samples of one batch: ids, and where each stands in the order; int64 [B] each."""

    sample: np.ndarray
    epoch: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class Encoded:
    """A batch before decoding: b rows of the request have images, of which those at `missing` are yet to be decoded.

    images: camera → encoded images of the missing ones.
    frames: camera → uint8 [b, H, W, 3] on the host, filled from the frame cache but for `missing`; None when that
        held none of them.
    """

    request: Request
    image_rows: np.ndarray
    missing: np.ndarray
    images: dict[str, list[np.ndarray]]
    frames: dict[str, torch.Tensor] | None
    lease: Lease | None
    columns: dict[str, np.ndarray]
    is_pad: dict[str, np.ndarray]


@dataclass(frozen=True)
class Failure:
    """An error on its way to the consumer, in place of the batch it befell."""

    stage: str
    error: Exception

    def reraise(self) -> None:
        """Raise the error again with the stage's name: DataError for bad data, RuntimeError otherwise."""
        kind = DataError if isinstance(self.error, DataError) else RuntimeError
        text = str(self.error) if kind is DataError else f"{type(self.error).__name__}: {self.error}"
        raise kind(f"loader stage {self.stage!r}: {text}") from self.error


class OrderNode(BaseNode[Request]):
    """One rank's micro-batches of the endless stream, from global stream position `start` on.

    The k-th takes positions start + (k·ranks + rank)·microbatch + [0, microbatch). Any number of accumulated
    micro-batches thus tiles the same global batch, and after k of them the ranks together have taken exactly
    the positions below start + k·ranks·microbatch: that number is the whole state.
    """

    def __init__(
        self,
        stream: Stream | BlockStream,
        samples: np.ndarray,
        microbatch: int,
        rank: int,
        ranks: int,
        start: int,
    ):
        super().__init__()
        self._stream, self._samples = stream, samples
        self._microbatch, self._rank, self._ranks = microbatch, rank, ranks
        self._start = start

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        super().reset(initial_state)
        self._next = self._start if initial_state is None else initial_state["position"]
        self._known = range(0)  # stream positions of `_ahead`

    def next(self) -> Request:
        step = self._ranks * self._microbatch
        if not self._known.start <= self._next < self._known.stop:
            count = max(1, LOOK_AHEAD // step) * step
            self._known = range(self._next, self._next + count)
            self._ahead = self._stream.at(self._next, count)
        first = self._next - self._known.start + self._rank * self._microbatch
        epoch, position, index = (values[first : first + self._microbatch] for values in self._ahead)
        self._next += step
        return Request(self._samples[index], epoch.copy(), position.copy())

    def get_state(self) -> dict[str, int]:
        return {"position": self._next}


class SequenceNode(BaseNode[Request]):
    """Given samples once, in the order given; the last batch may be smaller. Epoch 0, position 0 … n − 1."""

    def __init__(self, samples: np.ndarray, microbatch: int):
        super().__init__()
        self._samples, self._microbatch = samples, microbatch

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        super().reset(initial_state)
        self._next = 0 if initial_state is None else initial_state["position"]

    def next(self) -> Request:
        position = np.arange(self._next, min(self._next + self._microbatch, len(self._samples)))
        if not position.size:
            raise StopIteration
        self._next += position.size
        return Request(self._samples[position], np.zeros_like(position), position)

    def get_state(self) -> dict[str, int]:
        return {"position": self._next}


class Until(BaseNode[Request]):
    """`source`, ending once `closed` is set."""

    def __init__(self, closed: threading.Event, source: BaseNode[Request]):
        super().__init__()
        self._closed, self._source = closed, source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._source.reset(initial_state)

    def next(self) -> Request:
        if self._closed.is_set():
            raise StopIteration
        return next(self._source)

    def get_state(self) -> dict[str, Any]:
        return self._source.state_dict()


class Stages:
    """The running chain behind `source`: threads start with the first `next` and end with `close`."""

    def __init__(
        self,
        source: BaseNode[Request],
        reader: ShardReader,
        windows: Windows,
        decoder: Decoder,
        workers: int,
        prefetch: int,
        transform: Transform | None,
        skip: Skip | None,
        frame_cache: FrameCache | None = None,
        announce: Callable[[Request], None] | None = None,
    ):
        """`announce` is told of every request before it is read."""
        self._announce = announce
        self._reader, self._windows, self._decoder, self._transform = reader, windows, decoder, transform
        self._skip, self._cache = skip, frame_cache
        # Threads start out on device 0; this process may own another one.
        self._cuda = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._stream = torch.cuda.Stream(self._cuda) if decoder.device == "mixed" else None
        # Spare buffers: one being filled, `prefetch` waiting, one with the consumer; behind a frame cache every
        # worker fills some, two at a time.
        frames = sum(camera.height * camera.width * 3 for camera in decoder.cameras.values())
        spare = prefetch + 2 + (2 * workers if frame_cache else 0)
        self._ring = Ring(decoder.batch * frames, spare, pinned=self._cuda is not None)
        self._closed = threading.Event()
        node: BaseNode[Any] = Until(self._closed, source)
        node = ParallelMapper(node, self._stage("read", self._read), num_workers=workers)
        node = Mapper(node, self._stage("decode", self._decode))
        node = Mapper(node, self._stage("prepare", self._prepare))
        self._root: BaseNode[Any] | None = Prefetcher(node, prefetch)
        self._started = False
        self._failure: Failure | None = None

    def next(self) -> Batch:
        """The next batch. Raises StopIteration at the end of a finite source or when closed, and DataError or
        RuntimeError naming the stage in which a batch failed."""
        if self._failure is not None:
            self._failure.reraise()
        if self._root is None:
            raise StopIteration
        if not self._started:
            # torchdata's workers set torch's thread count to one, for every thread that has not used it yet.
            threads = torch.get_num_threads()
            self._root.reset()
            torch.set_num_threads(threads)
            self._started = True
            # A daemon thread inside the decoder would not survive the interpreter's end.
            atexit.register(self.close)
        item = next(self._root)
        if isinstance(item, Failure):
            self._failure = item
            self.close()
            item.reraise()
        if self._stream is not None:
            # Complete when it gets here; its memory must not go back to the decoding stream too early.
            for image in item.images.values():
                image.record_stream(torch.cuda.current_stream(self._cuda))
        return item

    def close(self) -> None:
        """End the threads, after the work under way: a decoder must not be torn down while it runs."""
        if self._root is None:
            return
        self._closed.set()
        if self._started:
            # At the end of their source torchdata's nodes end their threads. Dropping the nodes would do that
            # too, but an error that somebody still looks at keeps them alive.
            for _ in self._root:
                pass
            atexit.unregister(self.close)
        self._root = None

    def _stage(self, name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`function` as a node's work: its errors, and those of earlier stages, go on as a Failure."""

        def work(item: Any) -> Any:
            if self._closed.is_set():
                return None
            if isinstance(item, Failure):
                return item
            try:
                with torch.cuda.device(self._cuda) if self._cuda is not None else contextlib.nullcontext():
                    return function(item)
            except Exception as error:
                return Failure(name, error)

        return work

    def _read(self, request: Request) -> Encoded:
        if self._announce is not None:
            self._announce(request)
        rows = np.arange(len(request.sample)) if self._skip is None else np.flatnonzero(~self._skip(request.sample))
        samples = request.sample[rows]
        frames, lease = None, None
        missing: np.ndarray = np.arange(len(rows))
        if self._cache is not None and (cached := self._cache.has(samples)).any():
            frames, lease = self._host_buffers(len(rows))
            self._cache.read(samples[cached], np.flatnonzero(cached), frames)
            missing = np.flatnonzero(~cached)
        images = self._reader.read(samples[missing], list(self._decoder.cameras))
        columns, is_pad = self._windows.gather(request.sample)
        return Encoded(request, rows, missing, images, frames, lease, columns, is_pad)

    def _decode(self, encoded: Encoded) -> Batch:
        reader, request, rows = self._reader, encoded.request, encoded.image_rows
        if self._stream is None:
            images, lease = self._decode_on_host(encoded)
        else:
            images, lease = self._decode_on_device(encoded, self._stream), None
        tensor = torch.from_numpy
        return Batch(
            sample=tensor(request.sample),
            epoch=tensor(request.epoch),
            position=tensor(request.position),
            images=images,
            columns={key: tensor(rows) for key, rows in encoded.columns.items()},
            is_pad={key: tensor(rows) for key, rows in encoded.is_pad.items()},
            task=tensor(reader.task[request.sample]),
            episode=tensor(reader.episode[request.sample]),
            frame=tensor(reader.frame[request.sample]),
            index=tensor(reader.index[request.sample]),
            timestamp=tensor(reader.timestamp[request.sample]),
            image_rows=tensor(rows),
            lease=lease,
        )

    def _decode_on_host(self, encoded: Encoded) -> tuple[dict[str, torch.Tensor], Lease | None]:
        """The images of `image_rows`, camera → uint8 [b, H, W, 3], in a buffer of the ring."""
        missing, frames, lease = encoded.missing, encoded.frames, encoded.lease
        samples = encoded.request.sample[encoded.image_rows][missing]
        rows = None if frames is None else missing
        if frames is None:
            frames, lease = self._host_buffers(len(encoded.image_rows))
        if len(missing):
            self._decoder.decode(encoded.images, frames, lambda row: self._reader.locate(samples[row]), rows=rows)
            if self._cache is not None:
                self._cache.write(samples, missing, frames)
        return frames, lease

    def _decode_on_device(self, encoded: Encoded, stream: torch.cuda.Stream) -> dict[str, torch.Tensor]:
        """As `_decode_on_host`, on the device, where torch's allocator is the ring; complete on return."""
        missing, size = encoded.missing, len(encoded.image_rows)
        samples = encoded.request.sample[encoded.image_rows][missing]
        shapes = {name: (len(missing), c.height, c.width, 3) for name, c in self._decoder.cameras.items()}
        with torch.cuda.stream(stream):
            decoded = {
                name: torch.empty(shape, dtype=torch.uint8, device=stream.device) for name, shape in shapes.items()
            }
            if len(missing):
                self._decoder.decode(encoded.images, decoded, lambda row: self._reader.locate(samples[row]), stream)
                if self._cache is not None:
                    host = {name: image.cpu() for name, image in decoded.items()}
                    self._cache.write(samples, np.arange(len(missing)), host)
            if encoded.frames is None:
                return decoded
            place = torch.from_numpy(missing).to(stream.device)
            images = {name: frames.to(stream.device, non_blocking=True) for name, frames in encoded.frames.items()}
            if len(missing) < size:
                images = {name: image.index_copy_(0, place, decoded[name]) for name, image in images.items()}
            stream.synchronize()  # the buffer goes back now
            return images

    def _host_buffers(self, batch: int) -> tuple[dict[str, torch.Tensor], Lease]:
        """A buffer of the ring as camera → uint8 [batch, H, W, 3], uninitialised."""
        lease = self._ring.lease()
        images, used = {}, 0
        for name, camera in self._decoder.cameras.items():
            shape = (batch, camera.height, camera.width, 3)
            size = math.prod(shape)
            images[name] = lease.memory[used : used + size].view(shape)
            used += size
        return images, lease

    def _prepare(self, batch: Batch) -> Batch:
        if self._transform is not None:
            batch = dataclasses.replace(batch, extra=self._transform(batch))
        return batch.pin() if self._cuda is not None else batch
