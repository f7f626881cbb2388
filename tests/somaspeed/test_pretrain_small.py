"""The stand-in for pretraining: all of the policy trains, and what is kept is its vision-language part."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from scripts.pretrain_small import EXPERT, EndToEnd, main
from somaspeed.train import main as train
from tests.conftest import ROOT
from tests.somaspeed.cases import first_batch, loaded_policy, tiny_config

CONFIG = str(ROOT / "configs" / "pi05" / "somaspeed-tiny.toml")
SHORT = ["training.steps=2", "training.microbatch=2", "training.warmup_steps=0", "data.held_out=0"]


def test_the_loss_is_the_policys_and_reaches_all_that_trains(sample):
    config = tiny_config()
    frozen = loaded_policy(config, sample)
    whole = EndToEnd(config, sample.manifest, torch.device("cpu"))
    whole.load()
    batch = first_batch(frozen, sample, [3, 200, 400])
    losses = []
    for policy in (frozen, whole):
        inputs = policy.prepare(batch)
        prefix = policy.prefix(inputs, policy.frozen(inputs))
        loss = policy.expert_loss(prefix, inputs, batch.extra["noise"], batch.extra["time"])
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    live = whole.live_parameters()
    assert set(frozen.live_parameters()) < set(live) and any("vision_tower" in name for name in live)
    assert [name for name, parameter in live.items() if parameter.grad is None] == []
    rest = [name for name, parameter in whole.module.named_parameters() if name not in live]
    assert all("lm_head" in name or "language_model" in name for name in rest)


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
