"""GR00T's images against what they stand in for: LeRobot's and transformers' patches, torchvision's jitter."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as torchvision
from torch import Tensor

from dataio.batch import Batch
from somaspeed.policies.base import PolicyError
from somaspeed.policies.groot.images import (
    OPERATIONS,
    Jitter,
    JitterRanges,
    draw_jitter,
    fit,
    jittered,
    normalize,
    patchify,
)
from tests.somaspeed.cases import first_batch, loaded_policy
from tests.somaspeed.groot_cases import groot_config, native_inputs

JITTER = {"brightness": 0.3, "contrast": 0.4, "saturation": 0.5, "hue": 0.08}
REFERENCE = {name: getattr(torchvision, f"adjust_{name}") for name in OPERATIONS}
SAMPLES = [0, 66, 220, 520, 523]  # the second is 14 frames before the end of its episode, the last two near it


def in_qwen_order(patches: Tensor) -> Tensor:
    """Our patches [N, P, 768] (row, column, channel) as [N, P, channel, row · column]."""
    return patches.unflatten(-1, (256, 3)).transpose(-1, -2)


@pytest.mark.parametrize("mistake", ["", "no crop", "cameras swapped"])
def test_patches_equal_those_of_lerobots_processor(sample, mistake):
    policy = loaded_policy(groot_config(), sample)
    batch = first_batch(policy, sample, SAMPLES)
    native = native_inputs(policy, batch)["pixel_values"].view(2 * len(SAMPLES), -1, 3, 2, 256)
    if mistake == "no crop":
        policy.crop = policy.resolution
    elif mistake == "cameras swapped":
        policy.cameras = policy.cameras[::-1]
    images = policy.prepare(batch).images
    found = in_qwen_order(normalize(patchify(images.flatten(0, 1))))
    difference = max((native[:, :, :, frame] - found).abs().max().item() for frame in (0, 1))
    assert (difference > 0.1) if mistake else (difference <= 1e-6)


def test_prompts_states_and_actions_equal_those_of_lerobots_processor(sample):
    """Also for horizon 16, which is padded to 40 and masked, and in the step past the end of an episode."""
    policy = loaded_policy(groot_config(model={"chunk_size": 16}), sample)
    batch = first_batch(policy, sample, SAMPLES)
    native, inputs = native_inputs(policy, batch), policy.prepare(batch)
    fixed = policy.prompts.layout.fixed
    for row, (length, text) in enumerate(zip(inputs.lengths.tolist(), inputs.text, strict=True)):
        ours = torch.cat([fixed, text])[:length]
        assert torch.equal(native["input_ids"][row, -length:], ours) and native["attention_mask"][row].sum() == length
    assert torch.equal(native["state"], inputs.state) and torch.equal(native["action"], inputs.actions)
    assert inputs.actions.shape == (len(SAMPLES), 40, 132) and inputs.valid.sum(1).tolist() == [16, 14, 16, 4, 1]
    assert torch.equal(native["action_mask"][:, :16, 0], inputs.valid) and not native["action_mask"][:, 16:].any()
    assert inputs.actions.abs().max() <= 1


@pytest.fixture
def pictures(sample) -> Tensor:
    policy = loaded_policy(groot_config(), sample)
    batch = first_batch(policy, sample, SAMPLES)
    frames = torch.cat([batch.images[camera] for camera in policy.cameras])
    return fit(frames, 64, 58).unflatten(0, (2, -1)).transpose(0, 1)


def test_jitter_equals_torchvisions(pictures):
    generators = [np.random.default_rng(seed) for seed in range(len(pictures))]
    jitter = draw_jitter(JitterRanges(**JITTER), generators)
    found = jittered(pictures, jitter)
    orders = set()
    for row in range(len(pictures)):
        names = [next(n for n in OPERATIONS if row in jitter.turns[turn][n].tolist()) for turn in range(4)]
        orders.add(tuple(names))
        for camera in range(2):
            expected = pictures[row, camera].permute(2, 0, 1).contiguous()
            for name in names:
                expected = REFERENCE[name](expected, float(jitter.factors[OPERATIONS.index(name), row]))
            difference = (expected.permute(1, 2, 0).int() - found[row, camera].int()).abs()
            # Float rounding may fall on the other side of a whole number, and later operations may double that.
            assert difference.max() <= 3 and (difference > 0).float().mean() < 0.01
    assert len(orders) > 1, "the order of the operations must vary for this to test it"
    assert (found != pictures).float().mean() > 0.5


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_alone(pictures, name):
    factors = torch.tensor([1.0, 1.0, 1.0, 0.0])[:, None].repeat(1, len(pictures))
    factors[OPERATIONS.index(name)] = torch.tensor([0.07, -0.07, 0.03, 0.5, -0.5]) + (name != "hue")
    everybody, nobody = torch.arange(len(pictures)), torch.arange(0)
    turns = {0: {other: everybody if other == name else nobody for other in OPERATIONS}}
    found = jittered(pictures, Jitter(factors, turns))
    for row, picture in enumerate(pictures.permute(0, 1, 4, 2, 3)):
        expected = REFERENCE[name](picture.contiguous(), float(factors[OPERATIONS.index(name), row]))
        difference = (expected.permute(0, 2, 3, 1).int() - found[row].int()).abs()
        assert difference.max() <= 1 and (difference > 0).float().mean() < 0.005


def test_jitter_depends_on_the_place_in_the_run_alone_and_is_for_training(sample):
    policy = loaded_policy(groot_config(model={"color_jitter_params": JITTER}), sample)
    plain = loaded_policy(groot_config(), sample)

    def images(samples: list[int]) -> Tensor:
        return policy.prepare(first_batch(policy, sample, samples)).images

    batch: Batch = first_batch(plain, sample, SAMPLES)
    first, again = images(SAMPLES), images(SAMPLES)
    assert torch.equal(first, again)
    assert torch.equal(first[:3], images(SAMPLES[:3])), "batch-mates must not matter"
    assert not torch.equal(images([5, 6])[0], images([6, 5])[1]), "another place must jitter differently"
    with torch.no_grad():
        assert torch.equal(images(SAMPLES), plain.prepare(batch).images), "no jitter in evaluation"
    assert not torch.equal(first, plain.prepare(batch).images)


def test_a_recipe_that_jitters_refuses_the_prefix_cache(sample):
    with pytest.raises(PolicyError, match="jitters colours"):
        loaded_policy(groot_config(model={"color_jitter_params": JITTER}, prefix={"cache": "memory"}), sample)
    with pytest.raises(PolicyError, match="padding depends on the batch"):
        loaded_policy(groot_config(prefix={"cache": "memory"}), sample)


def test_preprocessing_is_much_cheaper_than_lerobots(sample):
    """At the published resolution: ours within 1.5 ms of CPU a sample, give or take a busy machine, and far below."""
    policy = loaded_policy(groot_config(model={"size": "tiny"}), sample)
    policy.resolution, policy.crop = 256, 230
    batch = first_batch(policy, sample, SAMPLES[:4])

    def ours() -> None:
        policy.host(batch)
        normalize(patchify(policy.prepare(batch).images.flatten(0, 1)))

    def best(function) -> float:
        function()
        seconds = []
        for _ in range(5):
            started = time.process_time()
            function()
            seconds.append((time.process_time() - started) / len(batch))
        return min(seconds)

    assert best(ours) < 3e-3 and best(ours) < 0.5 * best(lambda: native_inputs(policy, batch))
