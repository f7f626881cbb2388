"""Ranks: the same run on one rank, on two, and with accumulation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from somaspeed.config import ConfigError, ParallelConfig
from somaspeed.parallel import Ranks
from somaspeed.reduction import Layout
from tests.conftest import ROOT

STEPS = 20


def run(output: Path, shards: Path, ranks: int, microbatch: int, extra: tuple[str, ...] = ()) -> list[dict]:
    """Train `STEPS` updates of global batch 8 at lr 1e-3 without warm-up; returns the logged lines."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [
        *(sys.executable, *launcher, "-m", "somaspeed.train"),
        *("--config", str(ROOT / "configs/pi05/somaspeed-tiny.toml"), "--shards", str(shards), f"output={output}"),
        *(f"training.steps={STEPS}", f"training.microbatch={microbatch}", "training.global_batch=8"),
        *("training.lr=1e-3", "training.warmup_steps=0", "training.log_every=1", "training.save_every=20", *extra),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "checkpoints/last/pretrained_model/model.safetensors")


def test_layouts_give_the_same_run(tmp_path, sample_dir):
    """One rank, two ranks, one rank with accumulation: losses, norms and final tensors up to reduction order."""
    reference = run(tmp_path / "one", sample_dir, ranks=1, microbatch=8)
    for name, ranks, microbatch in (("two", 2, 4), ("accumulated", 1, 2)):
        lines = run(tmp_path / name, sample_dir, ranks, microbatch)
        assert [line["position"] for line in lines] == [line["position"] for line in reference]
        for key in ("loss", "grad_norm"):
            for a, b in zip(reference, lines, strict=True):
                assert abs(a[key] - b[key]) <= 1e-4 * a[key], (name, key, a["step"])
        assert abs(lines[-1]["held_out_loss"] - reference[-1]["held_out_loss"]) <= 1e-4
        one, other = weights(tmp_path / "one"), weights(tmp_path / name)
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-2, atol=1e-4)


def test_a_layout_that_does_not_fit_the_ranks_is_refused():
    for settings in (ParallelConfig(replicate=3), ParallelConfig(shard=2)):
        with pytest.raises(ConfigError, match=r"but 1 rank\(s\) are running"):
            Layout(Ranks(settings), settings)
