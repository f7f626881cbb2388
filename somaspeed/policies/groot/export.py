"""GR00T checkpoints that LeRobot loads, here and on another machine.

LeRobot builds the policy from `base_model_path` before it loads the checkpoint's weights. For published sizes that
stays the hub's base model, which resolves anywhere the hub does. Every checkpoint also has `base/`: the model's
configuration without its weights. With `base_model_path` set to it, LeRobot needs neither hub nor network:

    pretrained_model/                config.json, model.safetensors, both processors
    pretrained_model/processor/      tokenizer and image processor
    pretrained_model/base/           what `base_model_path` needs; backbone/ in it for reduced sizes
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lerobot.policies.groot.configuration_groot import GROOT_N1_7_BACKBONE_MODEL
from lerobot.policies.groot.processor_groot import GrootN17VLMEncodeStep
from safetensors.torch import save_file

from somaspeed.policies.groot.sizes import SIZES, backbone_config
from somaspeed.policies.lerobot import save_module

if TYPE_CHECKING:
    from somaspeed.policies.groot.policy import Groot

PROCESSOR, BASE, BACKBONE = "processor", "base", "backbone"
PUBLISHED_BACKBONE = GROOT_N1_7_BACKBONE_MODEL


def save(policy: Groot, directory: Path, final: Path) -> None:
    """Write the whole LeRobot directory of `policy` to `directory`, which will be renamed to `final`.

    The live rows must have been written back to the module.
    """
    final = final.resolve()
    reduced = SIZES[policy.model_config.size]
    with named(policy, str(final / BASE) if reduced else policy.lerobot_config.base_model_path):
        save_module(policy.module, policy.live_parameters().values(), policy.originals, directory)
    policy.processor.save_pretrained(directory / PROCESSOR)
    step = next(step for step in policy.preprocessor.steps if isinstance(step, GrootN17VLMEncodeStep))
    published = policy.tokenizer.name_or_path == PUBLISHED_BACKBONE
    step.model_name = PUBLISHED_BACKBONE if published else str(final / PROCESSOR)
    policy.preprocessor.save_pretrained(directory)
    policy.postprocessor.save_pretrained(directory)
    save_base(policy, directory / BASE, final / BASE)


@contextlib.contextmanager
def named(policy: Groot, base: str) -> Iterator[None]:
    """While saving, the configuration names `base`."""
    kept = policy.module.config
    policy.module.config = dataclasses.replace(kept, base_model_path=base)
    try:
        yield
    finally:
        policy.module.config = kept


def save_base(policy: Groot, directory: Path, final: Path) -> None:
    """Write the model's configuration as a base checkpoint whose weights are all missing.

    transformers wants a weights file there, so one small tensor is in it.
    """
    reduced = SIZES[policy.model_config.size]
    config = type(policy.core.config).from_dict(policy.core.config.to_dict())
    if reduced:
        backbone_config(reduced).save_pretrained(directory / BACKBONE)
        config.model_name = str(final / BACKBONE)
    config.architectures = ["GR00TN17"]
    config.save_pretrained(directory)
    weight = policy.head.vlln.weight if policy.core.config.use_vlln else torch.zeros(1)
    tensors = {"action_head.vlln.weight": weight.detach().cpu().clone()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
