"""The doctor on a policy that has learnt to see, and on the same checkpoint deliberately broken in one way each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dataio.reader import ShardReader
from somaspeed.actor import Actor
from somaspeed.checkpoint import CheckpointError
from somaspeed.doctor.cli import main
from somaspeed.doctor.images import check_images
from somaspeed.doctor.replay import Frames, correlation, dimensions
from somaspeed.train import main as train
from tests.conftest import ROOT
from tests.dataio.tiny_shards import make_shards
from tests.somaspeed.seeing import write_world

CONFIG = ROOT / "configs" / "pi05" / "somaspeed-tiny.toml"
RECIPE = (
    "model.empty_cameras=0 model.chunk_size=4 model.n_action_steps=4 model.num_inference_steps=3 training.steps=400 "
    "training.decay_steps=400 training.lr=4e-3 training.log_every=50 prefix.cache=memory data.held_out=0"
).split()

CHECKS = {"key map", "statistics", "tokenizer", "round trip", "error", "sign", "orientation", "cameras"}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Callable[..., Path]:
    """Shards of the small world, with the faults that are asked for."""
    root = tmp_path_factory.mktemp("worlds")

    def make(name: str = "plain", **faults) -> Path:
        shards = root / f"{name}-shards"
        if not shards.exists():
            make_shards(write_world(root / name, **faults), shards, samples_per_shard=96)
        return shards

    return make


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory) -> Path:
    """A checkpoint of the product's own training that acts by what it sees."""
    output = tmp_path_factory.mktemp("trained") / "run"
    torch.set_num_threads(1)
    assert train(["--config", str(CONFIG), "--shards", str(world()), f"output={output}", *RECIPE]) == 0
    return output / "checkpoints" / "last" / "pretrained_model"


@pytest.fixture
def broken(trained, tmp_path) -> Path:
    """A copy of the checkpoint, to be broken."""
    return shutil.copytree(trained, tmp_path / "broken")


def examine(checkpoint: Path, shards: Path, tmp_path: Path) -> tuple[int, dict]:
    """The command's exit code, and its problems as {check: text}, with everything else under `result`."""
    file = tmp_path / "doctor.json"
    code = main(["--checkpoint", str(checkpoint), "--shards", str(shards), "--frames", "32", "--json", str(file)])
    result = json.loads(file.read_text())
    problems = {f["check"]: f["text"] for f in result["findings"] if f["level"] == "problem"}
    return code, {"result": result, **problems}


def test_a_healthy_checkpoint_passes(trained, world, tmp_path, capsys):
    code, found = examine(trained, world(), tmp_path)
    result = found.pop("result")
    assert code == 0 and not found
    assert {finding["check"] for finding in result["findings"] if finding["level"] == "ok"} == CHECKS
    assert [row["name"] for row in result["dimensions"]] == ["x", "y", "z", "gripper"]
    assert all(row["error"] < 0.9 * row["constant"] for row in result["dimensions"])
    assert "constant mean" in capsys.readouterr().out


def test_flipped_images_are_named(trained, world, tmp_path):
    code, found = examine(trained, world("flipped", flip=True), tmp_path)
    assert code == 1 and "flipped upside down" in found["orientation"] and "cameras" not in found


def test_swapped_cameras_are_named(broken, world, tmp_path):
    origin = json.loads((broken / "somaspeed.json").read_text())
    origin["data.map"] = {"image": "image2", "image2": "image"}
    (broken / "somaspeed.json").write_text(json.dumps(origin))
    code, found = examine(broken, world(), tmp_path)
    assert code == 1 and "swapped between cameras" in found["cameras"] and "orientation" not in found


def edit_statistics(checkpoint: Path, pattern: str, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    files = list(checkpoint.glob(pattern))
    assert files
    for file in files:
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)


def test_a_wrong_gripper_sign_in_the_post_processor_is_named(broken, world, tmp_path):
    def mirror(tensors: dict[str, torch.Tensor]) -> None:
        low, high = tensors["action.q01"].clone(), tensors["action.q99"].clone()
        tensors["action.q01"][3], tensors["action.q99"][3] = high[3], low[3]

    edit_statistics(broken, "policy_postprocessor*unnormalizer*.safetensors", mirror)
    code, found = examine(broken, world(), tmp_path)
    assert code == 1
    assert "the gripper action dimension 3 (gripper) comes back with the wrong sign" in found["round trip"]
    assert "the gripper action dimension 3 (gripper) has the wrong sign" in found["sign"]


def test_a_gripper_learnt_with_the_wrong_sign_is_named(trained, world, tmp_path):
    code, found = examine(trained, world("gripper", gripper=-1.0), tmp_path)
    assert code == 1 and "the gripper action dimension 3 (gripper) has the wrong sign" in found["sign"]
    assert "round trip" not in found, "the processors belong together; it is the policy that is wrong"


def test_statistics_of_another_dataset_are_named(broken, world, tmp_path):
    other = ShardReader(world("large", scale=10.0)).manifest.statistics

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        for key, statistics in other.items():
            for kind in ("mean", "std", "min", "max", "q01", "q99"):
                tensors[f"{key}.{kind}"] = torch.tensor(getattr(statistics, kind))

    edit_statistics(broken, "*normalizer*.safetensors", exchange)
    code, found = examine(broken, world(), tmp_path)
    assert code == 1 and "statistics of another dataset" in found["statistics"]
    assert "trained on these very shards" in found["statistics"]
    assert "error" in found, "and its actions are ten times too large"


def test_missing_cameras_and_files_are_refused_with_the_closest_name(broken, world, tmp_path, capsys):
    origin = json.loads((broken / "somaspeed.json").read_text())
    origin["data.map"] = {"imagee": "image", "image2": "image2"}
    (broken / "somaspeed.json").write_text(json.dumps(origin))
    code, found = examine(broken, world(), tmp_path)
    assert code == 1 and "did you mean 'image'" in found["key map"] and found["result"]["dimensions"] == []
    (broken / "policy_postprocessor.json").unlink()
    assert main(["--checkpoint", str(broken), "--shards", str(world())]) == 2
    assert str(broken) in capsys.readouterr().err


def damage(name: str) -> Callable[[Path], object]:
    """What is done to the weights of a checkpoint."""

    def truncate(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:100_000])

    def rewrite(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
        return lambda file: save_file(change(load_file(file)), file)

    def other_shape(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value[:-1].clone() if "action_out_proj" in key else value for key, value in tensors.items()}

    return {
        "truncated": truncate,
        "deleted": Path.unlink,
        "renamed": rewrite(lambda tensors: {f"x.{key}": value for key, value in tensors.items()}),
        "incomplete": rewrite(lambda tensors: {k: v for k, v in tensors.items() if "action_out_proj" not in k}),
        "other shape": rewrite(other_shape),
    }[name]


@pytest.mark.parametrize("name", ["truncated", "deleted", "renamed", "incomplete", "other shape"])
def test_weights_that_lerobot_would_pass_over_are_refused(name, broken, world, capsys):
    damage(name)(broken / "model.safetensors")
    assert main(["--checkpoint", str(broken), "--shards", str(world())]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_a_reduced_policy_whose_size_is_not_known_is_refused_before_it_is_built(broken, world, capsys):
    (broken / "somaspeed.json").unlink()
    assert main(["--checkpoint", str(broken), "--shards", str(world())]) == 2
    assert "counts as one of the published size" in capsys.readouterr().err


def test_a_tokenizer_that_was_left_behind_is_missed(broken, world, capsys):
    shutil.rmtree(broken / "tokenizer")
    assert main(["--checkpoint", str(broken), "--shards", str(world())]) == 2
    assert "its tokenizer/ is missing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", '{"type": "pi05", "chunk_size": "many"}', '{"type": "pi05", "nonsense": 1}'])
def test_a_configuration_that_is_none_is_refused(text, broken, world, capsys):
    (broken / "config.json").write_text(text)
    assert main(["--checkpoint", str(broken), "--shards", str(world())]) == 2
    assert "LeRobot cannot load it" in capsys.readouterr().err


def test_actions_that_are_not_numbers_are_named(broken, world, tmp_path):
    weights = load_file(broken / "model.safetensors")
    next(value for key, value in weights.items() if key.endswith("action_out_proj.weight"))[0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors")
    code, found = examine(broken, world(), tmp_path)
    assert code == 1 and "not all finite" in found["error"] and found["result"]["dimensions"] == []


def test_the_actor_does_what_lerobot_does(trained):
    """The first action equals `select_action` behind the same processors, and depends on nothing but its seed."""
    actor = Actor(trained)
    image = np.random.default_rng(0).integers(0, 255, (2, 56, 56, 3), np.uint8)
    images, state = {"image": image[0], "image2": image[1]}, np.array([0.3, -0.4], np.float32)
    actions = actor.act(images, state, "look here", seed=5)
    assert actions.shape == (4, 4) and np.array_equal(actions, actor.act(images, state, "look here", seed=5))
    assert not np.array_equal(actions, actor.act(images, state, "look here", seed=6))
    observation = {
        "observation.images.image": torch.from_numpy(image[0]).permute(2, 0, 1) / 255,
        "observation.images.image2": torch.from_numpy(image[1]).permute(2, 0, 1) / 255,
        "observation.state": torch.from_numpy(state),
        "task": "look here",
    }
    actor.policy.reset()
    torch.manual_seed(5)
    expected = actor.postprocessor(actor.policy.select_action(actor.preprocessor(observation)))
    np.testing.assert_allclose(actions[:1], expected.numpy(), rtol=0, atol=1e-6)
    with pytest.raises(CheckpointError, match="chunks have 4 actions"):
        Actor(trained, n_action_steps=5)
    assert Actor(trained, flow_steps=7).policy.config.num_inference_steps == 7


def test_a_blind_policy_is_called_blind():
    generator = np.random.default_rng(0)
    frames = Frames(
        {"image": generator.integers(0, 255, (16, 8, 8, 3), np.uint8)},
        generator.random((16, 2), np.float32),
        ["task"] * 16,
        generator.standard_normal((16, 3, 2)).astype(np.float32),
        np.ones((16, 3), bool),
    )

    def blind(images, state, tasks, seed):
        return np.zeros((len(state), 3, 2), np.float32)

    predicted = np.zeros((16, 3, 2), np.float32)
    (finding,) = check_images(blind, frames, predicted, 0)
    assert finding.level == "note" and "make no difference" in finding.text
    rows = dimensions(predicted, frames, np.zeros(2), ["a", "b"])
    assert [row.error for row in rows] == pytest.approx([row.constant for row in rows])
    assert rows[0].correlation == 0


def test_correlation():
    a = np.arange(10.0)
    assert correlation(a, 3 - 2 * a) == pytest.approx(-1) and correlation(a, np.ones(10)) == 0
