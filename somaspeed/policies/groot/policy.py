"""GR00T N1.7 as the training loop sees it: LeRobot's modules and processors, our control flow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from lerobot.policies.groot.modeling_groot import GrootPolicy
from lerobot.policies.groot.processor_groot import N1_7_EMBODIMENT_MAPPING
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from dataio.batch import Batch
from dataio.manifest import Manifest
from somaspeed.config import Config, TrainingConfig
from somaspeed.draws import sample_generator
from somaspeed.optim import Group
from somaspeed.policies.base import CacheSlot, Policy, PolicyError
from somaspeed.policies.features import match_cameras, statistics_tensors
from somaspeed.policies.groot import assemble, export
from somaspeed.policies.groot.backbone import Backbone
from somaspeed.policies.groot.head import Features, Places, flow_loss, velocity
from somaspeed.policies.groot.images import Jitter, draw_jitter, fit, jittered
from somaspeed.policies.groot.prompt import make_processor, make_prompts, train_chat_tokenizer
from somaspeed.policies.groot.rows import NO_DECAY, LiveRows
from somaspeed.policies.groot.schedule import cosine_to_zero
from somaspeed.policies.groot.sizes import SIZES, resolution
from somaspeed.policies.lerobot import narrow_frozen
from somaspeed.policies.tokenizer import load_tokenizer

HEAD, BACKBONE = "_groot_model.action_head", "_groot_model.backbone.model.model"
JITTER_DRAW, DROPOUT_DRAW = 1, 2  # numbers of the draws beside noise and time, which are draw 0
TRAINED = "trained"  # model.tokenizer: train one on the shards' tasks, for random weights at full size


class Inputs(NamedTuple):
    """One batch on the device. S, the padded prompt, is the longest of the shards' tasks, or natively of the batch."""

    images: Tensor  # uint8 [B, cameras, R, R, 3]
    text: Tensor  # int64 [B, L], right-padded
    lengths: Tensor  # int64 [B], valid tokens of the whole prompt
    state: Tensor  # float32 [B, 1, max_state_dim], normalised, zero-padded
    actions: Tensor  # float32 [B, horizon, max_action_dim], normalised, zero-padded
    valid: Tensor  # float32 [B, chunk], 1 where the step lies in the episode
    dropout_seed: int | None  # of the head's dropout; None: go on with torch's random state as it is


class Groot(Policy[Inputs, Features]):
    """See `Policy`. Raises PolicyError for what this path does not train (LoRA, an unfrozen backbone).

    Every sample's own loss is LeRobot's on that sample alone, and the loss is their mean. `model.numerics = "native"`
    pads, attends to pads and divides as LeRobot does for a batch instead: then a sample depends on its batch-mates.
    Steps past the episode's end are masked, as LeRobot does, whatever `model.mask_padded_actions` says.
    """

    name = "groot"
    module: GrootPolicy

    def __init__(self, config: Config, manifest: Manifest, device: torch.device) -> None:
        self.model_config, self.device, self.seed = config.model, device, config.training.seed
        self.autocast = (config.training.precision or config.model.dtype) == "bfloat16"
        self.native = config.model.numerics == "native"
        self.whole = config.training.lr * config.training.weight_decay >= NO_DECAY
        options = assemble.split_options(config.model)
        self.jitter, self.core_options = options.jitter, options.core
        self.lerobot_config = assemble.lerobot_config(
            config.model, options.policy, config.data.map, manifest, device, self.autocast
        )
        if config.prefix.cache != "off":
            self.cache_slot()
        names = sorted(self.lerobot_config.image_features)  # LeRobot stacks cameras in alphabetical order
        self.cameras = match_cameras(manifest, config.data.map, names)
        self.steps, self.action_dim = self.lerobot_config.chunk_size, manifest.column(ACTION).shape[0]
        self.windows = {ACTION: list(range(self.steps))}
        self.tasks, self.statistics = manifest.tasks, msgspec.to_builtins(manifest.statistics)
        self.resolution, self.crop = resolution(config.model.size)
        self.tokenizer = self.make_tokenizer()
        self.processor = make_processor(self.tokenizer, self.resolution)
        self.prompts = make_prompts(self.processor, self.tasks, len(self.cameras), self.resolution)
        self.preprocessor, self.postprocessor = assemble.processors(
            self.lerobot_config, statistics_tensors(manifest), self.processor, self.resolution, self.crop
        )
        if config.model.path:
            assemble.check_weights(self.lerobot_config, config.model, self.core_options)

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """The configured tokenizer, the checkpoint's, the published one, or for reduced models a trained one."""
        name, size = self.model_config.tokenizer, SIZES[self.model_config.size]
        stored = Path(self.model_config.path) / export.PROCESSOR
        if name == TRAINED or (not name and size and not (self.model_config.path and stored.is_dir())):
            vocabulary = size.language.vocabulary if size else 1024
            return train_chat_tokenizer([task.lower() for task in self.tasks], vocabulary)
        if not name and self.model_config.path and stored.is_dir():
            name = str(stored)
        return load_tokenizer(name or export.PUBLISHED_BACKBONE)

    def load(self) -> None:
        module = assemble.build_module(self.lerobot_config, self.model_config, self.seed, self.core_options)
        self.originals: dict[str, Tensor] = {}
        if self.model_config.dtype == "bfloat16":  # without the unused language head, whose weight is the embedding's
            narrowed = narrow_frozen(module.get_submodule(BACKBONE))
            self.originals = {f"{BACKBONE}.{name}": weight for name, weight in narrowed.items()}
        if self.model_config.tokenizer == TRAINED:
            assemble.name_special_tokens(module, self.processor)
        self.attach(module)

    def attach(self, module: GrootPolicy) -> None:
        """Train `module`, a policy of this configuration: cut its live rows, compute the constants of its backbone."""
        self.module, self.core = module, module._groot_model
        self.head = self.core.action_head
        self.head.train()
        self.head.set_frozen_modules_to_eval_mode()
        embodiment = N1_7_EMBODIMENT_MAPPING[self.lerobot_config.embodiment_tag]
        horizon = self.core.config.action_horizon
        self.rows = LiveRows(self.head, HEAD, embodiment, horizon, self.whole)
        _, free = module._build_weight_decay_parameter_groups(module)
        spared = {id(parameter) for parameter in free["params"]}
        self.without_decay = {
            self.rows.cut.get(id(parameter), name)
            for name, parameter in module.named_parameters()
            if id(parameter) in spared
        }
        layout, longest = self.prompts.layout, self.prompts.text.shape[1]
        with self.precision():
            self.backbone = Backbone(self.core, layout, self.resolution, longest)
            self.pad_feature = self.backbone.pad_feature(self.prompts.pad)
        image = layout.is_image(len(layout.fixed) + longest).to(self.device)
        positions = torch.arange(len(image), device=self.device)
        self.image_places, self.text_places = positions[image], positions[~image]

    def host(self, batch: Batch) -> dict[str, Any]:
        """LeRobot's own pre-processor over the low-dimensional columns, the task's tokens, and the draws' seeds."""
        processed = self.preprocessor(
            {
                OBS_STATE: batch.columns[OBS_STATE],
                ACTION: batch.columns[ACTION],
                f"{ACTION}_is_pad": batch.is_pad[ACTION],
                "task": [self.tasks[task] for task in batch.task.tolist()],
            }
        )
        lengths = self.prompts.lengths[batch.task]
        longest = int(lengths.max()) if self.native else self.prompts.text.shape[1]
        places = list(zip(batch.epoch.tolist(), batch.position.tolist(), strict=True))
        extra: dict[str, Any] = {
            "text": self.prompts.text[batch.task, :longest],
            "lengths": lengths + len(self.prompts.layout.fixed),
            "cacheable": torch.ones(len(batch), dtype=torch.bool),
            "state": processed["state"],
            "actions": processed[ACTION],
            "valid": processed["action_mask"][:, : self.steps, 0].contiguous(),
            "dropout_seed": int(sample_generator(self.seed, *places[0], DROPOUT_DRAW).integers(2**62)),
        }
        if self.jitter is not None:
            generators = [sample_generator(self.seed, *place, JITTER_DRAW) for place in places]
            extra["jitter"] = draw_jitter(self.jitter, generators)._asdict()
        return extra

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Normal noise [horizon, max_action_dim] and flow time s · (1 - Beta(a, b)), as LeRobot's head samples them."""
        horizon, width = assemble.HORIZON, self.lerobot_config.max_action_dim
        noise = generator.standard_normal((horizon, width), dtype=np.float32)
        alpha, beta, scale = assemble.TIME
        return noise, np.asarray((1 - generator.beta(alpha, beta)) * scale, np.float32)

    def prepare(self, batch: Batch) -> Inputs:
        """Resize, crop and resize as LeRobot's processor does, all cameras in one call; jitter while training."""
        frames = [batch.images[camera] for camera in self.cameras]
        shapes = {frame.shape for frame in frames}
        groups = [torch.cat(frames)] if len(shapes) == 1 else frames
        fitted = [self.fit(group) for group in groups]
        images = torch.cat(fitted).unflatten(0, (len(frames), -1)).transpose(0, 1)
        extra = batch.extra
        if "jitter" in extra and torch.is_grad_enabled():
            images = jittered(images, Jitter(**extra["jitter"]))
        return Inputs(
            images,
            extra["text"],
            extra["lengths"],
            extra["state"],
            extra["actions"],
            extra["valid"],
            extra["dropout_seed"],
        )

    def fit(self, frames: Tensor) -> Tensor:
        if not len(frames):
            return frames.new_empty(0, self.resolution, self.resolution, 3)
        return fit(frames, self.resolution, self.crop)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def frozen(self, inputs: Inputs) -> Tensor:
        """The features of the selected layer, [B, S, W]."""
        with self.precision():
            return self.backbone.features(inputs.images, inputs.text)

    def cache_slot(self) -> CacheSlot:
        """Features [S, W]. Raises PolicyError for a recipe that augments images or depends on batch-mates."""
        if self.jitter is not None:
            raise PolicyError(
                "prefix.cache: this recipe jitters colours (model.color_jitter_params), so the features of a frame "
                'change every epoch. Set prefix.cache = "off", or leave the jitter out.'
            )
        if self.native:
            raise PolicyError(
                'prefix.cache: with model.numerics = "native" the padding depends on the batch. '
                'Set prefix.cache = "off", or model.numerics = "default".'
            )
        if not hasattr(self, "backbone"):
            return CacheSlot((), 0, torch.float32)
        layout = self.prompts.layout
        size = len(layout.fixed) + self.prompts.text.shape[1]
        return CacheSlot((size, self.backbone.fixed.shape[1]), 0, torch.float32)

    def cache_key(self) -> dict[str, Any]:
        return {
            "size": self.model_config.size,
            "cameras": self.cameras,
            "resolution": [self.resolution, self.crop],
            "autocast": self.autocast,
            "dtype": self.model_config.dtype,
            "text": self.prompts.text.tolist(),
            "fixed": self.prompts.layout.fixed.tolist(),
        }

    def frozen_length(self, inputs: Inputs) -> int:
        return len(self.prompts.layout.fixed) + inputs.text.shape[1]

    def prefix(self, inputs: Inputs, frozen: Tensor) -> Features:
        if self.native:
            valid = torch.arange(frozen.shape[1], device=frozen.device) < inputs.lengths[:, None]
            frozen = torch.where(valid[..., None], frozen, self.pad_feature)
        return Features(frozen, inputs.lengths, self.native)

    def expert_loss(self, prefix: Features, inputs: Inputs, noise: Tensor, time: Tensor) -> Tensor:
        if inputs.dropout_seed is not None and torch.is_grad_enabled():
            torch.manual_seed(inputs.dropout_seed)
        dtype = self.core.dtype
        state, actions, noise, time = (x.to(dtype) for x in (inputs.state, inputs.actions, noise, time))
        weight = time[:, None, None]
        noisy = (1 - weight) * noise + weight * actions
        bucket = (time * self.head.num_timestep_buckets).long()
        size = prefix.features.shape[1]
        places = Places(self.image_places, self.text_places[: size - len(self.image_places)])
        kept = (slice(None), slice(self.steps), slice(self.action_dim))
        with self.precision(), evaluating(self.head, not torch.is_grad_enabled()):
            predicted = velocity(
                self.head, self.rows, places, prefix, state, noisy, bucket, self.steps, self.action_dim
            )
            return flow_loss(predicted, actions[kept], noise[kept], inputs.valid.to(dtype), per_batch=self.native)

    def live_parameters(self) -> dict[str, nn.Parameter]:
        return {
            self.rows.cut.get(id(parameter), name): self.rows.parameters.get(
                self.rows.cut.get(id(parameter), ""), parameter
            )
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }

    def group_of(self, name: str, parameter: nn.Parameter) -> Group:
        """LeRobot leaves biases and norms out of weight decay, by their names."""
        return Group(decay=name not in self.without_decay)

    def learning_rate(self, steps: int, settings: TrainingConfig) -> Callable[[int], float]:
        """LeRobot's schedule for GR00T: linear warm-up, then a cosine to zero over the run."""
        return cosine_to_zero(steps, settings)

    def save(self, directory: Path, final: Path) -> None:
        self.rows.write_back()
        export.save(self, directory, final)

    def preview(self, inputs: Inputs) -> tuple[np.ndarray, list[str]]:
        pixels = inputs.images.cpu().numpy()
        prompts = self.tokenizer.batch_decode(inputs.text.cpu(), skip_special_tokens=True)
        return pixels, [" ".join(prompt.split()) for prompt in prompts]


@contextlib.contextmanager
def evaluating(module: nn.Module, active: bool) -> Iterator[None]:
    """While active, `module` is in evaluation mode: no dropout."""
    modes = {child: child.training for child in module.modules()} if active else {}
    if active:
        module.eval()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode
