"""The stand-in for pretraining: all of the policy trains, and what is kept is its vision-language part."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file

from scripts.pretrain_small import DRAWS, EXPERT, EndToEnd, main, shifted
from somaspeed.config import load_config
from somaspeed.policies.pi05.bench import native_losses
from somaspeed.policies.pi05.policy import STATE_BINS
from somaspeed.train import main as train
from tests.conftest import ROOT
from tests.somaspeed.cases import first_batch, loaded_policy, tiny_config


def generators(count):
    return [np.random.default_rng(seed) for seed in range(count)]


def worst(ours, theirs):
    """The largest relative distance between gradients of the same parameter; a key's bias has none but rounding."""
    names = [name for name in theirs if not name.endswith("k_proj.bias")]
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in names)


CONFIG = str(ROOT / "configs" / "pi05" / "somaspeed-tiny.toml")
SHORT = ["training.steps=2", "training.microbatch=2", "training.warmup_steps=0", "data.held_out=0"]


def test_the_loss_is_the_policys_and_reaches_all_that_trains(sample):
    config = tiny_config()
    frozen = loaded_policy(config, sample)
    whole = EndToEnd(config, sample.manifest, torch.device("cpu"))
    whole.load()
    whole.shift = 0
    batch = first_batch(frozen, sample, [3, 200, 400])
    inputs = whole.prepare(batch)
    noise, time = (torch.from_numpy(np.stack(drawn)) for drawn in zip(*map(whole.draw, generators(3)), strict=True))
    live = whole.live_parameters()
    assert set(frozen.live_parameters()) < set(live) and any("vision_tower" in name for name in live)

    def gradients(loss):
        whole.module.zero_grad()
        loss.backward()
        assert [name for name, parameter in live.items() if parameter.grad is None] == []
        return {name: parameter.grad.clone() for name, parameter in live.items()}

    def native(draws):
        return torch.stack(
            [native_losses(whole.core, 0, inputs, noise[:, i], time[:, i], inputs.tokens.shape[1]) for i in draws]
        ).mean()

    loss = whole.expert_loss(whole.prefix(inputs, whole.frozen(inputs)), inputs, noise, time)
    expected = native(range(DRAWS))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    ours, upstream, fewer = gradients(loss), gradients(expected), gradients(native(range(DRAWS - 1)))
    assert worst(ours, upstream) < 1e-4 < 1e-2 < worst(ours, fewer)
    rest = [name for name, parameter in whole.module.named_parameters() if name not in live]
    assert all("lm_head" in name or "language_model" in name for name in rest)


def test_images_are_shifted_alike_for_the_same_draws():
    images = torch.rand(3, 2, 3, 20, 20)
    times = torch.rand(3, 2)
    moved = shifted(images, 4, times)
    assert torch.equal(moved, shifted(images, 4, times)) and not torch.equal(moved, shifted(images, 4, times / 2))
    assert torch.equal(images, shifted(images, 0, times))
    offsets = set()
    for before, after in zip(images.flatten(0, 1), moved.flatten(0, 1), strict=True):
        inside = after[:, 4:-4, 4:-4]
        places = [(y, x) for y in range(9) for x in range(9) if torch.equal(inside, before[:, y : y + 12, x : x + 12])]
        assert len(places) == 1
        offsets.add(places[0])
    assert len(offsets) > 3


def test_the_vision_language_part_is_kept_with_a_fresh_expert(sample_dir, tmp_path, capsys):
    output = tmp_path / "run"
    assert main(["--config", CONFIG, "--shards", str(sample_dir), f"output={output}", *SHORT]) == 0
    assert "did not reach" not in capsys.readouterr().err
    trained = load_file(output / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")
    kept = load_file(output / "pretrained" / "model.safetensors")
    for name in trained:
        is_expert = any(part in name for part in EXPERT)
        assert torch.equal(trained[name], kept[name]) == (not is_expert), name
    arguments = ["--config", CONFIG, "--shards", str(sample_dir), f"output={tmp_path / 'tuned'}"]
    assert train([*arguments, f"model.path={output / 'pretrained'}", *SHORT]) == 0
    tuned = load_file(tmp_path / "tuned" / "checkpoints" / "last" / "pretrained_model" / "model.safetensors")
    changed = {name for name in kept if not torch.equal(kept[name], tuned[name])}
    assert changed and all(any(part in name for part in EXPERT) for name in changed)


def test_the_small_policy_reads_each_number_of_its_state_as_one_token_close_numbers_alike(sample):
    config = load_config(ROOT / "configs" / "pi05" / "small-pretraining.toml")
    policy = EndToEnd(config, sample.manifest, torch.device("cpu"))
    tokens = [policy.tokenizer.encode(f" {number}", add_special_tokens=False) for number in STATE_BINS]
    assert {len(token) for token in tokens} == {1} and len({token[0] for token in tokens}) == len(STATE_BINS)
    for task in policy.tasks:
        prompt = f"Task: {task}, State: 3 -1 255 127 0 64 200 9;\nAction: "
        ids = policy.tokenizer.encode(prompt)
        assert len(ids) <= config.prefix.buckets[0]
        assert policy.tokenizer.decode(ids, skip_special_tokens=True) == prompt
    tiny = loaded_policy(tiny_config(), sample).tokenizer
    assert len(tiny.encode(" 127", add_special_tokens=False)) > 2, "as published, a token for each digit"
    policy.load()
    embedding = policy.core.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight
    rows = embedding[[token[0] for token in tokens]]
    distance = (rows[100] - rows).norm(dim=1)
    assert distance[101] < distance[103] < distance[110] and distance[200:].min() > distance[103]
