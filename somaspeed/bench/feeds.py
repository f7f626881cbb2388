"""What feeds a trainer with frames, ours and others', each as a function that delivers one batch per call.

Every feed delivers the cameras as uint8 at source size where it can, so that the same work is compared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torchdata.nodes import Mapper, Prefetcher

from dataio.atomic import PARTIAL
from dataio.decode import Decoder, Device, run
from dataio.frame_cache import open_frame_cache
from dataio.loader import Loader
from dataio.manifest import DataError
from dataio.order import Stream
from dataio.reader import ShardReader
from dataio.stages import OrderNode
from dataio.windows import Windows

CHUNK = 50  # action steps of a sample
READ_AHEAD = 8  # encoded batches kept in memory for the decoding ceiling
Feed = Callable[[], int]  # delivers a batch, returns how many samples it held


class Task(msgspec.Struct, frozen=True):
    """What every feed of a comparison is given. `samples`: how many of the set's first samples take part."""

    shards: str
    samples: int
    batch: int
    workers: int
    device: Device
    scratch: str

    def reader(self) -> ShardReader:
        return ShardReader(self.shards, verify="size")


def windows(reader: ShardReader) -> dict[str, list[int]]:
    """An action chunk, where the set has actions."""
    return {"action": list(range(CHUNK))} if "action" in reader.columns else {}


def loader(task: Task, reader: ShardReader, **options: Any) -> Loader:
    """Our loader over the task's samples, all cameras."""
    return Loader(
        reader, range(task.samples), windows(reader), None, seed=0, microbatch=task.batch, workers=task.workers,
        device=task.device, **options,
    )  # fmt: skip


@contextlib.contextmanager
def somaspeed(task: Task) -> Iterator[Feed]:
    """Our loader, decoding."""
    with loader(task, task.reader()) as batches:
        yield lambda: len(next(batches))


@contextlib.contextmanager
def frame_cache(task: Task) -> Iterator[Feed]:
    """Our loader behind a full frame cache."""
    reader = task.reader()
    cache = open_frame_cache(reader, None, "disk", Path(task.scratch) / "frame_cache", task.device)
    with contextlib.closing(cache), loader(task, reader, frame_cache=cache) as batches:
        for _ in range(-(-task.samples // task.batch)):
            next(batches)
        yield lambda: len(next(batches))


@contextlib.contextmanager
def headspace(task: Task) -> Iterator[Feed]:
    """One cached batch through our order and queue, again and again: the rate if reading and decoding were free."""
    with loader(task, task.reader()) as batches:
        batch = next(batches)
    source = OrderNode(Stream(task.samples, 0), np.arange(task.samples), task.batch, 0, 1, 0)
    node: Prefetcher[Any] = Prefetcher(Mapper(source, lambda request: batch), 2)
    node.reset()
    yield lambda: len(next(node))


@contextlib.contextmanager
def decode(task: Task) -> Iterator[Feed]:
    """The decoder alone, with our threads, on batches already read, its output left where it is."""
    reader = task.reader()
    cameras = reader.manifest.cameras
    decoder = Decoder(cameras, task.batch, max(1, task.workers), task.device)
    names = [camera.name for camera in cameras]
    stream = Stream(task.samples, 0)
    batches = [reader.read(stream.at(k * task.batch, task.batch)[2], names) for k in range(READ_AHEAD)]
    turns = itertools.cycle(batches)

    def feed() -> int:
        run(cast(Any, decoder._pipeline), next(turns))
        return task.batch

    yield feed


@contextlib.contextmanager
def read(task: Task) -> Iterator[Feed]:
    """Reading alone: encoded bytes with their checksums verified, and the columns."""
    reader = task.reader()
    gather, stream = Windows(reader, windows(reader)).gather, Stream(task.samples, 0)
    names = [camera.name for camera in reader.manifest.cameras]
    starts = itertools.count(0, task.batch)

    def feed() -> int:
        ids = stream.at(next(starts), task.batch)[2]
        reader.read(ids, names)
        gather(ids)
        return len(ids)

    yield feed


def lerobot_dataset(task: Task, video: bool) -> Path:
    """The task's frames as a LeRobot dataset of its default encoding, written once into the scratch directory."""
    import av
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from dataio.export import frame_of, lerobot_features

    av.logging.set_level(av.logging.ERROR)
    root = Path(task.scratch) / ("lerobot_video" if video else "lerobot_image")
    if root.exists():
        return root
    reader = task.reader()
    features = lerobot_features(reader.manifest)
    for camera in reader.manifest.cameras:
        features[camera.key]["dtype"] = "video" if video else "image"
    temporary = root.with_name(root.name + PARTIAL)
    fps: Any = round(reader.manifest.fps)
    dataset = LeRobotDataset.create("bench/frames", fps, features, root=temporary, use_videos=video)
    order = np.lexsort((reader.frame[: task.samples], reader.episode[: task.samples]))
    for episode in dict.fromkeys(reader.episode[order].tolist()):
        for row in order[reader.episode[order] == episode].tolist():
            dataset.add_frame(frame_of(reader, row))
        dataset.save_episode(parallel_encoding=False)  # its processes take longer to start than these videos to encode
    dataset.finalize()
    temporary.rename(root)
    return root


@contextlib.contextmanager
def lerobot(task: Task, video: bool) -> Iterator[Feed]:
    """LeRobot's dataset through PyTorch's loader, as its trainer reads it, but uint8 instead of float.

    Of the image kind it would decode every image of the action chunk's rows, so that one goes without a chunk.
    """
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from torch.utils.data import DataLoader, RandomSampler

    root = lerobot_dataset(task, video)
    chunk = {"action": [step / round(task.reader().manifest.fps) for step in range(CHUNK)]} if video else None
    dataset: Any = LeRobotDataset("bench/frames", root=root, delta_timestamps=chunk, return_uint8=True)
    forever = RandomSampler(dataset, replacement=True, num_samples=2**40)
    yield from torch_batches(DataLoader(dataset, task.batch, sampler=forever, num_workers=task.workers))


@contextlib.contextmanager
def webdataset(task: Task) -> Iterator[Feed]:
    """The same tars through plain webdataset and PIL, uint8, in the order stored; no chunk."""
    import webdataset as wds

    reader = task.reader()
    tars = [str(reader.directory / shard.tar) for shard in reader.manifest.shards]
    fields = [f"{camera.name}.{reader.manifest.codec.extension}" for camera in reader.manifest.cameras]
    dataset = wds.WebDataset(tars, shardshuffle=False, nodesplitter=wds.split_by_node, empty_check=False)
    dataset = dataset.decode("rgb8", wds.handle_extension("msgpack", msgspec.msgpack.decode))
    dataset = dataset.to_tuple(*fields, "frame.msgpack").map(webdataset_sample).batched(task.batch).repeat(2**40)
    yield from torch_batches(wds.WebLoader(dataset, batch_size=None, num_workers=min(task.workers, len(tars))))


def webdataset_sample(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays of one sample: its images, then its columns as float32 vectors."""
    *images, record = parts
    columns = [np.asarray(value, np.float32) for value in record.values() if isinstance(value, list)]
    return (*images, *columns)


def torch_batches(batches: Any) -> Iterator[Feed]:
    """A PyTorch loader as a feed."""
    iterator = iter(batches)

    def size(batch: Any) -> int:
        values = batch.values() if isinstance(batch, dict) else batch
        return next(len(value) for value in values if isinstance(value, torch.Tensor | np.ndarray))

    yield lambda: size(next(iterator))


OURS: dict[str, Callable[[Task], contextlib.AbstractContextManager[Feed]]] = {
    "somaspeed": somaspeed,
    "decode": decode,
    "read": read,
    "frame_cache": frame_cache,
    "headspace": headspace,
}
PEERS: dict[str, Callable[[Task], contextlib.AbstractContextManager[Feed]]] = {
    "lerobot-video": lambda task: lerobot(task, video=True),
    "lerobot-image": lambda task: lerobot(task, video=False),
    "webdataset": webdataset,
}


def open_feed(name: str, task: Task) -> contextlib.AbstractContextManager[Feed]:
    """The feed called `name`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("SVT_LOG", "1")  # the video encoder's errors only
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", "Cannot enable progress bars")
    torch.set_num_threads(1)
    return (OURS | PEERS)[name](task)


def samples_of_first_episodes(reader: ShardReader, frames: int) -> int:
    """How many of the set's first samples make whole shards of at least `frames` frames (or all there are)."""
    if reader.manifest.order != "episode":
        raise DataError(f"{reader.directory}: shards in shuffled order; compare on a set in episode order.")
    ends = [shard.first + shard.samples for shard in reader.manifest.shards]
    return next((end for end in ends if end >= frames), len(reader))
