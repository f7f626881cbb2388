"""MolmoAct2: loss and gradients equal LeRobot's own forward and backward on real frames, and wrong variants do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from lerobot.policies.molmoact2.modeling_molmoact2 import _expand_mask
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dataio.reader import ShardReader
from somaspeed.policies.molmoact2 import MolmoAct2
from somaspeed.policies.molmoact2.forward import Context, expert_velocity, flow_loss
from somaspeed.policies.molmoact2.sizes import SIZES, build_on_meta, model_config
from tests.somaspeed.cases import first_batch, loaded_policy
from tests.somaspeed.molmoact2_cases import (
    checkpointing,
    gradients,
    molmoact2_config,
    native,
    native_batch,
    our_loss,
    ours,
    worst,
)

TOLERANCE = 1e-5
# First and middle frames of tasks with prompts of other lengths, and two frames whose chunks leave the episode.
SAMPLES = [0, 60, 261, 520, 523]


@pytest.fixture(scope="module")
def policy(sample: ShardReader) -> MolmoAct2:
    return loaded_policy(molmoact2_config(model={"numerics": "native"}), sample)


@pytest.fixture(scope="module")
def reference(policy, sample) -> tuple[Any, float, dict[str, Tensor]]:
    """A batch of ragged prompts and chunks, and LeRobot's loss and gradients on it."""
    batch = first_batch(policy, sample, SAMPLES)
    assert len(set(batch.extra["lengths"].tolist())) > 1, "prompts must be ragged, so that LeRobot pads on the left"
    assert batch.is_pad["action"].sum() > 0, "some chunks must leave the episode"
    return batch, *native(policy, batch)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("enabled", [False, True])
def test_loss_and_gradients_equal_native(sample, seed, enabled):
    config = molmoact2_config(model={"numerics": "native"}, training={"seed": seed})
    policy = loaded_policy(config, sample)
    batch = first_batch(policy, sample, SAMPLES)
    with checkpointing(policy, enabled):
        loss, gradient = native(policy, batch)
    found, our_gradient = ours(policy, batch)
    assert abs(found - loss) <= TOLERANCE * loss
    assert worst(gradient, our_gradient) <= TOLERANCE
    assert gradient.keys() == policy.live_parameters().keys()


def test_mid_size_equals_native(sample):
    """Real token counts, both cameras: the image tokens of 378 pixels, left pads and a padded chunk.

    With LeRobot's checkpointing and without.
    """
    policy = loaded_policy(molmoact2_config("mid", model={"numerics": "native"}), sample)
    batch = first_batch(policy, sample, [0, 523])
    assert batch.extra["lengths"].tolist() == [496, 494]
    found, our_gradient = ours(policy, batch)
    for enabled in (False, True):
        with checkpointing(policy, enabled):
            loss, gradient = native(policy, batch)
        assert abs(found - loss) <= TOLERANCE * loss
        assert worst(gradient, our_gradient) <= TOLERANCE


@pytest.mark.parametrize("mistake", ["positions without the offset", "one image token masked", "two times swapped"])
def test_wrong_steps_are_noticed(policy, reference, mistake, monkeypatch):
    batch, loss, gradient = reference
    inputs = policy.prepare(batch)
    frozen = policy.frozen(inputs)
    prefix = policy.prefix(inputs, frozen)
    time = batch.extra["time"]
    if mistake == "positions without the offset":
        prefix = policy.prefix(inputs._replace(offset=torch.zeros_like(inputs.offset)), frozen)
    elif mistake == "one image token masked":
        seen = prefix.seen.clone()
        seen[:, policy.layout.image_rows[4]] = False
        prefix = prefix._replace(seen=seen)
    else:
        time = time.clone()
        time[0, [2, 5]] = time[0, [5, 2]]
    wrong = policy.expert_loss(prefix, inputs, batch.extra["noise"], time)
    assert abs(wrong.item() - loss) > TOLERANCE * loss
    assert worst(gradient, gradients(policy, wrong)) > 10 * TOLERANCE


def test_updates_follow_native(sample):
    """The same AdamW on LeRobot's gradients and on ours ends in the same weights."""
    finals, losses = [], []
    for step_of in (native, ours):
        policy = loaded_policy(molmoact2_config(model={"numerics": "native"}), sample)
        parameters = list(policy.live_parameters().values())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
        batch = first_batch(policy, sample, SAMPLES[1:4])
        history = []
        for _ in range(12):
            history.append(step_of(policy, batch)[0])
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        losses.append(history)
        finals.append({name: p.detach().clone() for name, p in policy.live_parameters().items()})
    assert losses[0][-1] < losses[0][0]
    assert max(abs(a - b) / a for a, b in zip(*losses, strict=True)) <= TOLERANCE
    assert worst(*finals) <= TOLERANCE


def test_default_numerics_are_the_samples_own(sample):
    """Without native's pads a sample's loss does not depend on its batch-mates, and equals native on it alone."""
    policy = loaded_policy(molmoact2_config(), sample)
    batch = first_batch(policy, sample, SAMPLES)
    alone = []
    for row, index in enumerate(SAMPLES):
        single = first_batch(policy, sample, [index])
        single.extra.update({key: batch.extra[key][row : row + 1] for key in ("noise", "time")})
        loss, _ = native(policy, single)
        found, _ = ours(policy, single)
        assert abs(found - loss) <= TOLERANCE * loss
        alone.append(found)
    together, _ = ours(policy, batch)
    assert together == pytest.approx(np.mean(alone), rel=TOLERANCE)
    ragged, _ = native(policy, batch)
    assert abs(together - ragged) > TOLERANCE * ragged, "native's left pads move the loss"


def test_prefix_needs_no_autograd_and_frozen_no_prompt(policy, reference):
    """The cached part depends on the images alone: another prompt leaves it as it is."""
    batch, *_ = reference
    inputs = policy.prepare(batch)
    other = inputs._replace(tokens=inputs.tokens.flip(0), lengths=inputs.lengths.flip(0))
    assert torch.equal(policy.frozen(inputs), policy.frozen(other))
    prefix = policy.prefix(inputs, policy.frozen(inputs))
    assert not any(tensor.requires_grad for layer in prefix.kv for tensor in layer)
    held = {tensor.untyped_storage().nbytes() / (tensor.numel() * 4) for layer in prefix.kv for tensor in layer}
    assert held == {1.0}, "keys and values must not keep larger tensors alive"


def test_padded_action_dimensions_do_not_matter(policy, reference):
    """Values in the dimensions that pad a 7-d action to 32 reach neither native's loss nor ours."""
    batch, loss, _ = reference
    prepared = native_batch(policy, batch)
    assert prepared["action"].shape[-1] == 32 and policy.prepare(batch).actions.shape[-1] == 7
    noise = torch.nn.functional.pad(batch.extra["noise"], (0, 25), value=1e6)
    prepared["action"][..., 8] = 1e6
    spoiled, _ = policy.module._compute_flow_matching_loss_joint_per_layer(
        batch=prepared,
        model_inputs=policy.module._model_inputs(prepared),
        timesteps=batch.extra["time"],
        noise=noise,
    )
    assert spoiled.item() == pytest.approx(loss, rel=1e-6)
    assert batch.extra["noise"].shape == (len(SAMPLES), 8, 10, 7)


def test_masking_padded_steps_leaves_them_out_of_sum_and_denominator():
    velocity, noise = torch.zeros(1, 2, 4, 7), torch.zeros(1, 2, 4, 7)
    actions = torch.ones(1, 4, 7)
    valid = torch.tensor([[True, True, True, False]])
    actions[0, 3] = 1e6
    assert flow_loss(velocity, actions, noise, valid, mask_padded=True).item() == 1.0
    assert flow_loss(velocity, actions, noise, valid, mask_padded=False).item() == 0.75, "native keeps the denominator"


class HostSyncs(TorchDispatchMode):
    """Counts operations that read a value or a data-dependent size: on a device the host would wait for each."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave.Tensor", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        masks = function in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.count += masks or name.startswith(self.NAMES)
        return function(*args, **(kwargs or {}))


def test_the_step_reads_no_value_on_the_host(policy, reference):
    batch, *_ = reference
    inputs = policy.prepare(batch)
    with HostSyncs() as syncs:
        our_loss(policy, batch, inputs).backward()
    assert syncs.count == 0
    with HostSyncs() as syncs:
        native(policy, batch)
    assert syncs.count > 50, "native must be counted, or the counter is blind"


def copied_velocity(core: Any, context: Context, noisy: Tensor, time: Tensor) -> Tensor:
    """LeRobot's own expert blocks with keys and values copied for every flow time, as its training forward does."""
    expert, times, steps = core.action_expert, noisy.shape[1], noisy.shape[2]
    valid = _expand_mask(context.valid[..., None].to(noisy.dtype), times)
    cross = _expand_mask(expert._build_cross_attention_mask(context.seen, len(noisy), noisy.dtype), times)
    inside = _expand_mask(expert._build_self_attention_mask(context.valid, steps, noisy.device, noisy.dtype), times)
    tables = expert.blocks[0].self_attn.rope.build_cache(seq_len=steps, device=noisy.device, dtype=noisy.dtype)
    condition = expert._time_conditioning(time.flatten())
    x = expert.action_embed(noisy.flatten(0, 1)) * valid
    for block, (key, value) in zip(expert.blocks, context.kv, strict=True):
        key = expert._project_kv_tensor(key, expert.context_k_proj)
        value = expert._project_kv_tensor(value, expert.context_v_proj)
        key = block.cross_attn.k_norm(key.transpose(1, 2)).transpose(1, 2)
        copies = (_expand_mask(key, times), _expand_mask(value, times))
        x = block(x, condition, cross_kv=copies, self_attn_mask=inside, attn_mask=cross, rope_cache=tables) * valid
    return (expert.final_layer(x, condition) * valid).view(noisy.shape)


def saved_bytes(core: Any, context: Context, step: Callable[..., Tensor], *arguments: Tensor) -> int:
    """Bytes that autograd keeps for the backward of `step`, parameters and the frozen prefix aside."""
    given = [*core.action_expert.parameters(), *(tensor for layer in context.kv for tensor in layer)]
    aside = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in aside:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = step(core, context, *arguments)
    del out
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_expert_keeps_two_fifths_of_what_copies_keep(dtype):
    """At the expert's published widths and token count, one of its layers, two samples."""
    full = SIZES["full"]
    text = msgspec.structs.replace(full.text, width=64, mlp_dim=64, depth=1)
    core = build_on_meta(model_config(msgspec.structs.replace(full, text=text, vocabulary=64), {})).model
    core.action_expert.to(dtype).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in core.action_expert.parameters():
        parameter.data.normal_(0, 0.02)
    kv = [(torch.randn(2, 496, 1024, dtype=dtype), torch.randn(2, 496, 1024, dtype=dtype))]
    context = Context(kv, torch.ones(2, 496, dtype=torch.bool), torch.ones(2, 10, dtype=torch.bool))
    arguments = torch.randn(2, 8, 10, 32, dtype=dtype), torch.rand(2, 8, dtype=dtype)
    folded, copied = (step(core, context, *arguments) for step in (expert_velocity, copied_velocity))
    torch.testing.assert_close(folded, copied)
    ratio = saved_bytes(core, context, expert_velocity, *arguments) / saved_bytes(
        core, context, copied_velocity, *arguments
    )
    assert ratio <= 0.4
