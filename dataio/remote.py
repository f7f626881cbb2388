"""Shard sets behind a URL: whole shards, fetched ahead into a bounded disk cache and checked by their sha256.

    <cache>/<set>/manifest.json, *.index.safetensors   fetched when the set is opened
    <cache>/<set>/<sha256>.tar                         shards in flight; the oldest make room for the next

Any file system that fsspec knows will do (https, s3, gs, hf, …). All processes of a machine share one cache.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataio.atomic import PARTIAL, alone, replacing, write_bytes
from dataio.manifest import MANIFEST_NAME, DataError, Manifest, Shard, parse_manifest
from dataio.reader import ShardReader, Verify, file_sha256

ATTEMPTS = 4
BACKOFF_SECONDS = 0.5  # before the second attempt, doubled before each further one
SILENCE_SECONDS = 60  # without a byte, after which a connection counts as lost
FETCHES = 4  # at a time
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp"}
logger = logging.getLogger(__name__)


def is_remote(shards: Path | str) -> bool:
    """Whether `shards` is a URL."""
    return "://" in str(shards)


def open_shards(shards: Path | str, verify: Verify, cache: Path | str, cache_bytes: int) -> ShardReader:
    """The shard set in a local directory, or behind a URL through a disk cache of at most `cache_bytes` of tars.

    Raises DataError, of a set that cannot be reached, is incomplete, or differs from its manifest.
    """
    return RemoteShards(str(shards), cache, cache_bytes) if is_remote(shards) else ShardReader(shards, verify)


class Remote:
    """Files under a URL."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(self.url, **connection(protocol))
        except (ImportError, ValueError) as error:
            package = PACKAGES.get(protocol)
            advice = f" Install it: pip install {package}." if package else ""
            raise DataError(f"{url}: cannot be opened: {error}.{advice}") from None

    def fetch(self, name: str, path: Path, size: int | None = None, sha256: str | None = None) -> None:
        """Copy file `name` to `path`, which appears complete. Raises DataError naming it after the last attempt."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                logger.warning("%s/%s: %s; trying again", self.url, name, reason)
                time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                with replacing(path) as temporary:
                    self._files.get_file(f"{self._root}/{name}", str(temporary))
                    found = temporary.stat().st_size
                    if size is not None and found != size:
                        raise OSError(f"{found} bytes came, the manifest says {size}")
                    if sha256 is not None and (digest := file_sha256(temporary)) != sha256:
                        raise OSError(f"sha256 {digest[:12]}…, the manifest says {sha256[:12]}…")
                return
            except FileNotFoundError:
                raise DataError(f"{self.url}/{name}: not there. Check the URL, or upload the file again.") from None
            except Exception as error:  # every file system has exceptions of its own for a lost connection
                reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{self.url}/{name}: not delivered in {ATTEMPTS} attempts; the last: {reason}. Check the network, and "
            "whether the file was replaced or cut; the run resumes."
        )


def connection(protocol: str) -> dict[str, Any]:
    """fsspec's options for `protocol`: a connection lives as long as bytes come."""
    if protocol not in ("http", "https"):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
    return {"client_kwargs": {"timeout": timeout}}


class RemoteShards(ShardReader):
    """A `ShardReader` of a set behind a URL. Read it in an order that says what comes next through `keep`."""

    def __init__(self, url: str, cache: Path | str, cache_bytes: int):
        self._remote = Remote(url)
        directory = Path(cache) / hashlib.sha256(self._remote.url.encode()).hexdigest()[:16]
        manifest = self._fetch_indexes(directory)
        self._cache = TarCache(self._remote, directory, manifest.shards, cache_bytes)
        super().__init__(directory, verify="size")

    def keep(self, now: Sequence[int], ahead: Sequence[int], behind: Sequence[int]) -> None:
        """Fetches the shards of `now` and `ahead` in the background; those of `behind` may still be in use."""
        for shard in self._cache.keep(now, ahead, behind):
            self._tars[shard] = None

    def locate(self, sample: int) -> str:
        shard = self.manifest.shards[int(self.shard_of(np.array([sample]))[0])]
        return super().locate(sample).replace(str(self.directory / shard.tar), f"{self._remote.url}/{shard.tar}")

    def close(self) -> None:
        """Stop fetching."""
        self._cache.close()

    def _fetch_indexes(self, directory: Path) -> Manifest:
        directory.mkdir(parents=True, exist_ok=True)
        with alone(directory / "lock"):
            for leftover in directory.glob("*.index.*" + PARTIAL):
                leftover.unlink()
            self._remote.fetch(MANIFEST_NAME, directory / "manifest.fetched")
            raw = (directory / "manifest.fetched").read_bytes()
            manifest = parse_manifest(raw, f"{self._remote.url}/{MANIFEST_NAME}")
            missing = [shard for shard in manifest.shards if not complete(directory / shard.index, shard)]
            with concurrent.futures.ThreadPoolExecutor(4 * FETCHES) as pool:
                list(pool.map(lambda s: self._remote.fetch(
                    s.index, directory / s.index, s.index_bytes, s.index_sha256), missing))  # fmt: skip
            write_bytes(directory / MANIFEST_NAME, raw)
        return manifest

    def _check_sizes(self) -> None:
        """Nothing to do: indexes were checked on arrival, and tars are when they arrive."""

    def _tar_path(self, shard: int) -> Path:
        return self._cache.get(shard)


def complete(path: Path, shard: Shard) -> bool:
    """Whether the index at `path` is the shard's."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size == shard.index_bytes and file_sha256(path) == shard.index_sha256
    return False


class TarCache:
    """The tars on disk, at most `limit` bytes: those of `keep` are fetched ahead, the oldest others make room."""

    def __init__(self, remote: Remote, directory: Path, shards: Sequence[Shard], limit: int):
        self._remote, self._directory, self._shards, self._limit = remote, directory, shards, limit
        self._pool = concurrent.futures.ThreadPoolExecutor(FETCHES, "fetch shards")
        self._lock = threading.Lock()
        self._fetching: dict[int, concurrent.futures.Future[None]] = {}
        self._wanted: set[int] = set()
        self._kept: tuple[tuple[int, ...], ...] = ()

    def keep(self, now: Sequence[int], ahead: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Start what is missing of `now`, then of `ahead`; returns which shards are no longer wanted.

        Raises DataError when the limit does not hold the three.
        """
        kept = (tuple(now), tuple(ahead), tuple(behind))
        with self._lock:
            if kept == self._kept:
                return []
            wanted = {*now, *ahead, *behind}
            needed = sum(self._shards[shard].tar_bytes for shard in wanted)
            if needed > self._limit:
                raise DataError(
                    f"{self._remote.url}: {len(wanted)} shards in flight have {needed / 1e9:.2f} GB, the cache may "
                    f"have {self._limit / 1e9:.2f} GB. Set data.remote_cache_gb higher or data.shards_in_flight lower."
                )
            dropped = sorted(self._wanted - wanted)
            self._wanted, self._kept = wanted, kept
            for shard in dropped:
                if shard in self._fetching and self._fetching[shard].cancel():
                    del self._fetching[shard]
            for shard in dict.fromkeys([*now, *ahead]):
                self._start(shard)
        return dropped

    def get(self, shard: int) -> Path:
        """The tar's path, once it is there. Raises DataError when it cannot be fetched."""
        path = self._path(shard)
        with self._lock:
            future = self._start(shard)
            if future is None:
                os.utime(path)
        if future:
            future.result()
        return path

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _path(self, shard: int) -> Path:
        return self._directory / f"{self._shards[shard].tar_sha256}.tar"

    def _start(self, shard: int) -> concurrent.futures.Future[None] | None:
        """The fetch of a shard, started unless it is under way; None when the tar is there."""
        if self._path(shard).exists():
            return None
        future = self._fetching.get(shard)
        if future is None or future.done():
            future = self._fetching[shard] = self._pool.submit(self._fetch, shard)
        return future

    def _fetch(self, shard: int) -> None:
        entry, path = self._shards[shard], self._path(shard)
        with alone(path.with_suffix(".lock")):
            if path.exists():  # another process was first
                return
            for leftover in self._directory.glob(f"{path.name}.*{PARTIAL}"):  # of a process that was killed
                leftover.unlink()
            self._make_room(path, entry.tar_bytes)
            self._remote.fetch(entry.tar, path, entry.tar_bytes, entry.tar_sha256)

    def _make_room(self, arriving: Path, size: int) -> None:
        """Remove the tars used longest ago that are not wanted, until `size` bytes for `arriving` fit; reserve them."""
        sizes = {entry.tar_sha256: entry.tar_bytes for entry in self._shards}
        with alone(self._directory / "room"), self._lock:
            wanted = {self._path(shard) for shard in self._wanted}
            others = [path.name.partition(".")[0] for path in self._directory.glob("*.tar.*" + PARTIAL)]
            present = {}
            for path in self._directory.glob("*.tar"):
                with contextlib.suppress(FileNotFoundError):
                    present[path] = path.stat()
            used = size + sum(sizes.get(name, 0) for name in others)
            used += sum(status.st_size for status in present.values())
            for path in sorted(present.keys() - wanted, key=lambda each: present[each].st_mtime):
                if used <= self._limit:
                    break
                path.unlink(missing_ok=True)
                used -= present[path].st_size
            arriving.with_name(f"{arriving.name}.{os.getpid()}{PARTIAL}").touch()
