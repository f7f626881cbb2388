"""π0.5: loss and gradients equal LeRobot's own forward and backward on real frames, and wrong variants do not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dataio.batch import Batch
from dataio.reader import ShardReader
from somaspeed.policies.pi05.forward import expert_velocity, flow_loss, prefix_kv
from somaspeed.policies.pi05.policy import PI05, Inputs
from tests.somaspeed.cases import first_batch, loaded_policy, tiny_config

TOLERANCE = 1e-5


def native_inputs(policy: PI05, batch: Batch) -> dict[str, Any]:
    """What LeRobot's loader and pre-processor hand to `PI05Policy.forward` for the same samples."""
    raw = {
        "observation.state": batch.columns["observation.state"],
        "action": batch.columns["action"],
        "task": [policy.tasks[task] for task in batch.task.tolist()],
    }
    for camera in policy.cameras:
        raw[f"observation.images.{camera}"] = batch.images[camera].permute(0, 3, 1, 2).float() / 255
    return policy.preprocessor(raw)


def gradients(policy: PI05, loss: Tensor) -> dict[str, Tensor]:
    policy.module.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.module.named_parameters() if p.grad is not None}


def native(policy: PI05, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    core = policy.module.model
    noise, time = batch.extra["noise"], batch.extra["time"]
    with (
        mock.patch.object(core, "sample_noise", lambda shape, device: noise),
        mock.patch.object(core, "sample_time", lambda size, device: time),
    ):
        loss, _ = policy.module.forward(native_inputs(policy, batch))
    return loss.item(), gradients(policy, loss)


def our_loss(policy: PI05, batch: Batch, inputs: Inputs) -> Tensor:
    prefix = policy.prefix(inputs, policy.frozen(inputs))
    return policy.expert_loss(prefix, inputs, batch.extra["noise"], batch.extra["time"])


def ours(policy: PI05, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    inputs = policy.prepare(batch)
    loss = policy.expert_loss(
        policy.prefix(inputs, policy.frozen(inputs)), inputs, batch.extra["noise"], batch.extra["time"]
    )
    return loss.item(), gradients(policy, loss)


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative L2 difference over all gradient tensors."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / a[name].norm()).item() for name in a)


@pytest.fixture(scope="module")
def batch_samples(sample: Any) -> list[int]:
    """First and middle frames of different tasks, and two frames whose chunks leave the episode."""
    last = len(sample) - 1
    ragged = [0, 60, last // 2, last - 3, last]
    return ragged


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("empty_cameras", [0, 1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_equal_native(sample, batch_samples, seed, empty_cameras, checkpointing):
    config = tiny_config(model={"empty_cameras": empty_cameras}, training={"seed": seed})
    policy = loaded_policy(config, sample)
    if checkpointing:
        policy.module.model.gradient_checkpointing_enable()
    batch = first_batch(policy, sample, batch_samples)
    assert len(set(batch.extra["lengths"].tolist())) > 1, "prompts must be ragged for the pads to matter"
    loss, gradient = native(policy, batch)
    found, our_gradient = ours(policy, batch)
    assert abs(found - loss) <= TOLERANCE * loss
    assert worst(gradient, our_gradient) <= TOLERANCE
    assert gradient.keys() == policy.live_parameters().keys()


def by_length(policy: PI05, sample: ShardReader) -> dict[int, list[int]]:
    """Every eighth frame, by the length of its prompt."""
    ids = list(range(0, len(sample), 8))
    lengths = first_batch(policy, sample, ids).extra["lengths"].tolist()
    return {length: [i for i, n in zip(ids, lengths, strict=True) if n == length] for length in set(lengths)}


def test_equal_prompts_need_no_pads_and_agree(sample):
    policy = loaded_policy(tiny_config(), sample)
    alike = max(by_length(policy, sample).values(), key=len)[:4]
    batch = first_batch(policy, sample, alike)
    assert len(alike) == 4 and len(set(batch.extra["lengths"].tolist())) == 1
    loss, gradient = native(policy, batch)
    found, our_gradient = ours(policy, batch)
    assert abs(found - loss) <= TOLERANCE * loss and worst(gradient, our_gradient) <= TOLERANCE


def test_real_depths_and_token_counts_agree(sample):
    """At `mid`: 18 layers, 27 vision layers, 576 prefix tokens, an empty camera, ragged prompts."""
    policy = loaded_policy(tiny_config(model={"size": "mid"}), sample)
    short, *_, long = sorted(by_length(policy, sample).items())
    batch = first_batch(policy, sample, [short[1][0], long[1][0]])
    loss, gradient = native(policy, batch)
    found, our_gradient = ours(policy, batch)
    assert abs(found - loss) <= TOLERANCE * loss and worst(gradient, our_gradient) <= TOLERANCE


@pytest.mark.parametrize("mistake", ["drop one valid token", "keep one pad", "include the empty camera"])
def test_wrong_prefixes_are_noticed(sample, batch_samples, mistake):
    policy = loaded_policy(tiny_config(), sample)
    batch = first_batch(policy, sample, batch_samples)
    loss, gradient = native(policy, batch)
    inputs = policy.prepare(batch)
    if mistake == "drop one valid token":
        inputs = inputs._replace(lengths=inputs.lengths - 1)
    elif mistake == "keep one pad":
        inputs = inputs._replace(lengths=inputs.lengths + 1)
    else:
        empty = torch.full_like(inputs.images[:, :1], -1)
        patches = inputs.lengths[0] - batch.extra["lengths"][0]
        inputs = inputs._replace(images=torch.cat([inputs.images, empty], dim=1), lengths=inputs.lengths + patches // 2)
    wrong = policy.expert_loss(
        policy.prefix(inputs, policy.frozen(inputs)), inputs, batch.extra["noise"], batch.extra["time"]
    )
    assert abs(wrong.item() - loss) > TOLERANCE * loss
    assert worst(gradient, gradients(policy, wrong)) > 10 * TOLERANCE


def test_thirty_updates_follow_native(sample, batch_samples):
    """The same AdamW on LeRobot's gradients and on ours ends in the same weights."""
    finals, losses = [], []
    for step_of in (native, ours):
        policy = loaded_policy(tiny_config(), sample)
        parameters = list(policy.live_parameters().values())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
        batch = first_batch(policy, sample, batch_samples)
        history = []
        for _ in range(30):
            history.append(step_of(policy, batch)[0])
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        losses.append(history)
        finals.append({name: p.detach().clone() for name, p in policy.live_parameters().items()})
    assert losses[0][-1] < losses[0][0]
    assert max(abs(a - b) / a for a, b in zip(*losses, strict=True)) <= TOLERANCE
    assert worst(*finals) <= TOLERANCE


def test_padding_action_dimensions_do_not_matter(make_policy, sample, batch_samples):
    """Values in the dimensions that pad a 7-d action to 32 change neither loss nor gradients."""
    policy = make_policy()
    batch = first_batch(policy, sample, batch_samples)
    inputs = policy.prepare(batch)
    kv = policy.prefix(inputs, policy.frozen(inputs))
    noise, time = batch.extra["noise"], batch.extra["time"]
    velocity = expert_velocity(policy.core, kv.kv, kv.lengths, noise, time)
    spoiled = inputs.actions.clone()
    spoiled[..., 8] = 1e6
    assert flow_loss(velocity, inputs.actions, noise, 7, None) == flow_loss(velocity, spoiled, noise, 7, None)
    assert flow_loss(velocity, inputs.actions, noise, 9, None) != flow_loss(velocity, spoiled, noise, 9, None)


def test_masking_padded_steps_leaves_them_out_of_sum_and_denominator():
    velocity, noise = torch.zeros(1, 4, 7), torch.zeros(1, 4, 7)
    actions = torch.ones(1, 4, 7)
    pad = torch.tensor([[False, False, False, True]])
    spoiled = actions.clone()
    spoiled[0, 3] = 1e6
    assert flow_loss(velocity, spoiled, noise, 7, pad).item() == 1.0
    assert flow_loss(velocity, spoiled, noise, 7, None).item() > 1e9


def test_prefix_needs_no_autograd_and_is_the_same_for_batch_mates(make_policy, sample, batch_samples):
    """A sample's prefix is a function of the sample alone."""
    policy = make_policy()
    together = policy.prepare(first_batch(policy, sample, batch_samples))
    alone = policy.prepare(first_batch(policy, sample, batch_samples[:1]))
    kv_together = prefix_kv(policy.core, together.images, together.tokens, together.lengths)
    kv_alone = prefix_kv(policy.core, alone.images, alone.tokens, alone.lengths)
    assert not kv_together.requires_grad
    valid = int(alone.lengths[0])
    torch.testing.assert_close(kv_together[:1, :, :, :valid], kv_alone[:, :, :, :valid], rtol=1e-4, atol=1e-5)
