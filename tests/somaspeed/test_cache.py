"""The prefix cache: same numbers as without, never stale, safe after a kill, refused where it cannot pay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dataio.reader import ShardReader
from dataio.split import split_episodes
from somaspeed import cache as storage
from somaspeed.cache import DURABLE, WRITTEN, open_cache, read_bandwidth, weights_digest
from somaspeed.config import ConfigError
from somaspeed.prefix import CachedPrefix
from somaspeed.train import main
from tests.somaspeed.cases import first_batch, loaded_policy, tiny_config
from tests.somaspeed.test_train import command, lines

KEY = {"policy": "test", "weights": "abc"}


def opened(root: Path, key: dict = KEY, samples: int = 5) -> storage.PrefixCache:
    return open_cache(root, key, samples, (2, 3), torch.float32)


def test_slots_come_back_and_another_key_sees_none_of_them(tmp_path):
    cache = opened(tmp_path)
    values = torch.arange(12.0).view(2, 2, 3)
    cache.write(np.array([4, 1]), values)
    assert cache.has(np.arange(5)).tolist() == [False, True, False, False, True] and cache.filled() == 2
    again = opened(tmp_path)
    out = torch.empty(24, dtype=torch.uint8)
    again.read(4, out)
    assert torch.equal(out.view(torch.float32).view(2, 3), values[0])
    assert opened(tmp_path, {**KEY, "weights": "abd"}).filled() == 0


def test_after_a_crash_of_the_machine_only_durable_slots_are_believed(tmp_path, monkeypatch):
    cache = opened(tmp_path)
    cache.write(np.array([0]), torch.ones(1, 2, 3))
    cache.make_durable()
    cache.write(np.array([1]), torch.ones(1, 2, 3))
    assert cache.valid.tolist() == [DURABLE, WRITTEN, 0, 0, 0]
    assert opened(tmp_path).filled() == 2, "a killed process loses nothing"
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr("dataio.slots.BOOT_ID", boot)
    assert opened(tmp_path).valid.tolist() == [DURABLE, 0, 0, 0, 0]


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"need \d+\.\d GB in .* are free.*prefix.directory"):
        open_cache(tmp_path, KEY, 10**9, (1000, 1000), torch.float32)
    assert not list(tmp_path.iterdir())


def test_weights_digest_sees_one_bit_and_ignores_the_live(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = weights_digest(module, {"1.weight"})
    with torch.no_grad():
        module[1].weight[0, 0] += 1
    assert weights_digest(module, {"1.weight"}) == before
    with torch.no_grad():
        module[0].weight[3, 3] = torch.nextafter(module[0].weight[3, 3], torch.tensor(9.0))
    assert weights_digest(module, {"1.weight"}) != before


def test_read_bandwidth_is_measured_and_leaves_nothing(tmp_path):
    assert read_bandwidth(tmp_path, 8 << 20) > 1e6
    assert not list(tmp_path.iterdir())


@pytest.fixture
def cached(sample, tmp_path):
    policy = loaded_policy(tiny_config(), sample)
    slot = policy.cache_slot()
    cache = open_cache(tmp_path, KEY, len(sample), slot.shape, slot.compute_dtype)
    found = CachedPrefix(cache, policy, None, microbatch=4, spare=2, pinned=False)
    yield policy, found
    found.close()


def without_images(batch, rows: list[int]):
    """The batch as the loader gives it when only `rows` need images."""
    import dataclasses

    kept = torch.tensor(rows, dtype=torch.int64)
    return dataclasses.replace(
        batch, images={name: image[kept] for name, image in batch.images.items()}, image_rows=kept
    )


def test_cached_equals_computed_bit_for_bit_and_partly_cached_nearly(cached, sample):
    policy, prefixes = cached
    batch = first_batch(policy, sample, [0, 60, 200, 400])
    inputs = policy.prepare(batch)
    computed = prefixes.complete(batch, batch, inputs)
    prefixes.make_durable()
    assert prefixes.cache.filled() == 4
    for rows in ([], [1, 3]):
        partial = without_images(batch, rows)
        partial.extra.update(prefixes.host(partial))
        found = prefixes.complete(partial, partial, policy.prepare(partial))
        if rows:
            torch.testing.assert_close(found, computed, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found, computed)


def test_long_prompts_are_computed_but_not_stored(cached, sample):
    policy, prefixes = cached
    batch = first_batch(policy, sample, [0, 60])
    batch.extra["cacheable"] = torch.tensor([True, False])
    prefixes.complete(batch, batch, policy.prepare(batch))
    prefixes.make_durable()
    assert prefixes.skip(np.array([0, 60])).tolist() == [True, False]


def test_reading_slower_than_computing_is_refused(cached, sample):
    policy, prefixes = cached
    prefixes.bandwidth = 1.0
    batch = first_batch(policy, sample, [0, 60])
    inputs = policy.prepare(batch)
    prefixes.complete(batch, batch, inputs)
    with pytest.raises(ConfigError, match=r"reading a slot of .* MB takes .* ms.*computing it"):
        prefixes.complete(batch, batch, inputs)


def test_two_epochs_with_the_cache_are_the_run_without_it_also_after_a_kill(sample, sample_dir, tmp_path, monkeypatch):
    train, _ = split_episodes(sample, 0.7, 42)
    steps = 2 * -(-len(train) // 16)
    extra = [f"training.steps={steps}", "data.held_out=0.7", "training.microbatch=16", "training.save_every=5"]
    extra.append("training.evaluate_every=1000")
    disk = ["prefix.cache=disk", f"prefix.directory={tmp_path / 'cache'}"]
    assert main(command(sample_dir, tmp_path / "off", *extra)) == 0
    assert main(command(sample_dir, tmp_path / "disk", *extra, *disk)) == 0
    off, disk_lines = lines(tmp_path / "off"), lines(tmp_path / "disk")
    for a, b in zip(off, disk_lines, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-5 * a["loss"]
    second = [line["seconds"]["prefix"] for line in disk_lines if line["epoch"] == 1][1:]
    first = [line["seconds"]["prefix"] for line in disk_lines if line["epoch"] == 0][1:]
    assert np.median(second) < np.median(first) / 4, "the second epoch must read its prefixes"

    # A run cut in its first epoch leaves a partly filled cache behind; another key's would be elsewhere.
    cache_directory = next((tmp_path / "cache").iterdir())
    valid = cache_directory / "valid.bin"
    flags = bytearray(valid.read_bytes())
    flags[::2] = bytes(len(flags[::2]))
    valid.write_bytes(flags)
    output = tmp_path / "resumed"
    shutil.copytree(tmp_path / "disk", output, symlinks=True)
    for checkpoint in sorted((output / "checkpoints").glob("0*"))[1:]:
        shutil.rmtree(checkpoint)
    assert main(["--resume", *command(sample_dir, output, *extra, *disk)]) == 0
    for a, b in zip(off, lines(output), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-5 * a["loss"] and a["samples_crc32"] == b["samples_crc32"]


def test_the_key_changes_with_whatever_the_prefix_depends_on(sample):
    policy = loaded_policy(tiny_config(), sample)
    others = [
        loaded_policy(tiny_config(model={"tokenizer_max_length": 100}), sample),
        loaded_policy(tiny_config(prefix={"buckets": [96, 200]}), sample),
        loaded_policy(tiny_config(training={"precision": "bfloat16"}), sample),
    ]
    keys = {json.dumps(p.cache_key(), sort_keys=True, default=str) for p in (policy, *others)}
    assert len(keys) == 4
    again = loaded_policy(tiny_config(), ShardReader(sample.directory))
    assert json.dumps(again.cache_key(), sort_keys=True, default=str) in keys
    assert weights_digest(policy.module, set()) != weights_digest(
        loaded_policy(tiny_config(training={"seed": 1}), sample).module, set()
    )
