"""The `[data]` section through the command: frame cache, block order, shards behind a URL, and the preflight."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from dataio.manifest import DataError
from dataio.reader import ShardReader
from somaspeed import data, preflight
from somaspeed.config import ConfigError
from somaspeed.policies import policy_class
from somaspeed.train import main
from tests.dataio.shard_server import serving
from tests.somaspeed.cases import tiny_config
from tests.somaspeed.test_train import command, lines


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in lines(output)]


def test_a_frame_cache_changes_no_number(sample_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, mode in (("plain", "off"), ("filling", "disk"), ("served", "disk")):
        arguments = command(sample_dir, tmp_path / name, "training.steps=3", "data.held_out=0.0")
        assert main([*arguments, f"data.frame_cache={mode}", f"data.frame_cache_directory={tmp_path}/frames"]) == 0
    assert losses(tmp_path / "plain") == losses(tmp_path / "filling") == losses(tmp_path / "served")
    out = capsys.readouterr().out
    assert "0 of 524 samples filled, 0.39 MB each, 0.21 GB when full" in out and "0.21 GB for the frame cache" in out


def test_training_from_a_url_equals_training_from_a_directory(sample_dir: Path, tmp_path: Path) -> None:
    """In the block order, which a URL implies; a run resumed from the URL goes on with the same samples."""
    extra = ["training.save_every=2", "data.held_out=0.0", "data.shards_in_flight=2", f"data.remote_cache={tmp_path}/c"]
    extra += ["training.warmup_steps=0", "training.decay_lr=2e-3"]  # a constant rate, whatever the number of steps
    assert main(command(sample_dir, tmp_path / "local", "training.steps=6", "data.order=block", *extra)) == 0
    with serving(sample_dir) as server:
        arguments = command(Path("x"), tmp_path / "remote", "training.steps=4", *extra)
        arguments[arguments.index("x")] = server.url
        assert main(arguments) == 0
        before = dict(server.delivered)
        arguments[arguments.index("training.steps=4")] = "training.steps=6"
        assert main(["--resume", *arguments]) == 0
        assert server.delivered["manifest.json"] > before["manifest.json"]
    assert len(losses(tmp_path / "remote")) == 6 and losses(tmp_path / "remote") == losses(tmp_path / "local")


def test_the_order_follows_from_where_the_shards_are(sample_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ShardReader(sample_dir, verify="size")

    def block(order: str, shards: str) -> int:
        config = tiny_config()
        config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, order=order))
        return data.shards_in_flight(config, reader, shards)

    assert block("auto", str(sample_dir)) == block("global", str(sample_dir)) == 0
    assert block("block", str(sample_dir)) == block("auto", "https://example.org/shards") == 16
    with pytest.raises(ConfigError, match="reads at random, which a URL cannot serve"):
        block("global", "s3://bucket/shards")
    monkeypatch.setattr(data.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 1000}))
    assert block("auto", str(sample_dir)) == 16, "a local set beyond memory"


# ---- preflight


def report(reader: ShardReader, path: str = "", block: int = 0, **sections: dict[str, object]) -> None:
    """The preflight of the tiny configuration with keys replaced; `path` as if its weights came from there."""
    config = tiny_config(**sections)
    policy = policy_class(config.model.name)(config, reader.manifest, torch.device("cpu"))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))
    preflight.report(config, reader, policy, np.arange(len(reader)), 0, block, 1)


def test_the_preflight_is_quick_and_complete(
    sample_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Imports apart; on the sample, hashes of all files included."""
    started = time.process_time()
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    caches = {"data": {"frame_cache": "disk", "frame_cache_directory": "/tmp/nowhere"}, "prefix": {"cache": "disk"}}
    report(ShardReader(sample_dir, verify="full"), path=str(tmp_path), block=2, **caches)
    assert time.process_time() - started < 5
    out = capsys.readouterr().out
    for text in (
        "rotated 0°",
        "order    block-shuffled",
        "GB of host memory per rank",
        "for the frame cache in /tmp/nowhere",
        "0.02 GB for the prefix cache in prefix_cache",
        "0.00 GB and the optimizer's state for every checkpoint",
        "camera   image (256×256)",
        "at 10 fps",
        "observation.state",
        "q99",
    ):
        assert text in out
    assert not Path("/tmp/nowhere").exists()


def test_the_preflight_refuses_what_does_not_fit(
    sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    reader = ShardReader(sample_dir, verify="size")
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "free_bytes", lambda directory: 10**6)
        with pytest.raises(DataError, match=r"prefix.cache: 524 slots of .* need .* 0\.0 GB are free\. Set prefix"):
            report(reader, prefix={"cache": "disk"})
        with pytest.raises(DataError, match=r"a checkpoint takes at least .* and 0\.00 GB are free for"):
            report(reader, path=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("dataio.slots.free_bytes", lambda directory: 10**6)
        with pytest.raises(DataError, match=r"frame_cache: 524 slots of 0\.39 MB need 0\.2 GB"):
            report(reader, data={"frame_cache": "disk", "frame_cache_directory": "/tmp/nowhere"})
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(DataError, match=r"buffers take .* GB of memory per rank and 0\.00 GB are free"):
        report(reader)
