"""MolmoAct2: images, prompts and augmentation on the device are those of LeRobot's and torchvision's CPU code."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lerobot.policies.molmoact2.molmoact2_hf_model.image_processing_molmoact2 import MolmoAct2ImageProcessor
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from dataio.batch import Batch
from dataio.loader import batches
from dataio.reader import ShardReader
from somaspeed.policies.molmoact2 import MolmoAct2
from somaspeed.policies.molmoact2.augmentation import NAMES, ImageAugmentation, changed
from somaspeed.policies.molmoact2.images import patches, pooling_index, resize, resize_exactly, unpatch
from tests.somaspeed.cases import first_batch, loaded_policy
from tests.somaspeed.molmoact2_cases import molmoact2_config, native_batch

SIDE, PATCH = 378, 14  # of the published model


@pytest.fixture(scope="module")
def policy(sample: ShardReader) -> MolmoAct2:
    return loaded_policy(molmoact2_config(model={"numerics": "native"}), sample)


def all_frames(sample: ShardReader) -> Iterator[Tensor]:
    """Every frame of both cameras, uint8 [N, 256, 256, 3], some at a time."""
    for batch in batches(sample, np.arange(len(sample)), windows={}, cameras=["image", "image2"], microbatch=4):
        yield torch.cat([batch.images["image"], batch.images["image2"]])


def test_all_patches_of_the_sample_are_the_native_processors(sample):
    """At the published resolution, bit for bit: the uint8 patches, and the floats that the model makes of them."""
    processor = MolmoAct2ImageProcessor(crop_mode="resize")
    count, wrong, ours_seconds, native_seconds = 0, 0, 0.0, 0.0
    for frames in all_frames(sample):
        started = time.process_time()
        found = patches(resize(frames, SIDE), PATCH)
        between = time.process_time()
        native = processor([frame.numpy() for frame in frames], return_tensors="pt")
        native_seconds += time.process_time() - between
        ours_seconds += between - started
        wrong += int((found.float() / 255 * 2 - 1 != native["pixel_values"]).sum())
        count += len(frames)
    assert (count, wrong) == (1048, 0)
    assert torch.equal(native["image_token_pooling"], pooling_index(SIDE // PATCH).repeat(len(frames), 1))
    assert native["image_grids"][0].tolist() == [14, 14, 0, 0]
    assert native["image_num_crops"].tolist() == [1] * len(frames)
    print(f"{ours_seconds / count * 1e3:.2f} ms of CPU per image, native {native_seconds / count * 1e3:.2f}")


def test_other_devices_resize_as_the_cpu_does(sample):
    """The form that other devices run has only elementwise IEEE operations; plain arithmetic would move ties."""
    wrong, plain_wrong = 0, 0
    for number, frames in enumerate(all_frames(sample)):
        if number % 20 == 0:
            reference = resize(frames, SIDE)
            wrong += int((resize_exactly(frames, SIDE) != reference).sum())
            plain = torch.nn.functional.interpolate(
                frames.permute(0, 3, 1, 2).double(), size=(SIDE, SIDE), mode="bilinear"
            )
            plain_wrong += int((plain.round().to(torch.uint8).permute(0, 2, 3, 1) != reference).sum())
    assert wrong == 0 and plain_wrong > 0


def test_a_float_image_in_lerobots_range_gives_its_uint8_levels_back():
    """LeRobot's dataset divides by 255, its processor multiplies and truncates: no level moves."""
    levels = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(((levels.float() / 255).numpy() * 255.0).clip(0, 255).astype(np.uint8), levels.numpy())


def test_patches_can_be_put_together_again():
    images = torch.randint(0, 256, (2, 84, 84, 3), dtype=torch.uint8)
    assert torch.equal(unpatch(patches(images, PATCH), PATCH), images)


def test_every_samples_inputs_are_the_native_preprocessors(policy, sample):
    """All frames through LeRobot's whole pre-processor at the tiny resolution: tokens, positions, actions, pixels."""
    lengths = set()
    for batch in batches(
        sample,
        np.arange(len(sample)),
        windows=policy.windows,
        cameras=policy.cameras,
        microbatch=64,
        transform=policy.host,
    ):
        native, inputs = native_batch(policy, batch), policy.prepare(batch)
        valid = native["attention_mask"].bool()
        assert torch.equal((~valid).sum(dim=1), inputs.offset)
        for row, length in enumerate(inputs.lengths.tolist()):
            assert torch.equal(native["input_ids"][row][valid[row]], inputs.tokens[row, :length])
            types = native["token_type_ids"][row][valid[row]].bool()
            assert torch.equal(types[: len(policy.prompts.bidirectional)], policy.prompts.bidirectional)
            assert not types[len(policy.prompts.bidirectional) :].any()
        assert torch.equal(native["action"][..., :7], inputs.actions)
        assert torch.equal(native["action_horizon_is_pad"], inputs.is_pad)
        assert torch.equal(native["pixel_values"], inputs.patches.flatten(0, 1).float() / 255 * 2 - 1)
        lengths |= set(inputs.lengths.tolist())
    assert len(lengths) > 1
    assert len(policy.prompts.frames) == len(set(sample.task.tolist())) + 1, (
        "one tokenization per task, one for the layout"
    )


def test_prompts_are_padded_to_a_multiple_and_no_further(policy, sample):
    batch = first_batch(policy, sample, [0, 261])
    tokens, lengths = batch.extra["tokens"], batch.extra["lengths"]
    assert tokens.shape[1] % 8 == 0 and 0 <= tokens.shape[1] - int(lengths.max()) < 8


def torchvision_augmented(frame: Tensor, row: np.ndarray) -> Tensor:
    """One uint8 frame [H, W, 3] through torchvision's transforms with the draw's numbers."""
    image = frame.permute(2, 0, 1).float() / 255
    image = tv.adjust_brightness(image, row[0])
    image = tv.adjust_contrast(image, row[1])
    image = tv.adjust_saturation(image, row[2])
    if row[5]:
        image = tv.adjust_hue(image, row[3])
    image = tv.adjust_sharpness(image, row[4])
    if row[6]:
        cosine, sine = row[7], row[8]
        # The matrix is a rotation's inverse times a shift's: undo the rotation to find the shift.
        shift = np.array([[cosine, -sine], [sine, cosine]]) @ -row[[9, 12]]
        angle = float(np.degrees(np.arctan2(sine, cosine)))
        image = tv.affine(image, angle, [round(value) for value in shift], 1.0, [0.0, 0.0])
    return (image.numpy() * 255.0).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def test_augmentation_is_torchvisions(sample):
    frames = next(all_frames(sample)).repeat(4, 1, 1, 1)
    augmentation = ImageAugmentation()
    generator = np.random.default_rng(0)
    rows = np.array([augmentation.draw(generator, 256, 256) for _ in frames])
    found = augmentation(frames, torch.from_numpy(rows).float())
    expected = torch.stack(
        [torch.from_numpy(torchvision_augmented(f, row)) for f, row in zip(frames, rows, strict=True)]
    )
    difference = (found.int() - expected.int()).abs()
    moved = rows[:, 6] > 0
    assert moved.any() and not moved.all() and rows[:, 5].any()
    assert difference[torch.from_numpy(~moved)].max() <= 1
    assert (difference > 1).float().mean() < 1e-3, "nearest pixels may flip where rotation hits a border exactly"
    assert (difference > 0).float().mean() < 2e-2
    assert (frames.int() - found.int()).abs().float().mean() > 1, "it must change something"


def test_one_by_one_and_all_together_are_the_same_bits(sample):
    """A CPU runs what an image drew; a device all transforms for all images."""
    frames = next(all_frames(sample)).repeat(4, 1, 1, 1)
    augmentation = ImageAugmentation()
    generator = np.random.default_rng(3)
    draws = torch.from_numpy(np.array([augmentation.draw(generator, 256, 256) for _ in frames])).float()
    assert torch.equal(augmentation(frames, draws), changed(frames, draws, set(NAMES)))
    assert not torch.equal(augmentation(frames, draws), changed(frames, draws, set(NAMES[1:])))


def test_an_image_that_drew_nothing_stays_as_it_is(sample):
    frames = next(all_frames(sample))
    neutral = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0.0]).repeat(len(frames), 1)
    assert torch.equal(ImageAugmentation()(frames, neutral), frames)


def test_three_transforms_are_drawn_within_lerobots_ranges():
    augmentation = ImageAugmentation()
    generator = np.random.default_rng(1)
    rows = np.array([augmentation.draw(generator, 256, 256) for _ in range(500)])
    chosen = np.stack([*(rows[:, i] != 1 for i in (0, 1, 2)), rows[:, 5] > 0, rows[:, 4] != 1, rows[:, 6] > 0], axis=1)
    assert chosen.shape[1] == len(NAMES) and (chosen.sum(axis=1) == 3).all()
    assert (abs(chosen.mean(axis=0) - 0.5) < 0.1).all()
    for column, (low, high) in enumerate([(0.8, 1.2), (0.8, 1.2), (0.5, 1.5), (-0.05, 0.05), (0.5, 1.5)]):
        assert rows[:, column].min() >= low and rows[:, column].max() <= high
    assert np.degrees(np.arcsin(abs(rows[:, 8]).max())) <= 5 and abs(rows[:, [9, 12]]).max() < 0.05 * 256 + 2


@pytest.fixture(scope="module")
def augmenting(sample) -> MolmoAct2:
    return loaded_policy(molmoact2_config(model={"image_augmentation": True}), sample)


def seen(policy: MolmoAct2, batch: Batch) -> Tensor:
    return policy.prepare(batch).patches


def test_augmentation_depends_on_the_samples_position_alone(augmenting, policy, sample):
    one, two = first_batch(augmenting, sample, [3, 40, 5]), first_batch(augmenting, sample, [3, 40, 5])
    assert torch.equal(seen(augmenting, one), seen(augmenting, two))
    draws = one.extra["augmentation"]
    assert draws.shape == (3, 2, 13) and len(draws.flatten(0, 1).unique(dim=0)) == 6
    assert not torch.equal(seen(augmenting, one), seen(policy, first_batch(policy, sample, [3, 40, 5])))
    with torch.no_grad():  # as in the held-out evaluation
        plain = seen(augmenting, one)
    assert torch.equal(plain, seen(policy, first_batch(policy, sample, [3, 40, 5])))


def test_a_cache_is_refused_with_augmentation(sample):
    from somaspeed.policies.base import PolicyError

    config = molmoact2_config(model={"image_augmentation": True}, prefix={"cache": "disk"})
    with pytest.raises(PolicyError, match="prefix.cache: this recipe augments images"):
        MolmoAct2(config, sample.manifest, torch.device("cpu"))
