"""Ranks: the same run on one rank, on two, and with accumulation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from somaspeed.config import ConfigError, ParallelConfig
from somaspeed.parallel import Ranks
from somaspeed.reduction import Layout
from somaspeed.train import main
from tests.conftest import ROOT
from tests.somaspeed.ranks import on_ranks

STEPS = 20
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(output: Path, shards: Path, ranks: int, microbatch: int, extra: tuple[str, ...] = ()) -> list[dict]:
    """Train `STEPS` updates of global batch 8 at lr 1e-3 without warm-up; returns the logged lines."""
    arguments = options(output, shards, microbatch, extra)
    if ranks == 1:
        assert main(arguments) == 0
    else:
        first = on_ranks(ranks, "tests.somaspeed.counted_train:run", arguments)[0]
        check_traffic(first.printed, first.result, sharded="parallel.shard=2" in extra)
    return logged(output)


def options(output: Path, shards: Path, microbatch: int, extra: tuple[str, ...] = ()) -> list[str]:
    resumed = "--resume" in extra
    return [
        *("--config", str(ROOT / "configs/pi05/somaspeed-tiny.toml"), "--shards", str(shards)),
        *(("--resume", f"output={output}") if resumed else (f"output={output}", f"training.steps={STEPS}")),
        *(f"training.microbatch={microbatch}", "training.global_batch=8", "training.lr=1e-3"),
        *("training.warmup_steps=0", "training.log_every=1", "training.save_every=20"),
        *(argument for argument in extra if argument != "--resume"),
    ]


def logged(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "checkpoints/last/pretrained_model/model.safetensors")


def test_layouts_give_the_same_run(tmp_path, sample_dir):
    """One rank, two, two sharded, four, one with accumulation: losses, norms and tensors up to reduction order."""
    reference = run(tmp_path / "one", sample_dir, ranks=1, microbatch=8)
    cases = {"two": (2, 4), "sharded": (2, 4, ("parallel.shard=2",)), "accumulated": (1, 2), "four": (4, 2)}
    for name, case in cases.items():
        lines = run(tmp_path / name, sample_dir, *case)
        assert [line["position"] for line in lines] == [line["position"] for line in reference]
        for key in ("loss", "grad_norm"):
            for a, b in zip(reference, lines, strict=True):
                assert abs(a[key] - b[key]) <= 1e-4 * a[key], (name, key, a["step"])
        assert abs(lines[-1]["held_out_loss"] - reference[-1]["held_out_loss"]) <= 1e-4
        one, other = weights(tmp_path / "one"), weights(tmp_path / name)
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-2, atol=1e-4)


def check_traffic(printed: str, sent: dict[str, int], sharded: bool) -> None:
    """What rank 0 sent in the whole run: the live gradients once an update, and numbers for the log; no weights, but
    those that its shard updated.
    """
    found = re.findall(r"([\d,]+) parameters in (\d+) tensors", printed)[0]
    total, tensors = (int(text.replace(",", "")) for text in found)
    least, padding, log = STEPS * 4 * total, STEPS * 4 * 64 * (tensors + 1), 1e5
    gradients = sent.pop("reduce_scatter_tensor" if sharded else "all_reduce")
    assert least <= gradients <= least + padding + log
    if sharded:
        assert sent.pop("all_reduce") <= log
        assert least / 2 <= sent.pop("all_gather_into_tensor") <= (least + padding) / 2 + log
    assert not sent, "no other collective"


def test_a_killed_rank_is_named_and_another_layout_resumes(tmp_path, sample_dir):
    """Two sharded ranks, one killed mid-run: the other stops and names it; one rank goes on in the same order."""
    output = tmp_path / "out"
    # Enough steps that the kill comes before the end, on a schedule that the resumed run shares.
    long = ("parallel.shard=2", "training.steps=5000", "training.save_every=4")
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, "-m", "somaspeed.train", *options(output, sample_dir, 4, long)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not (output / "checkpoints" / "last").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    victim = next(
        child for child in psutil.Process(process.pid).children(recursive=True) if child.environ().get("RANK") == "1"
    )
    victim.kill()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert "error on rank 0" in errors and "ranks that no longer answer: 1." in errors, errors[-3000:]
    saved = int((output / "checkpoints" / "last").resolve().name)
    files = sorted(path.name for path in (output / "checkpoints/last/training_state").iterdir())
    assert files == ["optimizer-000-of-002.safetensors", "optimizer-001-of-002.safetensors", "state.json"]
    before = logged(output)
    resumed = ("--resume", f"training.steps={saved + 3}", "training.decay_steps=300")
    run(output, sample_dir, 1, 8, resumed)
    lines = logged(output)
    assert [line["step"] for line in lines] == list(range(1, saved + 4))
    assert lines[:saved] == before[:saved] and lines[saved]["position"] == (saved + 1) * 8 % 426


def test_a_layout_that_does_not_fit_the_ranks_is_refused():
    for settings in (ParallelConfig(replicate=3), ParallelConfig(shard=2)):
        with pytest.raises(ConfigError, match=r"but 1 rank\(s\) are running"):
            Layout(Ranks(settings), settings)
