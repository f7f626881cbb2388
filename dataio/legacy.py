"""LeRobot v2.1 datasets: converted by LeRobot's own converter into a cache, the original untouched."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path

import msgspec

from dataio.atomic import PARTIAL, alone, write_bytes
from dataio.manifest import DataError

INFO = "meta/info.json"
LEGACY_VERSION = "v2.1"


def is_legacy(root: Path) -> bool:
    """Whether the dataset in `root` is of version 2."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, AttributeError):
        return str(msgspec.json.decode((root / INFO).read_bytes()).get("codebase_version")).startswith("v2")
    return False


def converted(root: Path, name: str, cache: Path | None) -> Path:
    """The v3 copy of the v2.1 dataset in `root`, made in `cache` where there is none yet.

    Raises DataError for another version 2, for no `cache`, and when LeRobot's converter fails.
    """
    info = msgspec.json.decode((root / INFO).read_bytes())
    if cache is None:
        version = info["codebase_version"]
        raise DataError(f"{root}: LeRobot format {version}; scripts/shard_dataset.py converts it while sharding.")
    if info["codebase_version"] != LEGACY_VERSION:
        raise DataError(
            f"{root}: LeRobot format {info['codebase_version']}; v3 and {LEGACY_VERSION} are read. Convert it to "
            f"{LEGACY_VERSION} with the LeRobot release that has that converter."
        )
    target = cache / f"{name.replace('/', '--')}-{fingerprint(root)}"
    cache.mkdir(parents=True, exist_ok=True)
    with alone(cache):
        if not target.is_dir():
            work = cache / f"{target.name}{PARTIAL}"
            shutil.rmtree(work, ignore_errors=True)  # links only: of a run that was interrupted
            convert(root, work / target.name)
            fps = info["fps"]
            new = msgspec.json.decode((work / target.name / INFO).read_bytes())
            if new["fps"] != fps:  # the converter cuts it to a whole number
                write_bytes(work / target.name / INFO, msgspec.json.encode(new | {"fps": fps}))
            (work / target.name).rename(target)
            shutil.rmtree(work)
    return target


def fingerprint(root: Path) -> str:
    """A hash of the metadata and of every file's name and size."""
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        if path.is_relative_to(root / "meta"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def convert(root: Path, target: Path) -> None:
    """Convert `root` to `target`. The converter moves what it is given, so it is given links."""
    from lerobot.scripts.convert_dataset_v21_to_v30 import convert_dataset

    target.mkdir(parents=True)
    for entry in root.iterdir():
        (target / entry.name).symlink_to(entry.resolve())
    try:
        convert_dataset(repo_id=f"local/{target.name}", root=target, push_to_hub=False)
    except Exception as error:  # the converter checks little: bad metadata surfaces as any kind of error
        raise DataError(
            f"{root}: LeRobot's converter from {LEGACY_VERSION} to v3 failed: {type(error).__name__}: {error}. "
            "Download the dataset again, or leave it to its publisher to convert."
        ) from error
