"""MolmoAct2 as the training loop sees it: LeRobot's modules and processors, our control flow."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from lerobot.policies.molmoact2 import processor_molmoact2 as upstream
from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy
from lerobot.processor import PolicyProcessorPipeline
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor, nn

from dataio.batch import Batch
from dataio.manifest import Manifest
from somaspeed.config import Config, TrainingConfig
from somaspeed.draws import sample_generator
from somaspeed.policies.base import CacheSlot, Policy, PolicyError
from somaspeed.policies.features import match_cameras
from somaspeed.policies.lerobot import cosine_decay, narrow_frozen, save_module
from somaspeed.policies.molmoact2 import base as bases
from somaspeed.policies.molmoact2.assemble import (
    AUGMENTATION,
    bare,
    build_module,
    check_weights,
    lerobot_config,
    processors,
    prompt_texts,
    split_options,
)
from somaspeed.policies.molmoact2.augmentation import ImageAugmentation
from somaspeed.policies.molmoact2.forward import (
    Context,
    LayerKV,
    Layout,
    connector_features,
    expert_velocity,
    flow_loss,
    prefix_kv,
)
from somaspeed.policies.molmoact2.images import patches, pooling_index, resize, unpatch
from somaspeed.policies.molmoact2.prompts import Prompts
from somaspeed.policies.molmoact2.sizes import SIZES

AUGMENTATION_DRAW = 1  # the number of the draw beside noise and time, which are draw 0


class Inputs(NamedTuple):
    """One batch on the device. `offset` counts LeRobot's left pads, zeros in the default numerics."""

    patches: Tensor  # uint8 [B, cameras, P, pixels of a patch]
    tokens: Tensor  # int64 [B, L], padded on the right
    lengths: Tensor  # int64 [B]
    offset: Tensor  # int64 [B]
    actions: Tensor  # float32 [B, chunk, action_dim], normalised and clamped
    is_pad: Tensor  # bool [B, chunk]: steps past the episode's end


class Prefix(NamedTuple):
    """The frozen prefix of a batch: per layer keys and values [B, L, width], and which tokens the expert sees."""

    kv: list[LayerKV]
    seen: Tensor  # bool [B, L]


class MolmoAct2(Policy[Inputs, Prefix]):
    """See `Policy`. Raises PolicyError for what this path does not train (LoRA, an unfrozen VLM, discrete actions)."""

    name = "molmoact2"
    module: MolmoAct2Policy

    def __init__(self, config: Config, manifest: Manifest, device: torch.device) -> None:
        self.device, self.seed, self.tasks = device, config.training.seed, manifest.tasks
        self.autocast = (config.training.precision or config.model.dtype) == "bfloat16"
        self.model_config, augmented = split_options(config.model)
        self.augmentation = ImageAugmentation() if augmented else None
        self.native = config.model.numerics == "native"
        self.lerobot_config = lerobot_config(self.model_config, config.data.map, manifest, device)
        if config.prefix.cache != "off":
            self.refuse_augmentation()
        self.cameras = match_cameras(manifest, config.data.map, self.lerobot_config.image_features)
        self.windows = {ACTION: list(range(self.lerobot_config.chunk_size))}
        masked = self.lerobot_config.mask_action_dim_padding
        self.trained_dim = manifest.column(ACTION).shape[0] if masked else self.lerobot_config.expected_max_action_dim
        self.made: tempfile.TemporaryDirectory[str] | None = None  # a base for random weights; gone with the policy
        self.base = self.find_base()
        self.core_config = bases.read_model_config(self.base)
        self.preprocessor, self.postprocessor = processors(self.lerobot_config, self.base, manifest)
        steps = self.preprocessor.steps
        self.packer = next(s for s in steps if isinstance(s, upstream.MolmoAct2PackInputsProcessorStep))
        self.normalizer = PolicyProcessorPipeline(steps=steps[: steps.index(self.packer)], name="normalizer")
        self.prompts = Prompts(self.packer, len(self.cameras))
        image = self.packer.processor.image_processor
        self.resolution, self.patch = image.size["height"], image.patch_size
        self.pooling = pooling_index(self.resolution // self.patch)
        if self.model_config.path:
            check_weights(self.model_config, self.core_config)

    def find_base(self) -> Path:
        """The base checkpoint: the checkpoint's own, what `checkpoint_path` names, or one made for random weights."""
        path, named = self.model_config.path, "checkpoint_path" in self.model_config.options
        if path and not named and (own := Path(path).expanduser() / bases.OWN).is_dir():
            return bases.find_base(str(own))
        if path:
            return bases.find_base(self.lerobot_config.checkpoint_path)
        self.made = tempfile.TemporaryDirectory(prefix="somaspeed-molmoact2-")
        directory = Path(self.made.name)
        bases.make_base(directory, SIZES[self.model_config.size], prompt_texts(self.lerobot_config, self.tasks))
        return directory

    def load(self) -> None:
        self.module = build_module(self.lerobot_config, self.model_config, self.core_config, self.device, self.seed)
        self.originals = narrow_frozen(self.module) if self.autocast else {}
        self.core: Any = self.module.model.model
        if self.device.type != "cpu":
            self.module.model.lm_head.to("cpu")  # never used by the action loss
        image_rows, bidirectional = self.prompts.image_rows, self.prompts.bidirectional
        self.layout = Layout(*(t.to(self.device) for t in (image_rows, bidirectional, self.pooling)))

    def host(self, batch: Batch) -> dict[str, Tensor]:
        """LeRobot's own normalisation of the columns, the prompt from cached tokens, and the augmentation's draws."""
        names = [self.tasks[task] for task in batch.task.tolist()]
        processed = self.normalizer({OBS_STATE: batch.columns[OBS_STATE], ACTION: batch.columns[ACTION]})
        tokens, lengths = self.prompts.compose(names, processed[OBS_STATE].float().numpy())
        extra = {
            "tokens": tokens,
            "lengths": lengths,
            "offset": lengths.max() - lengths if self.native else torch.zeros_like(lengths),
            "actions": processed[ACTION].float(),
            "cacheable": torch.ones(len(batch), dtype=torch.bool),
        }
        if self.augmentation is not None:
            extra["augmentation"] = self.draw_augmentation(batch)
        return extra

    def draw_augmentation(self, batch: Batch) -> Tensor:
        """How each image of the batch is changed, float32 [B, cameras, ·], by the sample's position in the run."""
        assert self.augmentation is not None
        drawn = []
        for epoch, position in zip(batch.epoch.tolist(), batch.position.tolist(), strict=True):
            generator = sample_generator(self.seed, epoch, position, AUGMENTATION_DRAW)
            sizes = (batch.images[camera].shape[1:3] for camera in self.cameras)
            drawn.append([self.augmentation.draw(generator, *size) for size in sizes])
        return torch.from_numpy(np.array(drawn, dtype=np.float32))

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Normal noise [N, chunk, action_dim] and Beta-distributed times [N], as LeRobot's policy samples them."""
        c = self.lerobot_config
        times = c.num_flow_timesteps
        noise = generator.standard_normal((times, c.chunk_size, self.trained_dim), dtype=np.float32)
        upper = min(c.flow_matching_cutoff, c.flow_matching_time_offset + c.flow_matching_time_scale)
        beta = generator.beta(c.flow_matching_beta_alpha, c.flow_matching_beta_beta, size=times)
        offset = c.flow_matching_time_offset
        return noise, (offset + (upper - offset) * beta).astype(np.float32)

    def prepare(self, batch: Batch) -> Inputs:
        """Images as LeRobot's processor makes them, on the device (see `images`); augmented while training."""
        extra = batch.extra
        images = []
        for index, camera in enumerate(self.cameras):
            frames = batch.images[camera]
            if self.augmentation is not None and torch.is_grad_enabled():
                frames = self.augmentation(frames, extra["augmentation"][:, index])
            images.append(patches(resize(frames, self.resolution), self.patch))
        stacked = torch.stack(images, dim=1)
        return Inputs(
            stacked, extra["tokens"], extra["lengths"], extra["offset"], extra["actions"], batch.is_pad[ACTION]
        )

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def frozen(self, inputs: Inputs) -> Tensor:
        """The connector's image features, [B, cameras · T, W]: they depend on neither the task nor the state."""
        with self.precision():
            return connector_features(self.core, inputs.patches, self.layout.pooling)

    def cache_slot(self) -> CacheSlot:
        """Connector features [cameras · T, W]. Raises PolicyError for a recipe that augments images."""
        self.refuse_augmentation()
        shape = (len(self.cameras) * len(self.pooling), self.core_config.text_config.hidden_size)
        narrow = self.autocast or self.model_config.dtype == "bfloat16"
        return CacheSlot(shape, 0, torch.bfloat16 if narrow else torch.float32)

    def refuse_augmentation(self) -> None:
        """Raise PolicyError when images are augmented: then the features of a frame change every epoch."""
        if self.augmentation is not None:
            raise PolicyError(
                f"prefix.cache: this recipe augments images (model.{AUGMENTATION}), so the features of a frame change "
                f'every epoch. Set prefix.cache = "off", or model.{AUGMENTATION} = false.'
            )

    def cache_key(self) -> dict[str, Any]:
        return {
            "vision": json.loads(self.core_config.vit_config.to_json_string()),
            "connector": json.loads(self.core_config.adapter_config.to_json_string()),
            "cameras": self.cameras,
            "resolution": [self.resolution, self.patch],
            "autocast": self.autocast,
            "dtype": self.model_config.dtype,
        }

    def frozen_length(self, inputs: Inputs) -> int:
        return len(self.cameras) * len(self.pooling)

    def prefix(self, inputs: Inputs, frozen: Tensor) -> Prefix:
        with self.precision():
            kv = prefix_kv(self.core, self.layout, frozen, inputs.tokens, inputs.offset if self.native else None)
        return Prefix(kv, self.seen_tokens(inputs))

    def seen_tokens(self, inputs: Inputs) -> Tensor:
        """Which prompt tokens the expert attends to, bool [B, L]: LeRobot leaves out those that end a text."""
        seen = torch.arange(inputs.tokens.shape[1], device=self.device) < inputs.lengths[:, None]
        if self.core_config.action_mode == "both" and self.core_config.eos_token_id is not None:
            seen = seen & (inputs.tokens != int(self.core_config.eos_token_id))
        return seen

    def expert_loss(self, prefix: Prefix, inputs: Inputs, noise: Tensor, time: Tensor) -> Tensor:
        actions = nn.functional.pad(inputs.actions, (0, noise.shape[-1] - inputs.actions.shape[-1]))
        weight = time[:, :, None, None]
        noisy = (1 - weight) * noise + weight * actions[:, None]
        noisy = nn.functional.pad(noisy, (0, self.lerobot_config.expected_max_action_dim - noisy.shape[-1]))
        valid = ~inputs.is_pad
        with self.precision():
            velocity = expert_velocity(self.core, Context(prefix.kv, prefix.seen, valid), noisy, time)
        velocity = velocity[..., : noise.shape[-1]].float()
        return flow_loss(velocity, actions, noise, valid, self.model_config.mask_padded_actions)

    def live_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def learning_rate(self, steps: int, settings: TrainingConfig) -> Callable[[int], float]:
        return cosine_decay(steps, settings)

    def save(self, directory: Path, final: Path) -> None:
        """See `Policy`. A base made for random weights goes into the checkpoint; a released one stays where it is."""
        own = self.made is not None or self.base.name == bases.OWN
        named = Path(self.lerobot_config.checkpoint_path).expanduser()
        released = str(named.resolve()) if named.is_dir() else self.lerobot_config.checkpoint_path
        place = str((final / bases.OWN).resolve()) if own else released
        if own:
            bases.save_base(directory / bases.OWN, self.base, self.module.model, bare(self.originals))
        with mock.patch.object(self.module.config, "checkpoint_path", place):
            save_module(self.module, self.live_parameters().values(), self.originals, directory)
        with mock.patch.object(self.packer, "checkpoint_path", place):
            self.preprocessor.save_pretrained(directory)
        self.postprocessor.save_pretrained(directory)

    def preview(self, inputs: Inputs) -> tuple[np.ndarray, list[str]]:
        shown = inputs.patches.cpu()
        pixels = unpatch(shown.flatten(0, 1), self.patch).unflatten(0, shown.shape[:2]).numpy()
        texts = []
        for row, length in zip(inputs.tokens.cpu(), inputs.lengths.tolist(), strict=True):
            after = int(self.prompts.image_rows[-1]) + 1
            texts.append(" ".join(self.prompts.tokenizer.decode(row[after:length], skip_special_tokens=True).split()))
        return pixels, texts
