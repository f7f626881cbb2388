"""MolmoAct2 for LeRobot's trainer: its configuration, and the context in which random weights can be built."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot.policies.molmoact2.modeling_molmoact2 as upstream
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets import LeRobotDatasetMetadata
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config

from somaspeed.config import Config
from somaspeed.native.options import check_size, optimizer_options, upstream_config, without_options
from somaspeed.policies.molmoact2.assemble import AUGMENTATION, prompt_texts
from somaspeed.policies.molmoact2.base import make_base
from somaspeed.policies.molmoact2.sizes import SIZES, build_on_meta, materialise


@contextlib.contextmanager
def prepared(config: Config, meta: LeRobotDatasetMetadata, device: str) -> Iterator[PreTrainedConfig]:
    """LeRobot's configuration, and without a checkpoint a base directory and random weights of the configured size.

    Raises PolicyError.
    """
    model = without_options(config.model, AUGMENTATION)  # that key is the dataset's, upstream
    check_size(model.size, SIZES)
    recipe: dict[str, Any] = {
        "model_dtype": config.training.precision or model.dtype,
        "action_mode": "continuous",
        "train_action_expert_only": model.train_expert_only,
        **optimizer_options(config.training, MolmoAct2Config),
    }
    if model.path or "checkpoint_path" in model.options:
        yield upstream_config(model, MolmoAct2Config, recipe, device)
        return
    size = SIZES[model.size]
    with tempfile.TemporaryDirectory(prefix="somaspeed-molmoact2-") as directory:
        draft = upstream_config(model, MolmoAct2Config, recipe, device)
        make_base(Path(directory), size, prompt_texts(draft, list(meta.tasks.index)))
        policy = upstream_config(model, MolmoAct2Config, {**recipe, "checkpoint_path": directory}, device)

        def random(*_: Any, config: Any, dtype: torch.dtype, **__: Any) -> torch.nn.Module:
            return materialise(build_on_meta(config), torch.device("cpu"), dtype, seed)

        seed = config.training.seed
        with (
            mock.patch.object(upstream.MolmoAct2ForConditionalGeneration, "from_pretrained", random),
            mock.patch.object(upstream, "_strict_load_safetensors_weights", lambda *_: None),
        ):
            yield policy
