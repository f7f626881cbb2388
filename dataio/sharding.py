"""A LeRobot dataset to a shard set: plan, encode in worker processes, resume, and the manifest at the end.

The plan is a function of the metadata alone, so a run that is repeated finds the shards of the one before:
those that are complete are kept, the rest is made, and the bytes are those of a run that was never
interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

import msgspec
import numpy as np

from dataio.atomic import PARTIAL, alone
from dataio.claim import Job, Options, Part, claimed
from dataio.encode import encode, psnr, squared_error
from dataio.frames import CorruptEpisode, EpisodeReader, first_images
from dataio.jobs import Meter, Silent, run_jobs
from dataio.manifest import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    DataError,
    Episode,
    Manifest,
    Quarantined,
    load_manifest,
    save_manifest,
)
from dataio.manifest import Source as SourceName
from dataio.shuffle import shuffle
from dataio.source import Source, Span, open_source
from dataio.statistics import compute_statistics
from dataio.writer import Record, Sample, read_record, shard_names, to_shards, writing_shard

CONVERTED = ".converted"  # beside the output: datasets of version 2.1 as version 3
STAGING = "episode-order" + PARTIAL
ENOUGH = 0.7  # of the estimated bytes; the estimate comes from one frame of each camera
EXTRA_BYTES = 3000  # of a sample beside its images: tar headers and padding, msgpack record, index
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Outcome(msgspec.Struct, frozen=True):
    """What `shard_dataset` did. `psnr` is in dB over all pixels of all kept frames (inf for PNG).

    When the set `was_complete` before, nothing was read or written and `psnr` is None. `manifest` is None after a part
    while `shards_left` shards of other parts are not there yet; `renamed` maps new keys to the dataset's.
    """

    manifest: Manifest | None
    skipped: list[str]
    psnr: float | None
    was_complete: bool
    shards_left: int = 0
    renamed: dict[str, str] = {}


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
    part: Part | None = None,
) -> Outcome:
    """Shard a LeRobot dataset (directory or hub id) into the directory `out`; the same call again resumes.

    With `part` only that part of the shards is made, by this process; parts may run anywhere at any time. Whoever
    finds all shards complete at its end writes the manifest, as the same call without `part` does.
    Raises DataError: a dataset that cannot be read (see `open_source`), an `out` that holds other shards, no
    room on the disk, or no episode left. Episodes with corrupt bytes are left out and named in the manifest.
    """
    _check(options, workers, part)
    meter = meter or Silent()
    out = Path(out)
    source = open_source(dataset, episodes, options.map, out.absolute().parent / CONVERTED)
    if options.name is None:
        options = msgspec.structs.replace(options, name=source.dataset.rpartition("/")[2])
    job = Job(source.dataset, source.revision, source.fingerprint, options)
    with claimed(out, job, part):
        if (manifest := _finished(out)) is not None:
            return Outcome(manifest, source.skipped, None, was_complete=True, renamed=source.renamed)
        sample_bytes = EXTRA_BYTES + sum(len(encode(image, options.codec)) for image in first_images(source))
        frames = sum(span.length for number, spans in shards_of(source, options, part) for span in spans)
        total_bytes = sample_bytes * frames * (2 if options.order == "shuffled" else 1)
        _check_space(out, total_bytes, part)
        try:
            if options.order == "shuffled":
                staging = out / STAGING
                staging.mkdir(exist_ok=True)
                staged = _write_episode_order(staging, source, options, workers, meter)
                manifest = shuffle(staging, out, options.samples_per_shard, workers, meter)
                save_manifest(out, manifest)
                shutil.rmtree(staging)
                return msgspec.structs.replace(staged, manifest=manifest)
            return _write_episode_order(out, source, options, workers, meter, part)
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise _no_space(out, total_bytes, part) from error
            raise


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


def shards_of(source: Source, options: Options, part: Part | None) -> list[tuple[int, list[Span]]]:
    """Number and episodes of every shard, or of the part's."""
    shards = enumerate(plan(source.spans, options.samples_per_shard))
    return [(number, spans) for number, spans in shards if part is None or part.has(number)]


def _check(options: Options, workers: int, part: Part | None) -> None:
    if part and options.order == "shuffled":
        raise DataError("--part makes shards in episode order; --order shuffled needs all of them in one job.")
    if options.samples_per_shard < 1 or workers < 1:
        raise DataError(
            f"samples per shard ({options.samples_per_shard}) and workers ({workers}) must be 1 or more."
        )
    if options.rotation not in (0, 180):
        raise DataError(f"rotation {options.rotation}: frames can be turned by 0 or 180 degrees.")
    if options.order not in ("episode", "shuffled"):
        raise DataError(f"order {options.order!r} is unknown; use episode or shuffled.")


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


def _missing_bytes(out: Path, total_bytes: int, part: Part | None) -> int:
    tars = [path for path in out.rglob("*.tar") if part is None or part.has(int(path.stem))]
    return max(0, total_bytes - sum(path.stat().st_size for path in tars))


def _check_space(out: Path, total_bytes: int, part: Part | None) -> None:
    if shutil.disk_usage(out).free < ENOUGH * _missing_bytes(out, total_bytes, part):
        raise _no_space(out, total_bytes, part)


def _no_space(out: Path, total_bytes: int, part: Part | None) -> DataError:
    free, needed = shutil.disk_usage(out).free, _missing_bytes(out, total_bytes, part)
    return DataError(
        f"{out}: not enough space on its file system: {free / 1e6:,.1f} MB free, about {needed / 1e6:,.1f} "
        "MB still needed. Make room and run the same command again (it resumes), or give another --out."
    )


def _write_episode_order(
    directory: Path, source: Source, options: Options, workers: int, meter: Meter, part: Part | None = None
) -> Outcome:
    """Make the shards in episode order, then the manifest once all are there."""
    jobs = [
        ShardJob(str(directory), number, msgspec.structs.replace(source, spans=spans), options)
        for number, spans in shards_of(source, options, part)
    ]
    meter.stage("encoding", sum(job.source.frames for job in jobs) * len(source.cameras))
    records = run_jobs(make_shard, jobs, workers, meter)
    done = Outcome(None, source.skipped, _psnr(records), was_complete=False, renamed=source.renamed)
    if part is None:
        return msgspec.structs.replace(done, manifest=_write_manifest(directory, source, options, records))
    with alone(directory / "merge.lock"):
        if (manifest := _finished(directory)) is not None:
            return msgspec.structs.replace(done, manifest=manifest)
        numbers = range(len(plan(source.spans, options.samples_per_shard)))
        absent = [number for number in numbers if not (directory / shard_names(number)[1]).exists()]
        if absent:
            return msgspec.structs.replace(done, shards_left=len(absent))
        found = [read_record(directory, number) for number in numbers]
        complete = [record for record in found if record is not None]
        if len(complete) < len(found):
            return msgspec.structs.replace(done, shards_left=len(found) - len(complete))
        manifest = _write_manifest(directory, source, options, complete)
        return msgspec.structs.replace(done, manifest=manifest, psnr=_psnr(complete))


def _psnr(records: list[Record]) -> float:
    """Of all stored images, in dB."""
    error, values = (sum(getattr(record, name) for record in records) for name in ("squared_error", "values"))
    return psnr(error, values)


def _write_manifest(directory: Path, source: Source, options: Options, records: list[Record]) -> Manifest:
    """Write and return the manifest of all shards, with exact statistics over them."""
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
    return manifest


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
