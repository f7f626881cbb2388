"""GR00T through the command on the shipped sample: resume, LeRobot reload, bad input; and its benchmark documents."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.groot.modeling_groot import GrootPolicy
from safetensors.torch import load_file

from somaspeed.bench import operations, step
from somaspeed.bench.cli import main as bench
from somaspeed.checkpoint import load_processors
from somaspeed.policies.groot import SIZES, Groot, sized
from somaspeed.train import main
from tests.conftest import ROOT
from tests.somaspeed.cases import check_actor, first_batch, loaded_policy
from tests.somaspeed.groot_cases import groot_config

CONFIG = ROOT / "configs" / "groot" / "somaspeed-tiny.toml"
SHORT = ["training.microbatch=4", "training.log_every=1", "training.warmup_steps=1", "training.steps=4"]
SHORT += ["training.save_every=2", "data.held_out=0.02"]


def command(shards: Path, output: Path, *extra: str) -> list[str]:
    return ["--config", str(CONFIG), "--shards", str(shards), f"output={output}", *SHORT, *extra]


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sample_dir) -> Path:
    """A run of four steps with jitter and dropout, and a checkpoint every two."""
    output = tmp_path_factory.mktemp("groot") / "out"
    assert main(command(sample_dir, output)) == 0
    return output


def test_resume_repeats_the_run_bit_for_bit(finished, sample_dir, tmp_path):
    output = tmp_path / "resumed"
    shutil.copytree(finished, output, symlinks=True)
    shutil.rmtree(output / "checkpoints" / "000004")
    assert main(["--resume", *command(sample_dir, output)]) == 0
    keys = ("step", "position", "loss", "grad_norm", "lr", "samples_crc32")
    expected = [[record[key] for key in keys] for record in lines(finished)]
    assert [[record[key] for key in keys] for record in lines(output)] == expected
    weights = [load_file(run / "checkpoints/000004/pretrained_model/model.safetensors") for run in (finished, output)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_checkpoint_keeps_dead_rows_and_frozen_weights(finished, sample):
    """Only the live embodiment's rows, the positions in use and the transformer differ from the start's weights."""
    start = loaded_policy(groot_config(model={"numerics": "default"}, training={"seed": 42}), sample)
    before, live = start.module.state_dict(), start.live_parameters()
    after = load_file(finished / "checkpoints/last/pretrained_model/model.safetensors")
    table = "_groot_model.action_head.action_decoder.layer1.W"
    assert [row for row in range(32) if not torch.equal(after[table][row], before[table][row])] == [2]
    frozen = [name for name in after if name not in live and id(start.module.get_parameter(name)) not in start.rows.cut]
    assert frozen and all(torch.equal(after[name], before[name]) for name in frozen)


def test_lerobot_loads_the_checkpoint_and_acts_the_same(finished, sample, tmp_path, monkeypatch):
    """Without our code or a network: in place, and after a move with `base_model_path` set to its `base`."""
    source = (finished / "checkpoints/last/pretrained_model").resolve()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    in_place = GrootPolicy.from_pretrained(str(source)).eval()
    moved = tmp_path / "elsewhere"
    shutil.copytree(source, moved)
    config = PreTrainedConfig.from_pretrained(str(moved))
    config.base_model_path = str(moved / "base")
    base = json.loads((moved / "base" / "config.json").read_text())
    base["model_name"] = str(moved / "base" / "backbone")
    (moved / "base" / "config.json").write_text(json.dumps(base))
    elsewhere = GrootPolicy.from_pretrained(str(moved), config=config).eval()
    with sized("tiny", seed=5):
        third = GrootPolicy.from_pretrained(str(moved)).eval()
    saved = load_file(moved / "model.safetensors")
    for module in (in_place, elsewhere, third):
        state = module.state_dict()
        assert all(torch.equal(saved[name], state[name]) for name in saved)

    policy = loaded_policy(groot_config(), sample)
    policy.module.load_state_dict(in_place.state_dict())
    batch = first_batch(policy, sample, [5])
    frame = {
        "observation.state": batch.columns["observation.state"][0],
        "task": policy.tasks[int(batch.task[0])],
        **{f"observation.images.{c}": batch.images[c][0].permute(2, 0, 1) / 255 for c in policy.cameras},
    }
    actions = []
    for module, (before, after) in (
        (in_place, load_processors(source)),
        (elsewhere, load_processors(moved)),
        (policy.module.eval(), (policy.preprocessor, policy.postprocessor)),
    ):
        torch.manual_seed(0)
        actions.append(after(module.predict_action_chunk(before(dict(frame)))))
    assert (
        actions[0].shape == (1, 40, 7) and torch.equal(actions[0], actions[1]) and torch.equal(actions[0], actions[2])
    )


def test_an_actor_acts_by_it_after_a_move_and_a_partial_one_is_refused(finished, sample, tmp_path):
    check_actor(finished, sample, tmp_path / "moved", "action_decoder.layer1.W")


def test_training_starts_from_a_checkpoint(finished, sample_dir, sample, tmp_path, capsys):
    base = finished / "checkpoints/last/pretrained_model"
    again = loaded_policy(groot_config(model={"path": str(base)}), sample)
    saved = load_file(base / "model.safetensors")
    table = "_groot_model.action_head.state_encoder.layer1.W"
    assert torch.equal(again.live_parameters()[f"{table}[2]"], saved[table][2])
    assert main(command(sample_dir, tmp_path / "out", f"model.path={base}", "model.size=mid")) == 2
    assert "refusing a partial load" in capsys.readouterr().err


def test_first_embodiments_of_the_sample_fit_a_shorter_horizon(sample):
    policy = loaded_policy(groot_config(model={"chunk_size": 16}), sample)
    assert policy.windows == {"action": list(range(16))} and policy.lerobot_config.n_action_steps == 16


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["model.embodiment_tag=libero_simm"], "did you mean 'libero_sim'"),
        (["model.action_decode_transform=libero"], 'gripper in \\[0, 1\\].*action_decode_transform = "none"'),
        (["model.chunk_size=41"], "predicts 40 steps"),
        (["model.tune_llm=true"], "tune_llm is not supported here.*native-gr00t-hf-trainer"),
        (["model.lora=true"], "LoRA is not supported here.*native-gr00t-hf-trainer"),
        (["model.color_jitter_params={hues=0.1}"], "did you mean 'hue'"),
        (["model.color_jitter_params={hue=0.7}"], "must lie in \\[0, 0.5\\]"),
        (["model.state_dropout_prob=1.0"], "must lie in \\[0, 1\\)"),
        (["model.chunksize=40"], "did you mean 'chunk_size'"),
        (["model.size=full"], "tokenizer.json.*model.tokenizer"),
        (["model.base_model_path=/nowhere/at/all"], "cannot be loaded"),
        (["prefix.cache=memory"], "jitters colours"),
    ],
)
def test_bad_input_is_refused(sample_dir, tmp_path, capsys, extra, message):
    assert main(command(sample_dir, tmp_path / "out", *extra)) == 2
    error = capsys.readouterr().err
    assert error.startswith("somaspeed-train: error:") and re.search(message, error, re.S), error


def test_bad_input_reads_no_weight(sample_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(Groot, "load", lambda self: pytest.fail("weights were read"))
    assert main(command(sample_dir, tmp_path / "out", "model.embodiment_tag=robot")) == 2


def test_cached_features_give_the_same_loss_without_images(sample):
    """What the prefix cache stores is all that the head needs: a batch without images goes on from it."""
    policy = loaded_policy(groot_config(model={"numerics": "default"}, prefix={"cache": "memory"}), sample)
    batch = first_batch(policy, sample, [0, 60, 261])
    inputs = policy.prepare(batch)
    frozen, slot = policy.frozen(inputs), policy.cache_slot()
    assert frozen.shape[1:] == slot.shape and frozen.dtype == slot.compute_dtype
    assert policy.frozen_length(inputs) == slot.shape[slot.axis] and batch.extra["cacheable"].all()
    none = {name: images[:0] for name, images in batch.images.items()}
    bare = policy.prepare(dataclasses.replace(batch, images=none, image_rows=batch.image_rows[:0]))
    losses = [
        policy.expert_loss(policy.prefix(given, frozen.clone()), given, batch.extra["noise"], batch.extra["time"])
        for given in (inputs, bare)
    ]
    assert losses[0] == losses[1] and len(json.dumps(policy.cache_key()))


def document(tmp_path, *arguments: str) -> dict:
    path = tmp_path / "out.json"
    assert bench([*arguments, "--policy", "groot", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_flops_are_the_counted_ones(tmp_path):
    """At full size: native padded to the longest prompt of 156 tokens, ours at the mean of 153 and padded as well."""
    found = document(tmp_path, "flops")
    assert (found["parameters"], found["trainable_parameters"]) == (3_144_016_000, 1_620_515_968)
    assert found["live_parameters"] == pytest.approx(1.303e9, rel=1e-3)
    assert found["native"] == pytest.approx(1.196, abs=5e-4)
    assert found["native_variants"]["at the mean prompt"] == pytest.approx(1.184, abs=5e-4)
    assert found["somaspeed"] <= 1.035 and found["somaspeed_cached"] <= 0.442
    assert found["longest_prompt"]["somaspeed"] <= 1.045 and found["longest_prompt"]["somaspeed_cached"] <= 0.447
    assert found["tokens"] == {"somaspeed": 153, "native": 156}
    assert sum(found["somaspeed_split"].values()) == pytest.approx(found["somaspeed"])


@pytest.mark.parametrize("cached", [[], ["--cached"]])
def test_step_is_equal(tmp_path, cached):
    found = document(tmp_path, "step", "--size", "tiny", "--repeats", "2", *cached)
    assert found["loss_difference"] <= 1e-5 and found["gradient_difference"] <= 1e-5
    assert found["ratio_with_preparation"] > 1, "a generous floor: the tiny size is mostly overhead"


def test_published_depths_take_few_operations(sample_dir, monkeypatch):
    """Depths as published, widths of `tiny`, which do not matter here: the same count at every batch."""
    tiny, mid = SIZES["tiny"], SIZES["mid"]
    replace = msgspec.structs.replace
    vision = replace(tiny.vision, depth=mid.vision.depth, deepstack=mid.vision.deepstack)
    head = replace(tiny.head, depth=mid.head.depth, vl_depth=mid.head.vl_depth)
    language = replace(tiny.language, depth=mid.language.depth)
    monkeypatch.setitem(SIZES, "tiny", replace(tiny, vision=vision, language=language, head=head))
    found = []
    for batch, precision in ((2, "float32"), (5, "float32"), (2, "bfloat16")):
        problem = step.build("groot", "tiny", batch, torch.device("cpu"), str(sample_dir), precision)
        found.append(operations.counted(functools.partial(step.run_ours, problem, None)))
    assert found[0] == found[1] and found[0]["kernels"] == pytest.approx(3902, abs=100)
    assert all(count["scalar_syncs"] == count["size_syncs"] == 0 for count in found)
    assert found[2]["kernels"] == pytest.approx(5652, abs=100), "the head's weights are cast in every step"


def test_operations_do_not_grow_with_the_batch_and_never_wait(tmp_path):
    small, large = (document(tmp_path, "operations", "--batch", str(batch)) for batch in (2, 6))
    assert small["somaspeed"] == large["somaspeed"]
    assert small["somaspeed"]["scalar_syncs"] == small["somaspeed"]["size_syncs"] == 0
    assert large["native"]["kernels"] > small["native"]["kernels"] > small["somaspeed"]["kernels"]
    assert large["native"]["scalar_syncs"] > 0
