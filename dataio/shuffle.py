"""The frames of a finished shard set, copied in a random order to another set without encoding them again."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import numpy as np

from dataio.jobs import Meter, run_jobs
from dataio.manifest import Manifest, load_manifest
from dataio.reader import ShardReader
from dataio.writer import Record, Sample, read_record, shard_names, to_shards, writing_shard

SEED = 0


class ShuffleJob(msgspec.Struct, frozen=True):
    """One shard to make: number `number` in `out`, of the samples `ids` (int64) of the set in `staging`."""

    staging: str
    out: str
    number: int
    ids: np.ndarray


def shuffle(staging: Path, out: Path, samples_per_shard: int, workers: int, meter: Meter) -> Manifest:
    """Copy all samples of the set in `staging` to shards in `out` in a random order; returns their manifest.

    The order depends on the number of samples alone. Shards that are complete are kept. Raises DataError when
    a stored image does not match its CRC32.
    """
    manifest = load_manifest(staging)
    order = permutation(manifest.samples)
    jobs = [
        ShuffleJob(str(staging), str(out), number, order[first : first + samples_per_shard])
        for number, first in enumerate(range(0, manifest.samples, samples_per_shard))
    ]
    meter.stage("shuffling", manifest.samples * len(manifest.cameras))
    try:
        records = run_jobs(_copy_shard, jobs, workers, meter)
    finally:
        _open.cache_clear()
    return msgspec.structs.replace(manifest, order="shuffled", shards=to_shards(records))


def permutation(samples: int) -> np.ndarray:
    """A random permutation of [0, samples), int64, the same with every version of numpy."""
    return np.argsort(np.random.Philox(key=SEED).random_raw(samples), kind="stable")


@functools.lru_cache(maxsize=1)
def _open(staging: str) -> ShardReader:
    return ShardReader(staging, verify="size")


def _copy_shard(job: ShuffleJob, meter: Meter) -> Record:
    out = Path(job.out)
    reader = _open(job.staging)
    manifest = reader.manifest
    record = read_record(out, job.number)
    if record is not None:
        meter.advance(len(job.ids) * len(manifest.cameras), 0)
        return record
    for name in reversed(shard_names(job.number)):
        (out / name).unlink(missing_ok=True)
    with writing_shard(
        out, job.number, manifest.cameras, manifest.columns, manifest.codec.extension
    ) as shard:
        for i in job.ids.tolist():
            images = {camera.name: reader.encoded(i, camera.name).tobytes() for camera in manifest.cameras}
            shard.add(
                Sample(
                    index=int(reader.index[i]),
                    episode=int(reader.episode[i]),
                    frame=int(reader.frame[i]),
                    task=int(reader.task[i]),
                    prompt=manifest.tasks[reader.task[i]],
                    timestamp=reader.timestamp[i],
                    columns={key: values[i] for key, values in reader.columns.items()},
                    images=images,
                )
            )
            meter.advance(len(images), sum(map(len, images.values())))
    return shard.record
