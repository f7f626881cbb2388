"""LeRobot's configuration, processors and modules of MolmoAct2, put together for training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.molmoact2 import processor_molmoact2 as upstream
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from lerobot.policies.molmoact2.modeling_molmoact2 import MolmoAct2Policy, _torch_dtype
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor, nn

from dataio.manifest import Manifest
from somaspeed.config import ModelConfig
from somaspeed.policies.base import PolicyError
from somaspeed.policies.features import statistics_tensors
from somaspeed.policies.lerobot import check_supported, checked_options
from somaspeed.policies.molmoact2.base import NATIVE_BACKEND, fetch
from somaspeed.policies.molmoact2.sizes import SIZES, build_on_meta, materialise
from somaspeed.policies.molmoact2.sizes import ModelConfig as CoreConfig
from somaspeed.policies.weights import compare_shapes, load_weights, read_header, weight_files

AUGMENTATION = "image_augmentation"  # a key of [model] beside those of LeRobot's configuration
# What the fast step is made for; [model] may not say otherwise.
REQUIRED = {"action_mode": "continuous", "train_action_expert_only": True, "gradient_checkpointing": False}


def split_options(model: ModelConfig) -> tuple[ModelConfig, bool]:
    """`model` with LeRobot's keys only, and whether images are augmented. Raises PolicyError for a wrong value.

    Without a path, the weights are those of the base checkpoint, where one is named.
    """
    options = dict(model.options)
    augmented = options.pop(AUGMENTATION, False)
    if not isinstance(augmented, bool):
        raise PolicyError(f"model.{AUGMENTATION} = {augmented!r}: expected true or false")
    for key, value in REQUIRED.items():
        if options.get(key, value) != value:
            raise PolicyError(
                f'model.{key} = {options[key]!r} is not supported here. Use backend = "{NATIVE_BACKEND}".'
            )
    path = model.path or options.get("checkpoint_path", "")
    return msgspec.structs.replace(model, options=options, path=path), augmented


def lerobot_config(
    model: ModelConfig, renames: dict[str, str], manifest: Manifest, device: torch.device
) -> MolmoAct2Config:
    """LeRobot's configuration: from the checkpoint or from the shards' features, with `[model]`'s own keys on top."""
    check_supported(model, SIZES, NATIVE_BACKEND)
    if model.tokenizer:
        raise PolicyError(
            "model.tokenizer: MolmoAct2's tokenizer is part of its base checkpoint, model.checkpoint_path"
        )
    fixed = {
        "model_dtype": model.dtype,
        "device": device.type,
        "inference_action_mode": "continuous",
        **REQUIRED,
        **checked_options(model, MolmoAct2Config),
    }
    kind = described_type(model.path) if model.path else None
    if kind == "molmoact2":
        config = dataclasses.replace(PreTrainedConfig.from_pretrained(fetch(model.path, weights=False)), **fixed)
    elif kind is not None:
        raise PolicyError(f"model.path = {model.path} holds a {kind!r} policy, not molmoact2")
    else:
        if model.path:
            fixed.setdefault("checkpoint_path", model.path)
        features = {
            f"{OBS_IMAGES}.{renames.get(camera.name, camera.name)}": PolicyFeature(
                FeatureType.VISUAL, (3, camera.height, camera.width)
            )
            for camera in manifest.cameras
        }
        fixed.setdefault("image_keys", list(features))
        features[OBS_STATE] = PolicyFeature(FeatureType.STATE, manifest.column(OBS_STATE).shape)
        action = {ACTION: PolicyFeature(FeatureType.ACTION, manifest.column(ACTION).shape)}
        config = MolmoAct2Config(input_features=features, output_features=action, push_to_hub=False, **fixed)
        config.set_dataset_feature_metadata({c.key: {"names": c.names} for c in manifest.columns})
    size, limit = manifest.column(ACTION).shape[0], config.expected_max_action_dim
    if size > limit:
        raise PolicyError(f"{ACTION} has {size} dimensions, molmoact2 takes at most {limit}")
    config.validate_features()
    return config


def described_type(path: str) -> str | None:
    """The LeRobot type in `config.json` of checkpoint `path`; None for a base checkpoint, which has none."""
    file = fetch(path, weights=False) / "config.json"
    try:
        described = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise PolicyError(f"model.path = {path}: cannot read its config.json: {error}") from None
    return described.get("type")


def prompt_texts(config: MolmoAct2Config, tasks: list[str]) -> list[str]:
    """The prompts of `tasks` without state and special tokens, for training a tokenizer."""
    return [
        upstream._build_robot_text(
            task=upstream._normalize_question_text(task),
            discrete_state_string=" ",
            setup_type=config.setup_type,
            control_mode=config.control_mode,
            add_setup_tokens=False,
            add_control_tokens=False,
            num_images=len(config.image_features),
        )
        for task in tasks
    ]


def processors(config: MolmoAct2Config, base: Path, manifest: Manifest) -> tuple[Any, Any]:
    """LeRobot's own pre- and post-processor for `config`, on the CPU, reading the base checkpoint in `base`."""
    on_cpu = dataclasses.replace(config, device="cpu", checkpoint_path=str(base))
    return upstream.make_molmoact2_pre_post_processors(on_cpu, statistics_tensors(manifest))


def bare(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` of a LeRobot policy or of a base checkpoint, under a base checkpoint's names."""
    outer = any(key.startswith("model.model.") for key in state)
    return {key.removeprefix("model.") if outer else key: value for key, value in state.items()}


def check_weights(model: ModelConfig, core: CoreConfig) -> None:
    """Compare a checkpoint's headers with the model of `core` and `model.size`. Reads no weight. Raises PolicyError."""
    size = SIZES[model.size].text
    found = core.text_config.hidden_size, core.text_config.num_hidden_layers
    if found != (size.width, size.depth):
        raise PolicyError(
            f"model.path = {model.path}: its language model has width {found[0]} and {found[1]} layers; "
            f"model.size = {model.size!r} has {size.width} and {size.depth}"
        )
    files = weight_files(fetch(model.path))
    header = {name: tensor for file in files for name, tensor in read_header(file).items()}
    compare_shapes(files[0], build_on_meta(core).state_dict(), bare(header), model.size)


def build_module(
    config: MolmoAct2Config, model: ModelConfig, core: CoreConfig, device: torch.device, seed: int
) -> MolmoAct2Policy:
    """LeRobot's policy with random weights from `seed`, or those of `model.path`, every tensor of them."""
    built = build_on_meta(core)
    dtype = _torch_dtype(config.model_dtype)
    if model.path:
        built.to(dtype).to_empty(device=device)
        built.load_state_dict(bare(load_weights(weight_files(fetch(model.path)), device)), strict=True)
    else:
        materialise(built, device, dtype, seed)
    return wrap(config, built)


def wrap(config: MolmoAct2Config, built: nn.Module) -> MolmoAct2Policy:
    """LeRobot's policy around `built`, which takes the place of the one that it would read from a base checkpoint."""

    def install(policy: MolmoAct2Policy) -> None:
        policy.model = built
        policy._override_loaded_max_action_horizon(config.chunk_size)
        policy._freeze_non_action_expert_parameters()

    with mock.patch.object(MolmoAct2Policy, "_load_hf_model", install):
        policy = MolmoAct2Policy(config)
    return policy.train()
