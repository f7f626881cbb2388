"""The command end to end on the shipped sample: files, resume after a kill, LeRobot reload, bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dataio.split import split_episodes
from somaspeed.checkpoint import load_processors
from somaspeed.metrics import PHASES, Summary
from somaspeed.policies.pi05 import PI05, sized
from somaspeed.train import main
from tests.conftest import ROOT
from tests.somaspeed.cases import first_batch, loaded_policy, tiny_config

CONFIG = ROOT / "configs" / "pi05" / "somaspeed-tiny.toml"
SHORT = ["training.microbatch=4", "training.log_every=1", "training.decay_steps=6", "training.warmup_steps=1"]


def command(shards: Path, output: Path, *extra: str) -> list[str]:
    return ["--config", str(CONFIG), "--shards", str(shards), f"output={output}", *SHORT, *extra]


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sample_dir) -> Path:
    """A run of six steps with a checkpoint every three."""
    output = tmp_path_factory.mktemp("run") / "out"
    assert main(command(sample_dir, output, "training.steps=6", "training.save_every=3")) == 0
    return output


def test_files_of_a_run(finished):
    metrics = lines(finished)
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    assert set(metrics[0]) >= {"step", "epoch", "position", "loss", "grad_norm", "lr", "samples_per_second", "seconds"}
    assert set(metrics[0]["seconds"]) == set(PHASES)
    assert [record["position"] for record in metrics] == [4, 8, 12, 16, 20, 24]
    assert "held_out_loss" in metrics[2] and "held_out_loss" not in metrics[1]
    summary = msgspec.json.decode((finished / "summary.json").read_bytes(), type=Summary)
    assert (summary.completed_steps, summary.target_steps, summary.stop_reason) == (6, 6, "completed")
    assert summary.measured_steps == 1 and summary.samples_per_second_steady > 0 and not summary.bounded_early_stop
    assert (finished / "first_batch.png").stat().st_size > 10_000
    names = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert names == ["000003", "000006", "last"]
    assert (finished / "checkpoints" / "last").resolve().name == "000006"


def test_kill_and_resume_repeat_the_run_bit_for_bit(finished, sample_dir, tmp_path):
    output = tmp_path / "killed"
    arguments = command(sample_dir, output, "training.steps=6", "training.save_every=3")
    process = subprocess.Popen([sys.executable, "-m", "somaspeed.train", *arguments], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (output / "checkpoints" / "last").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    shutil.rmtree(output / "checkpoints" / "000006", ignore_errors=True)  # had the kill come too late
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')
    assert main(["--resume", *arguments]) == 0
    keys = ("step", "epoch", "position", "loss", "grad_norm", "lr", "samples_crc32")
    expected = [[record[key] for key in keys] for record in lines(finished)]
    assert [[record[key] for key in keys] for record in lines(output)] == expected
    a, b = (load_file(run / "checkpoints/000006/pretrained_model/model.safetensors") for run in (finished, output))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_resuming_another_run_is_refused(finished, sample_dir, capsys):
    arguments = command(sample_dir, finished, "training.steps=9", "training.seed=1")
    assert main(["--resume", *arguments]) == 2
    assert "training.seed = 42, this run has 1" in capsys.readouterr().err
    assert main(["--resume", *command(sample_dir, finished.parent / "none", "training.steps=9")]) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_a_new_run_moves_the_old_one_aside(finished, sample_dir, tmp_path):
    output = tmp_path / "again"
    shutil.copytree(finished, output, symlinks=True)
    assert main(command(sample_dir, output, "training.steps=1")) == 0
    assert len(lines(output)) == 1 and len(lines(tmp_path / "again.previous-1")) == 6


def test_time_limit_and_sigterm_leave_a_checkpoint(sample_dir, tmp_path):
    output = tmp_path / "limited"
    assert main(command(sample_dir, output, "training.steps=5000", "training.max_seconds=1")) == 0
    summary = msgspec.json.decode((output / "summary.json").read_bytes(), type=Summary)
    assert summary.bounded_early_stop and summary.stop_reason == "time_limit"
    assert (output / "checkpoints/last/pretrained_model/model.safetensors").exists()

    output = tmp_path / "terminated"
    arguments = command(sample_dir, output, "training.steps=100000", "training.log_every=100000")
    process = subprocess.Popen([sys.executable, "-m", "somaspeed.train", *arguments], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or not lines(output):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 0
    summary = msgspec.json.decode((output / "summary.json").read_bytes(), type=Summary)
    assert summary.stop_reason == "signal" and not summary.bounded_early_stop
    assert int((output / "checkpoints" / "last").resolve().name) == summary.completed_steps


def test_lerobot_loads_the_checkpoint_and_acts_the_same(finished, sample, tmp_path, monkeypatch):
    """Every tensor equal, and the same action for the same frame and noise; offline, and after a move."""
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    moved = tmp_path / "moved"
    shutil.copytree(finished / "checkpoints/last/pretrained_model", moved)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    with sized("tiny"):
        reloaded = PI05Policy.from_pretrained(str(moved)).eval()
    saved = load_file(moved / "model.safetensors")
    state = reloaded.state_dict()
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in saved)

    policy = loaded_policy(tiny_config(), sample)
    live = policy.live_parameters()
    assert any(not torch.equal(live[name], saved[name]) for name in live), "training must have moved something"
    policy.module.load_state_dict(saved)
    batch = first_batch(policy, sample, [5])
    frame = {
        "observation.state": batch.columns["observation.state"][0],
        "task": policy.tasks[int(batch.task[0])],
        **{f"observation.images.{c}": batch.images[c][0].permute(2, 0, 1) / 255 for c in policy.cameras},
    }
    noise = batch.extra["noise"]
    actions = []
    for module, (before, after) in (
        (reloaded, load_processors(moved)),
        (policy.module.eval(), (policy.preprocessor, policy.postprocessor)),
    ):
        monkeypatch.setattr(module.model, "sample_noise", lambda shape, device: noise)
        actions.append(after(module.predict_action_chunk(before(frame))))
    assert actions[0].shape == (1, 50, 7) and torch.equal(*actions)


def test_lerobots_own_loader_finds_the_tokenizer(finished):
    """Without our help: the pre-processor names the checkpoint's own tokenizer by path."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import make_pre_post_processors

    directory = str(finished / "checkpoints/000006/pretrained_model")
    before, _ = make_pre_post_processors(PreTrainedConfig.from_pretrained(directory), directory)
    assert any(type(step).__name__ == "TokenizerProcessorStep" for step in before.steps)


def test_training_starts_from_a_checkpoint_and_a_partial_one_is_refused(finished, sample_dir, tmp_path, capsys):
    from safetensors.torch import save_file

    base = tmp_path / "base"
    shutil.copytree(finished / "checkpoints/last/pretrained_model", base)
    output = tmp_path / "tuned"
    assert main(command(sample_dir, output, "training.steps=1", f"model.path={base}")) == 0
    before, after = (
        load_file(base / "model.safetensors"),
        load_file(output / "checkpoints/last/pretrained_model/model.safetensors"),
    )
    frozen = "model.paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight"
    assert torch.equal(before[frozen], after[frozen])
    capsys.readouterr()

    assert main(command(sample_dir, output, f"model.path={base}", "model.size=mid")) == 2
    assert "model.size = 'mid'; refusing a partial load" in capsys.readouterr().err
    partial = {name: tensor for name, tensor in before.items() if "gemma_expert" in name}
    save_file(partial, base / "model.safetensors")
    assert main(command(sample_dir, output, f"model.path={base}")) == 2
    error = capsys.readouterr().err
    assert "missing" in error and "refusing a partial load" in error
    (base / "model.safetensors").write_bytes(b"garbage")
    assert main(command(sample_dir, output, f"model.path={base}")) == 2
    assert "not a readable safetensors file" in capsys.readouterr().err


def test_same_seed_same_split(sample):
    train, held = split_episodes(sample, 0.15, 42)
    assert len(held) and not set(train) & set(held)
    assert not set(sample.episode[train]) & set(sample.episode[held])


@pytest.fixture
def copied(sample_dir, tmp_path) -> Path:
    target = tmp_path / "shards"
    shutil.copytree(sample_dir, target)
    return target


def spoil_missing_manifest(shards: Path) -> None:
    (shards / "manifest.json").unlink()


def spoil_truncated(shards: Path) -> None:
    tar = shards / "000001.tar"
    os.truncate(tar, tar.stat().st_size - 700)


def spoil_index(shards: Path) -> None:
    shutil.copy(shards / "000000.index.safetensors", shards / "000001.index.safetensors")


def spoil_bytes(shards: Path) -> None:
    tar = shards / "000001.tar"
    data = bytearray(tar.read_bytes())
    data[len(data) // 2] ^= 0xFF
    tar.write_bytes(data)


def spoil_nothing(shards: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "extra", "message"),
    [
        (spoil_missing_manifest, [], "no manifest.json here. Give the directory that scripts/shard_dataset.py wrote"),
        (spoil_truncated, [], "000001.tar"),
        (spoil_index, [], "000001.index.safetensors"),
        (spoil_bytes, [], "000001.tar"),
        (spoil_nothing, ['data.map={"image"="front", "image2"="front"}'], "two cameras to one"),
        (spoil_nothing, ['data.map={"imag"="front"}'], "'imag', which the shards do not have; did you mean 'image'"),
        (spoil_nothing, ["model.empty_camera=1"], "did you mean 'empty_cameras'"),
        (spoil_nothing, ["model.size=tinny"], "did you mean 'tiny'"),
        (spoil_nothing, ["model.name=pi5"], "did you mean 'pi05'"),
        (spoil_nothing, ["model.lora=true"], "LoRA is not supported here.*native-pi05-lerobot-accelerate"),
        (spoil_nothing, ["model.train_expert_only=false"], "native-pi05-lerobot-accelerate"),
        (spoil_nothing, ["training.microbatch=-1"], "training.microbatch"),
        (spoil_nothing, ["training.steps='ten'"], "training.steps"),
        (spoil_nothing, ["model.size=full"], "tokenizer.json.*model.tokenizer"),
        (spoil_nothing, ["model.path=/nowhere/at/all"], "no such directory"),
        (spoil_nothing, ["backend=native"], "'native' is not run by this command"),
    ],
)
def test_bad_input_is_refused_before_weights_are_read(copied, tmp_path, capsys, monkeypatch, spoil, extra, message):
    monkeypatch.setattr(PI05, "load", lambda self: pytest.fail("weights were read"))
    spoil(copied)
    assert main(command(copied, tmp_path / "out", "training.steps=2", *extra)) == 2
    error = capsys.readouterr().err
    assert error.startswith("somaspeed-train: error:") and re.search(message, error, re.S), error
    assert not (tmp_path / "out").exists()


def test_a_camera_the_policy_does_not_know_is_refused(finished, sample_dir, tmp_path, capsys):
    base = finished / "checkpoints/last/pretrained_model"
    arguments = command(sample_dir, tmp_path / "out", f"model.path={base}", 'data.map={"image2"="wrist"}')
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "camera 'wrist' is not known to the policy" in error and "data.map" in error


def test_check_only_writes_nothing(sample_dir, tmp_path, capsys):
    started = time.perf_counter()
    assert main(["--check", *command(sample_dir, tmp_path / "out")]) == 0
    assert time.perf_counter() - started < 5
    printed = capsys.readouterr().out
    assert "observation.images.image2" in printed and "q99" in printed
    assert not (tmp_path / "out").exists()


def test_draws_depend_on_the_place_in_the_run_alone(sample):
    policy = loaded_policy(tiny_config(), sample)
    one = first_batch(policy, sample, [3, 4, 5])
    two = first_batch(policy, sample, [3, 4, 5])
    assert torch.equal(one.extra["noise"], two.extra["noise"])
    assert len(np.unique(one.extra["time"])) == 3 and not torch.equal(one.extra["noise"][0], one.extra["noise"][1])
    assert ((one.extra["time"] > 0) & (one.extra["time"] <= 1)).all()


def test_full_size_keys_shapes_and_dtypes_are_lerobots(sample):
    """On the meta device, without any patch: parameter counts, and the tensors that a checkpoint would hold."""
    from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch

    from somaspeed.policies.pi05.policy import lerobot_config
    from somaspeed.policies.pi05.sizes import build_on_meta

    model = tiny_config(model={"size": "full"}).model
    config = lerobot_config(model, {}, sample.manifest, torch.device("cpu"))
    with torch.device("meta"):
        reference = PI05Pytorch(config)
    built = build_on_meta(config, None)
    described = [{n: (t.shape, t.dtype) for n, t in core.state_dict().items()} for core in (reference, built)]
    assert described[0] == described[1]
    assert sum(p.numel() for p in built.parameters()) == 4_143_404_816
    assert sum(p.numel() for p in built.parameters() if p.requires_grad) == 693_422_112
