"""Which job a directory of shards belongs to, and which process may write to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dataio.atomic import PARTIAL, write_bytes
from dataio.manifest import MANIFEST_NAME, Codec, DataError

JOB_NAME = "job.json"


class Part(NamedTuple):
    """Part `number` (from 1) of `parts` of a set's shards: every parts-th of them."""

    number: int
    parts: int

    def has(self, shard: int) -> bool:
        """Whether a shard belongs to this part."""
        return shard % self.parts == self.number - 1


def parse_part(text: str) -> Part:
    """"3/16" as the third part of sixteen. Raises DataError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise DataError(f"--part {text!r}: give the part's number, from 1, and how many there are, as in 3/16.")
    return Part(int(match[1]), int(match[2]))


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to shard. `name` is by default the dataset's; every frame is turned by `rotation` degrees; `map`
    renames features, see `features.rename`."""

    codec: Codec
    name: str | None = None
    samples_per_shard: int = 1024
    order: Literal["episode", "shuffled"] = "episode"
    rotation: Literal[0, 180] = 0
    map: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`job.json`: from what and how the shards of a directory are made. Only the same job may go on there."""

    dataset: str
    revision: str
    fingerprint: str
    options: Options


@contextlib.contextmanager
def claimed(out: Path, job: Job, part: Part | None) -> Iterator[None]:
    """Hold `out`, or a part of its shards, for this job and this process. Raises DataError when it is another's."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise DataError(f"{out}: is a file; --out needs a directory.") from None
    with contextlib.ExitStack() as locks:
        hold(locks, out, fcntl.LOCK_SH if part else fcntl.LOCK_EX, out)
        if part:
            path = out / f"part-{part.number}-of-{part.parts}.lock"
            path.touch()
            hold(locks, path, fcntl.LOCK_EX, out)
        _check_owner(out, job)
        for leftover in out.rglob("*" + PARTIAL):
            number = leftover.name.partition(".")[0]
            if leftover.is_file() and (part is None or (number.isdigit() and part.has(int(number)))):
                leftover.unlink()
        yield


def hold(locks: contextlib.ExitStack, path: Path, kind: int, out: Path) -> None:
    """Lock `path` until `locks` ends. Raises DataError when another process has it."""
    descriptor = os.open(path, os.O_RDONLY)
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{out}: another process is sharding into it. Wait for it, or stop it.") from None


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
    theirs, ours = (flattened(msgspec.to_builtins(j)) for j in (other, job))
    changes = [
        f"{key} {theirs.get(key)} there, {ours.get(key)} asked"
        for key in ours | theirs
        if theirs.get(key) != ours.get(key)
    ]
    if changes[0].startswith("fingerprint"):
        changes[0] = "the episodes selected, or the dataset's metadata"
    raise DataError(f"{out}: holds shards of another job: {'; '.join(changes)}. {advice}")


def flattened(tree: dict) -> dict[str, object]:
    """`tree` without its inner levels: leaves by their own key."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= flattened(value) if isinstance(value, dict) else {key: value}
    return leaves
