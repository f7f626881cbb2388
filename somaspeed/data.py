"""From the `[data]` section to what reads: the shard set, the order of its samples, the frame cache."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from dataio.decode import Device
from dataio.frame_cache import Place, frame_cache_place
from dataio.reader import ShardReader
from dataio.remote import is_remote, open_shards
from somaspeed.config import Config, ConfigError


def open_data(config: Config, shards: str) -> ShardReader:
    """The shard set of a run, local or behind a URL. Raises DataError when it is incomplete or not as its manifest."""
    cache = config.data.remote_cache or Path(config.output).parent / "shard_cache"
    return open_shards(shards, config.data.verify, cache, int(config.data.remote_cache_gb * 1e9))


def shards_in_flight(config: Config, reader: ShardReader, shards: str) -> int:
    """The loader's `block`: 0 for one permutation of all samples.

    Raises ConfigError for a global order over a URL, which would fetch a whole shard for every sample.
    """
    remote = is_remote(shards)
    if config.data.order == "global" and remote:
        raise ConfigError('data.order = "global" reads at random, which a URL cannot serve; use "block" or "auto".')
    large = sum(shard.tar_bytes for shard in reader.manifest.shards) > psutil.virtual_memory().total
    block = config.data.order == "block" or (config.data.order == "auto" and (remote or large))
    return config.data.shards_in_flight if block else 0


def frame_cache_place_of(config: Config, reader: ShardReader, cameras: list[str], device: Device) -> Place | None:
    """The frame cache that the configuration asks for, not opened yet; None for "off"."""
    if config.data.frame_cache == "off":
        return None
    directory = config.data.frame_cache_directory or Path(config.output).parent / "frame_cache"
    return frame_cache_place(reader, cameras, config.data.frame_cache, directory, device)


def decode_device(device: torch.device) -> Device:
    """Where frames are decoded for a run on `device`."""
    return "mixed" if device.type == "cuda" else "cpu"
