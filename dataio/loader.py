"""The loader: a shard set in, an endless stream of decoded batches out, stopped and resumed anywhere."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dataio.batch import Batch
from dataio.blocks import BlockStream
from dataio.decode import Decoder, Device
from dataio.frame_cache import FrameCache
from dataio.manifest import DataError
from dataio.order import Stream
from dataio.reader import ShardReader, sample_ids
from dataio.stages import OrderNode, Request, SequenceNode, Skip, Stages, Transform
from dataio.windows import Windows


class Loader:
    """An endless iterator of one rank's micro-batches; epochs follow each other without a seam.

    Which samples a global batch holds depends on the samples and the seed alone, not on ranks, workers or
    prefetch. The state counts delivered batches, in samples of all ranks together, so it may be loaded at
    another number of ranks or another micro-batch; what was prefetched but not delivered is read again.
    """

    def __init__(
        self,
        reader: ShardReader,
        samples: Iterable[int] | None,
        windows: Mapping[str, Sequence[int]],
        cameras: Sequence[str] | None,
        seed: int,
        microbatch: int,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 2,
        prefetch: int = 2,
        device: Device = "cpu",
        transform: Transform | None = None,
        skip: Skip | None = None,
        frame_cache: FrameCache | None = None,
        block: int = 0,
    ):
        """
        samples: the ids to train on (None: all); the order runs over these.
        windows: column key → distances in frames, see `Windows`; other columns come as single rows.
        cameras: names of the cameras to decode (None: all).
        microbatch: samples per batch. One optimizer step of one rank takes as many batches as it accumulates.
        workers: threads that read, and threads that decode on the host; 0 reads in the prefetching thread.
        prefetch: finished batches kept waiting, at least 1.
        device: where images are decoded, "cpu" or "mixed" (the current CUDA device).
        transform: called with each batch in the background, returns what becomes `Batch.extra` (a dict).
        skip: says which samples need no image.
        frame_cache: of the same cameras and device; decoded frames are kept there and read from there.
        block: 0 permutes all samples at once; above it, the block-shuffled order with so many shards in flight.
        Raises DataError for unknown cameras, columns and samples, and for numbers that make no sense.
        """
        if not 0 <= rank < ranks:
            raise DataError(f"rank {rank} of {ranks} ranks: it must lie in [0, {ranks}).")
        self._samples = sample_ids(reader, samples)
        if block < 0:
            raise DataError(f"block must be the number of shards in flight, or 0, got {block}")
        self._reader, self._seed, self._block = reader, seed, block
        shards = reader.shard_of(self._samples) if block else None
        self._order = Stream(len(self._samples), seed) if shards is None else BlockStream(shards, block, seed)
        self._microbatch, self._rank, self._ranks = microbatch, rank, ranks
        self._chain = _chain(
            reader, windows, cameras, microbatch, workers, prefetch, device, transform, skip, frame_cache
        )
        self._position = 0
        self._stages: Stages | None = None
        self._end: weakref.finalize | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch. Where one fails: DataError or RuntimeError naming the stage, from then on."""
        if self._stages is None:
            self._stages = self._chain(
                OrderNode(
                    self._order, self._samples, self._microbatch, self._rank, self._ranks, self._position
                ),
                announce=_announcer(self._reader, self._order),
            )
            self._end = weakref.finalize(self, self._stages.close)
        try:
            batch = self._stages.next()
        except StopIteration:
            raise RuntimeError("the loader was closed; load_state_dict opens it again.") from None
        self._position += self._ranks * self._microbatch
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch of all ranks begins: `epoch`, `position` in it, and what these refer to
        (`samples` per epoch, `seed`, `block` where there is one). The same on every rank that has taken as many
        batches."""
        epoch, position = divmod(self._position, len(self._samples))
        state = {"epoch": epoch, "position": position, "samples": len(self._samples), "seed": self._seed}
        return state | ({"block": self._block} if self._block else {})

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`, reading nothing before it. Raises DataError when it is of another order."""
        for key, mine in (("samples", len(self._samples)), ("seed", self._seed), ("block", self._block)):
            if state.get(key, 0) != mine:
                raise DataError(
                    f"the loader's saved state is of an order with {key} {state.get(key, 0)}, this one has {key} "
                    f"{mine}: resume with the shards, held-out episodes and seed of the run that saved it."
                )
        self.close()
        self._position = state["epoch"] * state["samples"] + state["position"]
        self._stages = None

    def close(self) -> None:
        """End the background threads. Batches that were delivered stay valid."""
        if self._end is not None:
            self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def batches(
    reader: ShardReader,
    samples: Iterable[int] | None,
    windows: Mapping[str, Sequence[int]],
    cameras: Sequence[str] | None,
    microbatch: int,
    workers: int = 2,
    prefetch: int = 2,
    device: Device = "cpu",
    transform: Transform | None = None,
    frame_cache: FrameCache | None = None,
) -> Iterator[Batch]:
    """Each of `samples` (ids; None: all) exactly once, in the order given: for evaluation.

    The last batch may be smaller. Every sample's `epoch` is 0 and its `position` the place in `samples`. The
    other arguments and the errors are those of `Loader`.
    """
    ids = sample_ids(reader, samples)
    chain = _chain(reader, windows, cameras, microbatch, workers, prefetch, device, transform, None, frame_cache)
    return _drain(chain(SequenceNode(ids, microbatch)))


def _drain(stages: Stages) -> Iterator[Batch]:
    try:
        while True:
            try:
                batch = stages.next()
            except StopIteration:
                return
            yield batch
    finally:
        stages.close()


def _announcer(reader: ShardReader, order: Stream | BlockStream) -> Callable[[Request], None] | None:
    """Tells the reader which shards a request and those after it need; a function that does not hold the loader."""
    if not isinstance(order, BlockStream):
        return None
    return lambda request: reader.keep(*order.around(int(request.epoch[0]), int(request.position[0])))


def _chain(
    reader: ShardReader,
    windows: Mapping[str, Sequence[int]],
    cameras: Sequence[str] | None,
    microbatch: int,
    workers: int,
    prefetch: int,
    device: Device,
    transform: Transform | None,
    skip: Skip | None,
    frame_cache: FrameCache | None,
) -> Callable[..., Stages]:
    """Check the arguments, make what lasts; returns a function from a source node to its stages."""
    for name, value, least in (
        ("microbatch", microbatch, 1),
        ("workers", workers, 0),
        ("prefetch", prefetch, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise DataError(f"{name} must be a whole number of at least {least}, got {value!r}")
    manifest = reader.manifest
    wanted = manifest.cameras if cameras is None else [manifest.camera(name) for name in cameras]
    if frame_cache is not None and list(frame_cache.cameras) != [camera.name for camera in wanted]:
        raise DataError(f"the frame cache is of cameras {list(frame_cache.cameras)}, not of those asked for.")
    decoder = Decoder(wanted, microbatch, max(1, workers), device)
    return functools.partial(
        Stages,
        reader=reader,
        windows=Windows(reader, windows),
        decoder=decoder,
        workers=workers,
        prefetch=prefetch,
        transform=transform,
        skip=skip,
        frame_cache=frame_cache,
    )
