"""MolmoAct2 through the command on the shipped sample: resume, LeRobot reload, prefix cache, bad input, bench."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dataio.reader import ShardReader
from somaspeed.actor import load_config as load_policy_config
from somaspeed.bench.cli import main as bench
from somaspeed.checkpoint import load_processors
from somaspeed.config import load_config
from somaspeed.policies.molmoact2 import MolmoAct2
from somaspeed.policies.molmoact2.base import make_base
from somaspeed.policies.molmoact2.sizes import SIZES, build_on_meta, model_config
from somaspeed.train import main
from tests.conftest import ROOT
from tests.somaspeed.cases import check_actor, first_batch, loaded_policy
from tests.somaspeed.molmoact2_cases import molmoact2_config

CONFIG = ROOT / "configs" / "molmoact2" / "somaspeed-tiny.toml"
SHORT = ["training.microbatch=4", "training.log_every=1", "training.decay_steps=4", "training.warmup_steps=1"]


def command(shards: Path, output: Path, *extra: str) -> list[str]:
    short = [*SHORT, "training.steps=4", "training.save_every=2", "data.held_out=0.0"]
    return ["--config", str(CONFIG), "--shards", str(shards), f"output={output}", *short, *extra]


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sample_dir) -> Path:
    """A run of four steps with a checkpoint every two."""
    output = tmp_path_factory.mktemp("run") / "out"
    assert main(command(sample_dir, output)) == 0
    return output


def test_resuming_repeats_the_run_bit_for_bit(finished, sample_dir, tmp_path):
    output = tmp_path / "again"
    shutil.copytree(finished, output, symlinks=True)
    shutil.rmtree(output / "checkpoints" / "000004")
    assert main(["--resume", *command(sample_dir, output)]) == 0
    keys = ("step", "epoch", "position", "loss", "grad_norm", "lr", "samples_crc32")
    expected = [[record[key] for key in keys] for record in lines(finished)]
    assert [[record[key] for key in keys] for record in lines(output)] == expected
    a, b = (load_file(run / "checkpoints/000004/pretrained_model/model.safetensors") for run in (finished, output))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert (finished / "first_batch.png").stat().st_size > 10_000


def test_lerobot_loads_the_checkpoint_and_acts_the_same(finished, sample, tmp_path, monkeypatch):
    """Every tensor equal, and the same action for the same frame and noise; in place, and offline after a move."""
    from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy

    original = finished / "checkpoints/last/pretrained_model"
    moved = tmp_path / "moved"
    shutil.copytree(original, moved)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    in_place = MolmoAct2Policy.from_pretrained(str(original)).eval()
    (finished / "checkpoints").rename(tmp_path / "gone")
    try:
        reloaded = MolmoAct2Policy.from_pretrained(str(moved), config=load_policy_config(moved)).eval()
        processors = load_processors(moved)
    finally:
        (tmp_path / "gone").rename(finished / "checkpoints")
    saved = load_file(moved / "model.safetensors")
    state = reloaded.state_dict()
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in saved)
    assert reloaded.config.inference_action_mode == "continuous"

    policy = loaded_policy(molmoact2_config(), sample)
    live = policy.live_parameters()
    assert any(not torch.equal(live[name], saved[name]) for name in live), "training must have moved something"
    policy.module.load_state_dict(saved)
    batch = first_batch(policy, sample, [5])
    frame = {
        "observation.state": batch.columns["observation.state"][0],
        "task": policy.tasks[int(batch.task[0])],
        **{f"observation.images.{c}": batch.images[c][0].permute(2, 0, 1) / 255 for c in policy.cameras},
    }
    actions = []
    for module, (before, after) in (
        (in_place, load_processors(original)),
        (reloaded, processors),
        (policy.module.eval(), (policy.preprocessor, policy.postprocessor)),
    ):
        generator = torch.Generator().manual_seed(3)
        actions.append(after(module.predict_action_chunk(before(frame), generator=generator)))
    assert actions[0].shape == (1, 10, 7) and torch.equal(actions[0], actions[1]) and torch.equal(*actions[1:])


def test_an_actor_acts_by_it_after_a_move_and_a_partial_one_is_refused(finished, sample, tmp_path):
    check_actor(finished, sample, tmp_path / "moved", "action_expert")


def test_training_starts_from_a_checkpoint_and_a_partial_one_is_refused(finished, sample_dir, tmp_path, capsys):
    base = tmp_path / "start"
    shutil.copytree(finished / "checkpoints/last/pretrained_model", base)
    output = tmp_path / "tuned"
    assert main(command(sample_dir, output, "training.steps=1", f"model.path={base}")) == 0
    tuned = output / "checkpoints/last/pretrained_model"
    before, after = load_file(base / "model.safetensors"), load_file(tuned / "model.safetensors")
    frozen = "model.model.transformer.wte.embedding"
    assert torch.equal(before[frozen], after[frozen])
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (tuned / "base" / "tokenizer.json").is_file()

    released = tmp_path / "released"  # a base checkpoint, which LeRobot's configuration would name
    shutil.copytree(base / "base", released)
    assert main(command(sample_dir, output, "training.steps=1", f"model.path={released}")) == 0
    saved = json.loads((output / "checkpoints/last/pretrained_model/config.json").read_text())
    assert saved["checkpoint_path"] == str(released)
    assert not (output / "checkpoints/last/pretrained_model/base").exists()
    capsys.readouterr()

    assert main(command(sample_dir, output, f"model.path={base}", "model.size=mid")) == 2
    assert "model.size = 'mid' has 640" in capsys.readouterr().err
    save_file({name: tensor for name, tensor in before.items() if "expert" in name}, base / "model.safetensors")
    assert main(command(sample_dir, output, f"model.path={base}")) == 2
    error = capsys.readouterr().err
    assert "missing" in error and "refusing a partial load" in error


def test_a_cached_run_has_the_losses_of_one_without(sample_dir, tmp_path, capfd):
    """The second run reads every slot that the first wrote."""
    plain = ["model.image_augmentation=false", "training.steps=2", "training.save_every=2"]
    cached = [*plain, "prefix.cache=disk", f"prefix.directory={tmp_path / 'cache'}"]
    for name, extra in (("off", plain), ("first", cached), ("second", cached)):
        assert main(command(sample_dir, tmp_path / name, *extra)) == 0
    losses = [[record["loss"] for record in lines(tmp_path / name)] for name in ("off", "first", "second")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[2] == pytest.approx(losses[0], rel=1e-6)
    assert "8 of 524 slots filled" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["model.size=tinny"], "did you mean 'tiny'"),
        (["model.setup_typ=arm"], "did you mean 'setup_type'"),
        (["model.lora=true"], "LoRA is not supported here.*native-molmoact2-lerobot-accelerate"),
        (["model.action_mode=both"], "model.action_mode = 'both' is not supported.*native-molmoact2"),
        (["model.gradient_checkpointing=true"], "gradient_checkpointing = True is not supported"),
        (["model.image_augmentation=yes"], "expected true or false"),
        (["model.tokenizer=some/where"], "part of its base checkpoint, model.checkpoint_path"),
        (["model.path=/nowhere/at/all"], "no such directory"),
        (["model.checkpoint_path=allenai/MolmoAct2"], "hf download allenai/MolmoAct2.*tokenizer.json"),
        (["prefix.cache=disk"], "this recipe augments images"),
        (['data.map={"image2"="image"}'], "two cameras to one"),
    ],
)
def test_bad_input_is_refused_before_weights_are_read(sample_dir, tmp_path, capsys, monkeypatch, extra, message):
    monkeypatch.setattr(MolmoAct2, "load", lambda self: pytest.fail("weights were read"))
    assert main(command(sample_dir, tmp_path / "out", *extra)) == 2
    error = capsys.readouterr().err
    assert error.startswith("somaspeed-train: error:") and re.search(message, error, re.S), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spoil", ["processor_config.json", "crop_mode", "state tokens", "norm_after"])
def test_a_base_checkpoint_that_cannot_be_used_is_named(sample_dir, tmp_path, capsys, spoil):
    base = tmp_path / "base"
    base.mkdir()
    make_base(base, SIZES["tiny"], ["The task is to pick up the bowl."])
    if spoil == "processor_config.json":
        (base / spoil).unlink()
        message = "no processor_config.json in it"
    elif spoil == "state tokens":
        file = base / "tokenizer.json"
        file.write_text(file.read_text().replace("<state_7>", "<stata_7>"))
        message = "has no tokens <state_0> … <state_255>"
    elif spoil == "crop_mode":
        file = base / "processor_config.json"
        file.write_text(file.read_text().replace('"resize"', '"overlap-and-resize-c2"'))
        message = "crop_mode = 'overlap-and-resize-c2'; only 'resize'"
    else:
        file = base / "config.json"
        file.write_text(file.read_text().replace('"norm_after": false', '"norm_after": true'))
        message = "has norms after attention, which is not supported here.*native-molmoact2"
    assert main(["--check", *command(sample_dir, tmp_path / "out", f"model.checkpoint_path={base}")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_full_size_is_the_published_one():
    """On the meta device: LeRobot's model at the published widths, parameters counted."""
    model = build_on_meta(model_config(SIZES["full"], {}))
    expert = sum(p.numel() for name, p in model.named_parameters() if "action_expert" in name)
    assert (sum(p.numel() for p in model.parameters()), expert) == (5_442_196_208, 577_564_448)


def test_the_published_recipe_is_the_full_configuration():
    config = load_config(ROOT / "configs" / "molmoact2" / "somaspeed.toml")
    training = config.training
    assert (training.lr, training.decay_lr, training.weight_decay, training.eps) == (5e-5, 1e-6, 0.0, 1e-6)
    assert (training.steps, training.warmup_steps, training.clip_grad, training.seed) == (10_000, 200, 1.0, 42)
    assert config.model.options["num_flow_timesteps"] == 8 and config.model.options["image_augmentation"] is True
    assert (config.model.size, config.model.dtype) == ("full", "bfloat16")


def test_flops_are_the_counted_ones(tmp_path):
    path = tmp_path / "flops.json"
    assert bench(["flops", "--policy", "molmoact2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert (found["parameters"], found["trainable_parameters"]) == (5_442_196_208, 577_564_448)
    assert found["native"] == pytest.approx(13.1, abs=0.05)
    assert found["native_variants"]["no checkpointing"] == pytest.approx(5.367, abs=0.005)
    assert found["somaspeed"] <= 5.27 and found["somaspeed_cached"] <= 3.97
    assert found["longest_prompt"]["somaspeed"] <= 5.33 and found["tokens"] == {"somaspeed": 496, "native": 497}
    assert sum(found["somaspeed_split"].values()) == pytest.approx(found["somaspeed"])


@pytest.mark.parametrize("cached", [[], ["--cached"]])
def test_the_step_is_faster_and_equal(tmp_path, cached):
    path = tmp_path / "step.json"
    arguments = ["step", "--policy", "molmoact2", "--size", "tiny", "--repeats", "3", *cached]
    assert bench([*arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["loss_difference"] <= 1e-5 and found["gradient_difference"] <= 1e-5
    assert found["ratio"] > 1.3, "a generous floor: the tiny size is mostly overhead"
    assert found["preparation_ratio"] > 1.3 and found["ratio_with_preparation"] > 1.3
    assert found["device"] == "cpu" and found["policy"] == "molmoact2" and found["native"]["variant"] == "checkpointing"


def test_native_meta_flops_are_those_of_a_real_forward(sample: ShardReader):
    """What the counting leaves out of LeRobot's forward costs no FLOPs: a real tiny step counts the same."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from somaspeed.policies.molmoact2 import bench as case

    countable = functools.partial(sdpa_kernel, SDPBackend.MATH)  # the counter knows no CPU kernel
    policy = loaded_policy(molmoact2_config(model={"numerics": "native"}), sample)
    batch = first_batch(policy, sample, [0])
    inputs = policy.prepare(batch)
    for variant in case.VARIANTS:
        with countable(), case.native_mode(policy, variant), FlopCounterMode(display=False) as real:
            case.native_loss(policy, variant, inputs, batch.extra["noise"], batch.extra["time"]).backward()
        module, length = case.meta_policy(SIZES["tiny"]), int(inputs.lengths[0])
        with case.checkpointed(module, variant.checkpointing), case.on_meta(module, length, variant.checkpointing):
            with FlopCounterMode(display=False) as meta:
                case.native_meta_loss(module).backward()
        with countable(), FlopCounterMode(display=False) as vision:
            policy.frozen(inputs)
        assert real.get_total_flops() == meta.get_total_flops() + vision.get_total_flops()
