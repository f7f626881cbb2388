"""π0.5 in bf16 as the configuration says; the step neither waits for the device nor grows with the batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from somaspeed.policies.pi05 import PI05
from tests.somaspeed.cases import first_batch, loaded_policy, tiny_config
from tests.somaspeed.test_pi05_parity import native, native_inputs, our_loss, ours, worst

# Operators that read a device value on the host, or whose result's shape depends on values.
SYNCS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2"}


class Recorder(TorchDispatchMode):
    """Counts dispatched operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def recorded(policy: PI05, sample, size: int) -> Counter[str]:
    batch = first_batch(policy, sample, list(range(0, size * 7, 7)))
    policy.module.zero_grad(set_to_none=True)
    with Recorder() as recorder:
        our_loss(policy, batch, policy.prepare(batch)).backward()
    return recorder.names


def test_the_step_never_waits_and_its_operators_do_not_grow_with_the_batch(make_policy, sample):
    policy = make_policy()
    small, large = recorded(policy, sample, 2), recorded(policy, sample, 12)
    assert small == large
    assert not SYNCS & small.keys(), SYNCS & small.keys()
    with Recorder() as recorder:
        torch.ones(1).item()
    assert SYNCS & recorder.names.keys(), "the recorder must notice a sync"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bf16_compute_is_native_within_its_noise(sample, dtype):
    """Against native under autocast; the distance to fp32 is the yardstick."""
    policy = loaded_policy(tiny_config(model={"dtype": dtype}, training={"precision": "bfloat16"}), sample)
    batch = first_batch(policy, sample, [0, 60, 200, 400])
    exact, exact_gradient = native(loaded_policy(tiny_config(), sample), batch)
    if dtype == "float32":
        for name, original in policy.originals.items():  # native decides by the language model's weight dtype
            policy.module.get_parameter(name).data = original.clone()
    with policy.precision():
        loss, gradient = native(policy, batch)
    found, our_gradient = ours(policy, batch)
    noise = max(abs(loss - exact) / exact, 1e-3)
    assert abs(found - loss) / loss <= 2 * noise
    upcast = {name: g.float() for name, g in gradient.items()}
    assert worst(upcast, {name: g.float() for name, g in our_gradient.items()}) <= 2 * worst(exact_gradient, upcast)


def test_bf16_rounds_rotary_frequencies_as_lerobot_does(make_policy):
    narrow = make_policy(model={"dtype": "bfloat16"}).core.paligemma_with_expert.gemma_expert.model.rotary_emb.inv_freq
    wide = make_policy(model={"dtype": "float32"}).core.paligemma_with_expert.gemma_expert.model.rotary_emb.inv_freq
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, wide.to(torch.bfloat16))
    assert not torch.equal(narrow.float(), wide), "at these widths the rounding must matter"


def test_frozen_weights_in_bf16_give_the_same_bits_and_the_checkpoint_keeps_the_originals(sample, tmp_path):
    from safetensors.torch import load_file

    config = tiny_config(training={"precision": "bfloat16"})
    policy = loaded_policy(config, sample)
    assert policy.originals and all(not name.startswith("model.action") for name in policy.originals)
    inputs = policy.prepare(first_batch(policy, sample, [0, 60]))
    narrow = policy.frozen(inputs)
    policy.save(tmp_path, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, original in policy.originals.items():
        assert torch.equal(saved[name], original) and original.dtype == torch.float32
        policy.module.get_parameter(name).data = original.clone()
    assert torch.equal(policy.frozen(inputs), narrow)


def test_native_preprocessing_sees_the_same_pixels(make_policy, sample):
    """Our resize and scaling equal LeRobot's `_preprocess_images` bit for bit on real frames."""
    policy = make_policy()
    batch = first_batch(policy, sample, [0, 100, 300])
    theirs, masks = policy.module._preprocess_images(native_inputs(policy, batch))
    ours = policy.prepare(batch).images
    for camera in range(2):
        assert torch.equal(theirs[camera], ours[:, camera])
    assert not masks[2].any()
