"""π0.5 for LeRobot's trainer: its configuration, and the context in which reduced sizes can be built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lerobot.policies.pi05.processor_pi05 as upstream_processor
from lerobot.configs import PreTrainedConfig
from lerobot.datasets import LeRobotDatasetMetadata
from lerobot.policies.pi05.configuration_pi05 import PI05Config

from somaspeed.config import Config
from somaspeed.native.options import check_size, optimizer_options, upstream_config
from somaspeed.policies.pi05.sizes import SIZES, sized
from somaspeed.policies.tokenizer import load_tokenizer, train_tokenizer


@contextlib.contextmanager
def prepared(config: Config, meta: LeRobotDatasetMetadata, device: str) -> Iterator[PreTrainedConfig]:
    """LeRobot's configuration, and while in the context the configured size and tokenizer.

    The published architecture with the published tokenizer is built by LeRobot alone. Raises PolicyError.
    """
    model = config.model
    check_size(model.size, SIZES)
    size = SIZES[model.size]
    recipe: dict[str, Any] = {
        "dtype": config.training.precision or model.dtype,
        "train_expert_only": model.train_expert_only,
        "freeze_vision_encoder": model.train_expert_only,
        **optimizer_options(config.training, PI05Config),
    }
    if size:
        recipe["image_resolution"] = (size.resolution, size.resolution)
    with contextlib.ExitStack() as stack:
        if size or not model.path:
            stack.enter_context(sized(model.size, config.training.seed))
        if model.tokenizer:
            stack.enter_context(tokenized(load_tokenizer(model.tokenizer)))
        elif size:
            prompts = [f"Task: {task}, State: -1 0 1 2 3 4 5 6 7 8 9;\nAction: " for task in meta.tasks.index]
            stack.enter_context(tokenized(train_tokenizer(prompts, size.vocabulary)))
        yield upstream_config(model, PI05Config, recipe, device)


@contextlib.contextmanager
def tokenized(tokenizer: Any) -> Iterator[None]:
    """LeRobot's pre-processor is built with `tokenizer` in place of the hub's."""
    step = upstream_processor.TokenizerProcessorStep

    def with_tokenizer(tokenizer_name: str, **settings: Any) -> Any:
        return step(tokenizer=tokenizer, **settings)

    with mock.patch.object(upstream_processor, "TokenizerProcessorStep", with_tokenizer):
        yield
