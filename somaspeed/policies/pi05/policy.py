"""π0.5 as the training loop sees it: LeRobot's modules and processors, our control flow."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lerobot.policies.pi05.processor_pi05 as upstream_processor
import msgspec
import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.common.vla_utils import resize_with_pad_torch
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy, get_gemma_config
from lerobot.utils.constants import (
    ACTION,
    OBS_IMAGES,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from dataio.batch import Batch
from dataio.manifest import Manifest
from somaspeed.config import Config, ModelConfig, TrainingConfig
from somaspeed.policies.base import CacheSlot, Policy, PolicyError
from somaspeed.policies.features import match_cameras, statistics_tensors
from somaspeed.policies.lerobot import check_supported, checked_options, cosine_decay, narrow_frozen, save_module
from somaspeed.policies.pi05.forward import expert_velocity, flow_loss, prefix_kv
from somaspeed.policies.pi05.sizes import SIZES, build_on_meta, sized
from somaspeed.policies.tokenizer import load_tokenizer, train_tokenizer
from somaspeed.policies.weights import check_header, find_weights

PATCH = 14  # SigLIP patch side, in pixels
STATE_BINS = range(-1, 256)  # the numbers that LeRobot's prompt has for a state; -1 lies below the statistics' range
PUBLISHED_TOKENIZER = "google/paligemma-3b-pt-224"
HEADS = ("paligemma.lm_head", "gemma_expert.lm_head")  # never used by the action loss


class Inputs(NamedTuple):
    """One batch on the device. `lengths` counts the valid prefix tokens: image patches and prompt."""

    images: Tensor  # float32 [B, cameras, 3, R, R] in [-1, 1]
    tokens: Tensor  # int64 [B, L], right-padded to a bucket
    lengths: Tensor  # int64 [B]
    actions: Tensor  # float32 [B, chunk, max_action_dim], normalised, zero-padded
    is_pad: Tensor  # bool [B, chunk]: steps past the episode's end


class Prefix(NamedTuple):
    """The frozen prefix of a batch: keys and values [B, layers, 2, P, D], and how many tokens are valid, int64 [B]."""

    kv: Tensor
    lengths: Tensor


class PI05(Policy[Inputs, Prefix]):
    """See `Policy`. Raises PolicyError for what this path does not train (LoRA, an unfrozen VLM)."""

    name = "pi05"
    module: PI05Policy

    def __init__(self, config: Config, manifest: Manifest, device: torch.device) -> None:
        self.model_config, self.buckets, self.device = config.model, config.prefix.buckets, device
        self.autocast = (config.training.precision or config.model.dtype) == "bfloat16"
        self.lerobot_config = lerobot_config(config.model, config.data.map, manifest, device)
        self.tasks = manifest.tasks
        self.cameras = match_cameras(manifest, config.data.map, self.lerobot_config.image_features)
        self.patches = len(self.cameras) * (self.lerobot_config.image_resolution[0] // PATCH) ** 2
        self.statistics = msgspec.to_builtins(manifest.statistics)
        self.windows = {ACTION: list(range(self.lerobot_config.chunk_size))}
        self.action_dim = manifest.column(ACTION).shape[0]
        self.tokenizer = self.make_tokenizer()
        self.preprocessor, self.postprocessor = processors(
            self.lerobot_config, statistics_tensors(manifest), self.tokenizer
        )
        self.seed = config.training.seed
        if config.model.path:
            check_weights(self.lerobot_config, config.model.path, config.model.size)

    def load(self) -> None:
        self.module = build_module(self.lerobot_config, self.model_config, self.seed)
        self.originals = narrow_frozen(self.module) if self.autocast else {}
        core: Any = self.module.model
        self.core = core
        if self.device.type != "cpu":
            for head in HEADS:
                core.paligemma_with_expert.get_submodule(head).to("cpu")

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """The configured tokenizer, the published one, or for reduced models one trained on the tasks' prompts."""
        if self.model_config.tokenizer:
            return load_tokenizer(self.model_config.tokenizer)
        size = SIZES[self.model_config.size]
        if size is None:
            stored = Path(self.model_config.path) / "tokenizer"
            return load_tokenizer(str(stored) if stored.is_dir() else PUBLISHED_TOKENIZER)
        state = " ".join(map(str, STATE_BINS if size.whole_numbers else range(-1, 10)))
        texts = [f"Task: {task}, State: {state};\nAction: " for task in self.tasks]
        return train_tokenizer(texts, size.vocabulary, size.whole_numbers)

    def host(self, batch: Batch) -> dict[str, Tensor]:
        """LeRobot's own pre-processor over the low-dimensional columns, and the prompt cut to its bucket."""
        processed = self.preprocessor(
            {
                OBS_STATE: batch.columns[OBS_STATE],
                ACTION: batch.columns[ACTION],
                "task": [self.tasks[task] for task in batch.task.tolist()],
            }
        )
        mask = processed[OBS_LANGUAGE_ATTENTION_MASK]
        lengths = mask.sum(dim=1)
        longest = int(lengths.max())
        bucket = min((size for size in self.buckets if size >= longest), default=mask.shape[1])
        padding = self.lerobot_config.max_action_dim - processed[ACTION].shape[-1]
        return {
            "tokens": processed[OBS_LANGUAGE_TOKENS][:, : min(bucket, mask.shape[1])].contiguous(),
            "lengths": lengths,
            "cacheable": lengths <= self.buckets[0],
            "actions": nn.functional.pad(processed[ACTION], (0, padding)),
        }

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Normal noise [chunk, max_action_dim] and a Beta-distributed time, as LeRobot's `PI05Pytorch` samples them."""
        c = self.lerobot_config
        noise = generator.standard_normal((c.chunk_size, c.max_action_dim), dtype=np.float32)
        beta = generator.beta(c.time_sampling_beta_alpha, c.time_sampling_beta_beta)
        return noise, np.asarray(beta * c.time_sampling_scale + c.time_sampling_offset, np.float32)

    def prepare(self, batch: Batch) -> Inputs:
        """Resize with padding and scale to [-1, 1] as LeRobot's `PI05Policy` does, all cameras in one call."""
        frames = [batch.images[camera] for camera in self.cameras]
        shapes = {frame.shape for frame in frames}
        groups = [torch.cat(frames)] if len(shapes) == 1 else frames
        images = torch.cat([self.resize(group) for group in groups])
        images = images.unflatten(0, (len(frames), -1)).transpose(0, 1)
        extra = batch.extra
        return Inputs(images, extra["tokens"], extra["lengths"] + self.patches, extra["actions"], batch.is_pad[ACTION])

    def resize(self, frames: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] → float32 [N, 3, R, R] in [-1, 1]."""
        if not len(frames):
            return torch.empty(0, 3, *self.lerobot_config.image_resolution, device=frames.device)
        scaled = frames.to(torch.float32) / 255
        resolution = tuple(self.lerobot_config.image_resolution)
        if scaled.shape[1:3] != resolution:
            scaled = resize_with_pad_torch(scaled, *resolution)
        return (scaled * 2 - 1).permute(0, 3, 1, 2)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def frozen(self, inputs: Inputs) -> Tensor:
        """Keys and values of every prefix layer, [B, layers, 2, P, D]."""
        with self.precision():
            return prefix_kv(self.core, inputs.images, inputs.tokens, inputs.lengths)

    def cache_slot(self) -> CacheSlot:
        """Keys and values [layers, 2, P, D] for the patches and the smallest prompt bucket."""
        size = SIZES[self.model_config.size]
        vlm = size.vlm if size else get_gemma_config(self.lerobot_config.paligemma_variant)
        shape = (vlm.depth, 2, self.patches + self.buckets[0], vlm.head_dim)
        narrow = self.autocast or self.model_config.dtype == "bfloat16"
        return CacheSlot(shape, 2, torch.bfloat16 if narrow else torch.float32)

    def cache_key(self) -> dict[str, Any]:
        return {
            "config": {name: str(value) for name, value in dataclasses.asdict(self.lerobot_config).items()},
            "cameras": self.cameras,
            "bucket": self.buckets[0],
            "autocast": self.autocast,
            "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
            "tasks": self.tasks,
            "statistics": {key: value for key, value in self.statistics.items() if key == OBS_STATE},
        }

    def frozen_length(self, inputs: Inputs) -> int:
        return self.patches + inputs.tokens.shape[1]

    def prefix(self, inputs: Inputs, frozen: Tensor) -> Prefix:
        return Prefix(frozen, inputs.lengths)

    def expert_loss(self, prefix: Prefix, inputs: Inputs, noise: Tensor, time: Tensor) -> Tensor:
        weight = time[:, None, None]
        noisy = weight * noise + (1 - weight) * inputs.actions
        with self.precision():
            velocity = expert_velocity(self.core, prefix.kv, prefix.lengths, noisy, time)
        masked = inputs.is_pad if self.model_config.mask_padded_actions else None
        return flow_loss(velocity.float(), inputs.actions, noise, self.action_dim, masked)

    def live_parameters(self) -> dict[str, nn.Parameter]:
        dead = self.core.paligemma_with_expert.gemma_expert.lm_head.weight
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and parameter is not dead
        }

    def learning_rate(self, steps: int, settings: TrainingConfig) -> Callable[[int], float]:
        return cosine_decay(steps, settings)

    def save(self, directory: Path, final: Path) -> None:
        save_module(self.module, self.live_parameters().values(), self.originals, directory)
        self.tokenizer.save_pretrained(directory / "tokenizer")
        with self.named_tokenizer(final / "tokenizer"):
            self.preprocessor.save_pretrained(directory)
        self.postprocessor.save_pretrained(directory)

    @contextlib.contextmanager
    def named_tokenizer(self, directory: Path) -> Iterator[None]:
        """While saving, name the tokenizer: the hub's where it is the published one, else the checkpoint's copy."""
        step = next(s for s in self.preprocessor.steps if isinstance(s, upstream_processor.TokenizerProcessorStep))
        published = self.tokenizer.name_or_path == PUBLISHED_TOKENIZER
        kept = step.tokenizer
        step.tokenizer, step.tokenizer_name = None, PUBLISHED_TOKENIZER if published else str(directory.resolve())
        try:
            yield
        finally:
            step.tokenizer, step.tokenizer_name = kept, None

    def preview(self, inputs: Inputs) -> tuple[np.ndarray, list[str]]:
        pixels = ((inputs.images + 1) * 127.5).round().to(torch.uint8).permute(0, 1, 3, 4, 2).cpu().numpy()
        prompts = self.tokenizer.batch_decode(inputs.tokens.cpu(), skip_special_tokens=True)
        return pixels, [" ".join(prompt.split()) for prompt in prompts]


def lerobot_config(model: ModelConfig, renames: dict[str, str], manifest: Manifest, device: torch.device) -> PI05Config:
    """LeRobot's configuration: from the checkpoint or from the shards' features, with `[model]`'s own keys on top."""
    check_supported(model, SIZES, "native-pi05-lerobot-accelerate")
    size = SIZES[model.size]
    fixed = {
        "dtype": model.dtype,
        "device": device.type,
        "train_expert_only": True,
        "freeze_vision_encoder": True,
        "gradient_checkpointing": False,
        "compile_model": False,
        **({"image_resolution": (size.resolution, size.resolution)} if size else {}),
        **checked_options(model, PI05Config),
    }
    if model.path:
        find_weights(model.path)
        base = PreTrainedConfig.from_pretrained(model.path)
        if not isinstance(base, PI05Config):
            raise PolicyError(f"model.path = {model.path} holds a {base.type!r} policy, not pi05")
        config = dataclasses.replace(base, **fixed)
    else:
        features = {
            f"{OBS_IMAGES}.{renames.get(camera.name, camera.name)}": PolicyFeature(
                FeatureType.VISUAL, (3, camera.height, camera.width)
            )
            for camera in manifest.cameras
        }
        features[OBS_STATE] = PolicyFeature(FeatureType.STATE, manifest.column(OBS_STATE).shape)
        action = {ACTION: PolicyFeature(FeatureType.ACTION, manifest.column(ACTION).shape)}
        config = PI05Config(input_features=features, output_features=action, **fixed)
    for key, limit in ((OBS_STATE, config.max_state_dim), (ACTION, config.max_action_dim)):
        if manifest.column(key).shape[0] > limit:
            raise PolicyError(f"{key} has {manifest.column(key).shape[0]} dimensions, pi05 takes at most {limit}")
    config.validate_features()
    return config


def processors(config: PI05Config, statistics: dict[str, dict[str, Tensor]], tokenizer: PreTrainedTokenizerFast):
    """LeRobot's own pre- and post-processor for `config`, on the CPU, with `tokenizer` in place of the hub's."""
    step = upstream_processor.TokenizerProcessorStep

    def with_tokenizer(tokenizer_name: str, **settings: Any) -> Any:
        return step(tokenizer=tokenizer, **settings)

    on_cpu = dataclasses.replace(config, device="cpu")
    with mock.patch.object(upstream_processor, "TokenizerProcessorStep", with_tokenizer):
        return upstream_processor.make_pi05_pre_post_processors(on_cpu, statistics)


def renamed(shell: nn.Module, config: PI05Config, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` under the keys of `PI05Policy`: LeRobot's own mapping of openpi's and older names.

    `shell` is anything whose `.model` is the `PI05Pytorch` to be loaded, as LeRobot's method expects of `self`.
    """
    fixed = PI05Policy._fix_pytorch_state_dict_keys(shell, state, config)
    return {key if key.startswith("model.") else f"model.{key}": value for key, value in fixed.items()}


def check_weights(config: PI05Config, path: str, size: str) -> None:
    """Compare the header of checkpoint `path` with the policy at `size`. Raises PolicyError; reads no weight."""
    shell = nn.Module()
    shell.model = build_on_meta(config, SIZES[size])
    check_header(find_weights(path), shell.state_dict(), lambda state: renamed(shell, config, state), size)


def build_module(config: PI05Config, model: ModelConfig, seed: int) -> PI05Policy:
    """`PI05Policy` at `model.size`: random weights from `seed`, or those of `model.path`, every tensor of them."""
    with sized(model.size, seed):
        module = PI05Policy(config)
    if model.path:
        state = load_file(find_weights(model.path), device=str(config.device))
        module.load_state_dict(renamed(module, config, state), strict=True)
    module.train()
    return module
