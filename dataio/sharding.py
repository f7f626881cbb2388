"""A LeRobot dataset to a shard set: plan, encode in worker processes, resume, and the manifest at the end.

The plan is a function of the metadata alone, so a run that is repeated finds the shards of the one before:
those that are complete are kept, the rest is made, and the bytes are those of a run that was never
interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from safetensors import safe_open

from dataio.atomic import PARTIAL, write_bytes
from dataio.encode import encode, psnr, squared_error
from dataio.frames import CorruptEpisode, EpisodeReader, first_images
from dataio.jobs import Meter, Silent, run_jobs
from dataio.manifest import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    Codec,
    Column,
    DataError,
    Episode,
    Manifest,
    Quarantined,
    Statistics,
    load_manifest,
    save_manifest,
)
from dataio.manifest import Source as SourceName
from dataio.shuffle import shuffle
from dataio.source import Source, Span, open_source
from dataio.writer import Record, Sample, read_record, shard_names, to_shards, writing_shard

JOB_NAME = "job.json"
STAGING = "episode-order" + PARTIAL
ENOUGH = 0.7  # of the estimated bytes; the estimate comes from one frame of each camera
EXTRA_BYTES = 3000  # of a sample beside its images: tar headers and padding, msgpack record, index
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to shard. `name` is by default the dataset's; every frame is turned by `rotation` degrees."""

    codec: Codec
    name: str | None = None
    samples_per_shard: int = 1024
    order: Literal["episode", "shuffled"] = "episode"
    rotation: Literal[0, 180] = 0


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`job.json`: from what and how the shards of a directory are made. Only the same job may go on there."""

    dataset: str
    revision: str
    fingerprint: str
    options: Options


class Outcome(msgspec.Struct, frozen=True):
    """What `shard_dataset` did. `psnr` is in dB over all pixels of all kept frames (inf for PNG).

    When the set `was_complete` before, nothing was read or written and `psnr` is None.
    """

    manifest: Manifest
    skipped: list[str]
    psnr: float | None
    was_complete: bool


class ShardJob(msgspec.Struct, frozen=True):
    """One shard to make: number `number` in `directory`, of all the episodes in `source.spans`."""

    directory: str
    number: int
    source: Source
    options: Options


def shard_dataset(
    dataset: str,
    out: Path | str,
    options: Options,
    episodes: str | None = None,
    workers: int = 1,
    meter: Meter | None = None,
) -> Outcome:
    """Shard a LeRobot dataset (directory or hub id) into the directory `out`; the same call again resumes.

    Raises DataError: a dataset that cannot be read (see `open_source`), an `out` that holds other shards, no
    room on the disk, or no episode left. Episodes with corrupt bytes are left out and named in the manifest.
    """
    _check(options, workers)
    meter = meter or Silent()
    out = Path(out)
    source = open_source(dataset, episodes)
    if options.name is None:
        options = msgspec.structs.replace(options, name=source.dataset.rpartition("/")[2])
    job = Job(source.dataset, source.revision, source.fingerprint, options)
    with _claimed(out, job):
        if (manifest := _finished(out)) is not None:
            return Outcome(manifest, source.skipped, None, was_complete=True)
        sample_bytes = EXTRA_BYTES + sum(len(encode(image, options.codec)) for image in first_images(source))
        total_bytes = sample_bytes * source.frames * (2 if options.order == "shuffled" else 1)
        _check_space(out, total_bytes)
        try:
            if options.order == "shuffled":
                staging = out / STAGING
                staging.mkdir(exist_ok=True)
                manifest, ratio = _write_episode_order(staging, source, options, workers, meter)
                manifest = shuffle(staging, out, options.samples_per_shard, workers, meter)
                save_manifest(out, manifest)
                shutil.rmtree(staging)
            else:
                manifest, ratio = _write_episode_order(out, source, options, workers, meter)
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise _no_space(out, total_bytes) from error
            raise
    return Outcome(manifest, source.skipped, ratio, was_complete=False)


def plan(spans: list[Span], samples_per_shard: int) -> list[list[Span]]:
    """Whole episodes per shard, in order; a shard is closed once it has `samples_per_shard` frames."""
    shards: list[list[Span]] = [[]]
    frames = 0
    for span in spans:
        if frames >= samples_per_shard:
            shards.append([])
            frames = 0
        shards[-1].append(span)
        frames += span.length
    return shards


def _check(options: Options, workers: int) -> None:
    if options.samples_per_shard < 1 or workers < 1:
        raise DataError(
            f"samples per shard ({options.samples_per_shard}) and workers ({workers}) must be 1 or more."
        )
    if options.rotation not in (0, 180):
        raise DataError(f"rotation {options.rotation}: frames can be turned by 0 or 180 degrees.")
    if options.order not in ("episode", "shuffled"):
        raise DataError(f"order {options.order!r} is unknown; use episode or shuffled.")


@contextlib.contextmanager
def _claimed(out: Path, job: Job) -> Iterator[None]:
    """Hold `out` for this job and this process. Raises DataError when it belongs to another one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise DataError(f"{out}: is a file; --out needs a directory.") from None
    lock = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{out}: another process is sharding into it. Wait for it, or stop it.") from None
        _check_owner(out, job)
        for leftover in out.rglob("*" + PARTIAL):
            if leftover.is_file():
                leftover.unlink()
        yield
    finally:
        os.close(lock)


def _check_owner(out: Path, job: Job) -> None:
    path = out / JOB_NAME
    advice = "Give another --out, or remove this directory to start over."
    if not path.exists():
        if (out / MANIFEST_NAME).exists() or any(out.glob("*.tar")):
            raise DataError(f"{out}: holds shards that this command did not make (no {JOB_NAME}). {advice}")
        write_bytes(path, msgspec.json.format(msgspec.json.encode(job), indent=1) + b"\n")
        return
    try:
        other = msgspec.json.decode(path.read_bytes(), type=Job)
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: not readable as a sharding job: {error}. {advice}") from None
    if other == job:
        return
    theirs, ours = (_flat(msgspec.to_builtins(j)) for j in (other, job))
    changes = [f"{key} {theirs[key]} there, {ours[key]} asked" for key in ours if theirs[key] != ours[key]]
    if changes[0].startswith("fingerprint"):
        changes[0] = "the episodes selected, or the dataset's metadata"
    raise DataError(f"{out}: holds shards of another job: {'; '.join(changes)}. {advice}")


def _flat(tree: dict) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value) if isinstance(value, dict) else {key: value}
    return flat


def _finished(out: Path) -> Manifest | None:
    """The manifest, if every file it lists is there with its size; else it is removed and the job resumes."""
    if not (out / MANIFEST_NAME).exists():
        return None
    with contextlib.suppress(DataError, FileNotFoundError):
        manifest = load_manifest(out)
        files = [(s.tar, s.tar_bytes) for s in manifest.shards] + [
            (s.index, s.index_bytes) for s in manifest.shards
        ]
        if all((out / name).stat().st_size == size for name, size in files):
            return manifest
    (out / MANIFEST_NAME).unlink()
    return None


def _missing_bytes(out: Path, total_bytes: int) -> int:
    return max(0, total_bytes - sum(path.stat().st_size for path in out.rglob("*.tar")))


def _check_space(out: Path, total_bytes: int) -> None:
    if shutil.disk_usage(out).free < ENOUGH * _missing_bytes(out, total_bytes):
        raise _no_space(out, total_bytes)


def _no_space(out: Path, total_bytes: int) -> DataError:
    free, needed = shutil.disk_usage(out).free, _missing_bytes(out, total_bytes)
    return DataError(
        f"{out}: not enough space on its file system: {free / 1e6:,.1f} MB free, about {needed / 1e6:,.1f} "
        "MB still needed. Make room and run the same command again (it resumes), or give another --out."
    )


def _write_episode_order(
    directory: Path, source: Source, options: Options, workers: int, meter: Meter
) -> tuple[Manifest, float]:
    """Make all shards in episode order, then the manifest; returns it with the PSNR of the stored images."""
    parts = plan(source.spans, options.samples_per_shard)
    jobs = [
        ShardJob(str(directory), number, msgspec.structs.replace(source, spans=spans), options)
        for number, spans in enumerate(parts)
    ]
    meter.stage("encoding", source.frames * len(source.cameras))
    records = run_jobs(make_shard, jobs, workers, meter)
    quarantined = [entry for record in records for entry in record.quarantined]
    bad = {entry.episode for entry in quarantined}
    if len(bad) == len(source.spans):
        raise DataError(
            f"{source.dataset}: not one of {len(bad)} episodes can be used. The first is episode "
            f"{quarantined[0].episode}: {quarantined[0].reason}"
        )
    shards = to_shards(records)
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        name=str(options.name),
        source=SourceName(source.dataset, source.revision, source.codebase_version, source.fingerprint),
        fps=source.fps,
        robot_type=source.robot_type,
        samples=sum(shard.samples for shard in shards),
        cameras=source.cameras,
        columns=source.columns,
        tasks=source.tasks,
        statistics=compute_statistics([directory / shard.index for shard in shards], source.columns),
        codec=options.codec,
        rotation=options.rotation,
        order="episode",
        episodes=[Episode(span.episode, span.length) for span in source.spans if span.episode not in bad],
        shards=shards,
        quarantined=quarantined,
    )
    save_manifest(directory, manifest)
    for record in records:
        if not record.samples:
            (directory / record.index).unlink()
    error, values = (sum(getattr(record, name) for record in records) for name in ("squared_error", "values"))
    return manifest, psnr(error, values)


def make_shard(job: ShardJob, meter: Meter) -> Record:
    """Make one shard, unless it is complete already."""
    directory, source = Path(job.directory), job.source
    record = read_record(directory, job.number)
    if record is not None:
        meter.advance(source.frames * len(source.cameras), 0)
        return record
    for name in reversed(shard_names(job.number)):
        (directory / name).unlink(missing_ok=True)
    reader = EpisodeReader(source)
    extension = job.options.codec.extension
    with writing_shard(directory, job.number, source.cameras, source.columns, extension) as shard:
        for span in source.spans:
            try:
                samples, error, values = _encode_episode(reader, span, job.options, meter)
            except CorruptEpisode as corrupt:
                shard.quarantined.append(Quarantined(span.episode, str(corrupt)))
                continue
            for sample in samples:
                shard.add(sample)
            shard.squared_error += error
            shard.values += values
    return shard.record


def _encode_episode(
    reader: EpisodeReader, span: Span, options: Options, meter: Meter
) -> tuple[list[Sample], int, int]:
    """All samples of an episode, with the squared error of its images and over how many values it is."""
    source = reader.source
    images: dict[str, list[bytes]] = {camera.name: [] for camera in source.cameras}
    error = values = 0
    try:
        rows = reader.rows(span)
        for camera in source.cameras:
            for frame in reader.frames(span, camera):
                if options.rotation == 180:
                    frame = np.ascontiguousarray(frame[::-1, ::-1])
                encoded = encode(frame, options.codec)
                error += squared_error(encoded, frame, options.codec)
                values += frame.size
                images[camera.name].append(encoded)
                meter.advance(1, len(encoded))
    except CorruptEpisode:
        meter.advance(span.length * len(images) - sum(map(len, images.values())), 0)
        raise
    samples = [
        Sample(
            index=int(rows.index[i]),
            episode=span.episode,
            frame=int(rows.frame[i]),
            task=int(rows.task[i]),
            prompt=source.tasks[rows.task[i]],
            timestamp=rows.timestamp[i],
            columns={key: column[i] for key, column in rows.columns.items()},
            images={name: encoded[i] for name, encoded in images.items()},
        )
        for i in range(span.length)
    ]
    return samples, error, values


def compute_statistics(indexes: list[Path], columns: list[Column]) -> dict[str, Statistics]:
    """Exact statistics of every column over all frames in the shards' indexes, in float64, per dimension.

    std is that of the population; quantiles interpolate linearly between the two nearest frames.
    """
    statistics = {}
    for column in columns:
        parts = []
        for path in indexes:
            with safe_open(path, framework="np") as file:
                parts.append(file.get_tensor(f"column.{column.key}"))
        values = np.concatenate(parts).astype(np.float64)
        q01, q99 = np.quantile(values, (0.01, 0.99), axis=0)
        statistics[column.key] = Statistics(
            mean=values.mean(axis=0).tolist(),
            std=values.std(axis=0).tolist(),
            min=values.min(axis=0).tolist(),
            max=values.max(axis=0).tolist(),
            q01=q01.tolist(),
            q99=q99.tolist(),
            count=len(values),
        )
    return statistics
