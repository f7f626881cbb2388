"""GR00T N1.7 for transformers' Trainer: LeRobot's model, dataset and pre-processor, at any size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType
from lerobot.datasets import LeRobotDataset, LeRobotDatasetMetadata
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.policies.groot.configuration_groot import GrootConfig
from lerobot.utils.constants import ACTION, OBS_STATE
from lerobot.utils.feature_utils import dataset_to_policy_features
from torch import Tensor
from torchvision.transforms.v2 import ColorJitter

from somaspeed.config import Config
from somaspeed.native.huggingface import Problem
from somaspeed.native.options import check_size, upstream_config
from somaspeed.policies.groot.assemble import build_module, processors, split_options
from somaspeed.policies.groot.export import PUBLISHED_BACKBONE
from somaspeed.policies.groot.prompt import make_processor, train_chat_tokenizer
from somaspeed.policies.groot.sizes import SIZES, resolution
from somaspeed.policies.tokenizer import load_tokenizer


@contextlib.contextmanager
def prepared(config: Config, meta: LeRobotDatasetMetadata, device: str) -> Iterator[Problem]:
    """LeRobot's model, dataset and pre-processor for the Trainer. Raises PolicyError."""
    model = config.model
    check_size(model.size, SIZES)
    options = split_options(model)
    bfloat16 = (config.training.precision or model.dtype) == "bfloat16"
    policy_config: GrootConfig = upstream_config(options.policy, GrootConfig, {"use_bf16": bfloat16}, device)
    features = dataset_to_policy_features(meta.features)
    policy_config.output_features = {k: f for k, f in features.items() if f.type is FeatureType.ACTION}
    policy_config.input_features = {k: f for k, f in features.items() if f.type is not FeatureType.ACTION}
    policy = build_module(policy_config, model, config.training.seed, options.core)
    size = SIZES[model.size]
    if model.tokenizer or not size:
        tokenizer: Any = load_tokenizer(model.tokenizer or PUBLISHED_BACKBONE)
    else:
        tokenizer = train_chat_tokenizer([task.lower() for task in meta.tasks.index], size.language.vocabulary)
    side, crop = resolution(model.size)
    statistics = {key: tensors(meta.stats[key]) for key in (OBS_STATE, ACTION)}
    preprocessor, _ = processors(policy_config, statistics, make_processor(tokenizer, side), side, crop)

    def inputs(batch: dict[str, Any]) -> dict[str, Tensor]:
        return policy._filter_groot_inputs(preprocessor(batch), include_action=True)

    dataset = LeRobotDataset(
        "local/dataset",
        root=meta.root,
        delta_timestamps=resolve_delta_timestamps(policy_config, meta),
        image_transforms=ColorJitter(**options.jitter._asdict()) if options.jitter else None,
    )
    yield Problem(policy._groot_model, dataset, inputs)


def tensors(statistics: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """One feature's statistics as LeRobot's processors take them."""
    return {kind: torch.as_tensor(values, dtype=torch.float32) for kind, values in statistics.items()}
