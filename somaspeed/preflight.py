"""The preflight: what will be trained on what, and whether it fits, before weights are read."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from dataio.blocks import describe
from dataio.manifest import DataError, Manifest
from dataio.reader import ShardReader
from dataio.slots import free_bytes
from somaspeed.cache import ADVICE
from somaspeed.config import Config
from somaspeed.data import decode_device, frame_cache_place_of
from somaspeed.policies.base import Policy
from somaspeed.prefix import cache_place


def report(
    config: Config, reader: ShardReader, policy: Policy, samples: np.ndarray, held_out: int, block: int, ranks: int
) -> None:
    """Print data, mapping, ranges and batch arithmetic of a run on the training `samples` (ids).

    Raises DataError for statistics that are not finite, a full disk, and caches that do not fit.
    """
    training = len(samples)
    manifest, console = reader.manifest, Console(highlight=False, soft_wrap=True)
    check_statistics(manifest)
    check_disk(Path(config.output))
    model = config.model
    weights = model.path or f"random, seed {config.training.seed}"
    console.print(f"policy   {model.name} ({model.size}, {model.dtype}), weights: {weights}")
    console.print(
        f"shards   {manifest.name}: {manifest.samples} samples, {len(manifest.episodes)} episodes, "
        f"{len(np.unique(reader.task))} tasks, {manifest.fps:g} fps, {manifest.codec.name}, "
        f"rotated {manifest.rotation}° while sharding"
    )
    if manifest.quarantined:
        console.print(f"         {len(manifest.quarantined)} episode(s) were quarantined while sharding")
    accumulation = config.accumulation(ranks)
    total = config.training.microbatch * ranks * accumulation
    epochs = config.training.steps * total / training
    console.print(
        f"batch    {config.training.microbatch} × {ranks} rank(s) × {accumulation} = {total}; {training} training "
        f"samples, {held_out} held out; {config.training.steps} steps = {epochs:.1f} epochs"
    )
    if total > training:
        console.print("         the batch is larger than the data: samples repeat within it")
    seed = config.training.seed
    shuffled = describe(reader, samples, block, seed, total) if block else "one permutation of all samples per epoch"
    console.print(f"order    {shuffled}")
    for line in check_room(config, reader, policy):
        console.print(f"room     {line}")
    for camera, key in zip(policy.cameras, policy.lerobot_config.image_features, strict=False):
        shape = manifest.camera(camera)
        console.print(f"camera   {camera} ({shape.height}×{shape.width}) → {key}")
    for key, offsets in policy.windows.items():
        seconds = len(offsets) / manifest.fps
        console.print(f"chunk    {key}: {len(offsets)} steps = {seconds:.1f} s at {manifest.fps:g} fps")
        longest = max(episode.length for episode in manifest.episodes)
        if len(offsets) > longest:
            console.print(f"         longer than every episode (at most {longest} frames): every chunk ends in padding")
    console.print(ranges(manifest))


def ranges(manifest: Manifest) -> Table:
    """The range of every dimension of every column, with the 1 % and 99 % quantiles."""
    table = Table(box=None, pad_edge=False)
    for title in ("column", "dim", "min", "q01", "mean", "q99", "max"):
        table.add_column(title, justify="left" if title == "column" else "right")
    for key, s in manifest.statistics.items():
        for dim, values in enumerate(zip(s.min, s.q01, s.mean, s.q99, s.max, strict=True)):
            table.add_row(key if dim == 0 else "", str(dim), *(f"{value:.4g}" for value in values))
    return table


def check_statistics(manifest: Manifest) -> None:
    """Raise DataError when a column has no statistics, or some that are not finite or not ordered."""
    for column in manifest.columns:
        statistics = manifest.statistics.get(column.key)
        if statistics is None:
            raise DataError(f"column {column.key!r} has no statistics in the manifest; shard the dataset again.")
        for dim in range(len(statistics.mean)):
            low, q01, q99, high = (getattr(statistics, name)[dim] for name in ("min", "q01", "q99", "max"))
            numbers = (low, q01, q99, high, statistics.mean[dim], statistics.std[dim])
            if not all(map(math.isfinite, numbers)) or not low <= q01 <= q99 <= high:
                raise DataError(
                    f"column {column.key!r}, dimension {dim}: statistics {numbers} are not finite and ordered; "
                    "the source dataset holds bad values there."
                )


def check_room(config: Config, reader: ShardReader, policy: Policy) -> list[str]:
    """What the run needs beside its output, a line each. Raises DataError, with the numbers, when it is not there."""
    manifest = reader.manifest
    frame_bytes = sum(c.height * c.width * 3 for c in (manifest.camera(name) for name in policy.cameras))
    buffers = (config.data.prefetch + 2) * config.training.microbatch * frame_bytes
    free = psutil.virtual_memory().available
    if buffers > free:
        raise DataError(
            f"the loader's buffers take {buffers / 1e9:.2f} GB of memory per rank and {free / 1e9:.2f} GB are free; "
            "lower training.microbatch or data.prefetch."
        )
    lines = [f"{buffers / 1e9:.2f} GB of host memory per rank for the loader's buffers, {free / 1e9:.1f} GB are free"]
    if config.prefix.cache != "off":
        lines.append(check_prefix_cache(config, policy, len(reader)))
    if config.model.path and (stored := stored_bytes(Path(config.model.path).expanduser())):
        free = free_bytes(Path(config.output))
        if 2 * stored > free:  # one while it is written, beside the one before
            raise DataError(
                f"a checkpoint takes at least {stored / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free for "
                f"{config.output}; set output to another disk."
            )
        lines.append(
            f"{stored / 1e9:.2f} GB and the optimizer's state for every checkpoint, {free / 1e9:.1f} GB are free"
        )
    place = frame_cache_place_of(config, reader, policy.cameras, decode_device(policy.device))
    if place:
        place.check_room()
        lines.append(f"{place.samples * place.slot_bytes / 1e9:.2f} GB for the frame cache in {place.root}")
    return lines


def check_prefix_cache(config: Config, policy: Policy, samples: int) -> str:
    """The size of the prefix cache, in words. Raises PolicyError when the recipe rules one out, and DataError when it
    does not fit beside what is there already.
    """
    root, slot, dtype = cache_place(config, policy)
    needed = samples * math.prod(slot.shape) * dtype.itemsize
    present = sum(file.stat().st_blocks * 512 for file in root.glob("*/slots.bin"))
    free = free_bytes(root)
    text = f"{needed / 1e9:.2f} GB for the prefix cache in {root}, {free / 1e9:.1f} GB are free"
    if needed > present + free:
        raise DataError(f"prefix.cache: {samples} slots of {needed / samples / 1e6:.2f} MB need {text}. {ADVICE}")
    return text


def stored_bytes(checkpoint: Path) -> int:
    """The size of the weights in a local checkpoint directory; 0 where there is none."""
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def check_disk(output: Path) -> None:
    """Raise DataError when the file system of `output` is full."""
    existing = output.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < 64 << 20:
        raise DataError(f"{existing}: only {free >> 20} MiB free, checkpoints need more; set output to another disk.")
