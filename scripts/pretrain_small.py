#!/usr/bin/env python
"""Give the vision-language part of a small π0.5 sense: train the whole policy end to end, then keep that part.

The stand-in for published pretraining where no weights can be had. Loss and gradients are those of LeRobot's own joint
forward with everything trainable; data, loop and checkpoints are those of somaspeed-train, so the same command with
--resume goes on. OUTPUT/pretrained is the result: a LeRobot checkpoint with the trained vision-language part and an
expert of fresh random weights, to be given as model.path.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from dataio.atomic import PARTIAL
from dataio.manifest import Manifest
from somaspeed import checkpoint, train
from somaspeed.config import Config, load_config
from somaspeed.policies.pi05.bench import native_losses
from somaspeed.policies.pi05.policy import PI05, Inputs, Prefix
from somaspeed.policies.pi05.sizes import SIZES, build_on_meta, materialise

PRETRAINED = "pretrained"
EXPERT = ("gemma_expert", "action_in_proj", "action_out_proj", "time_mlp")
# Of the last prefix layer only keys and values are read.
UNREAD = ("self_attn.q_proj", "self_attn.o_proj", "mlp", "post_attention_layernorm")


class EndToEnd(PI05):
    """π0.5 without a frozen part: the expert's loss is that of LeRobot's own forward, and everything trains."""

    def load(self) -> None:
        super().load()
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(self.reached(name))

    def reached(self, name: str) -> bool:
        """Whether the action loss has a gradient for the parameter."""
        language = self.core.paligemma_with_expert.paligemma.model.language_model
        last = f"language_model.layers.{len(language.layers) - 1}."
        dead = [f"{last}{part}" for part in UNREAD] + ["language_model.norm", "lm_head"]
        return not any(f".{part}" in name for part in dead)

    def live_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def frozen(self, inputs: Inputs) -> Tensor:
        return inputs.actions.new_empty(len(inputs.actions), 0)

    def expert_loss(self, prefix: Prefix, inputs: Inputs, noise: Tensor, time: Tensor) -> Tensor:
        return native_losses(self.core, 0, inputs, noise, time, length=inputs.tokens.shape[1])


def main(argv: list[str] | None = None) -> int:
    """Run somaspeed-train on `EndToEnd`, and write OUTPUT/pretrained once it is complete."""
    built: list[EndToEnd] = []

    def end_to_end(config: Config, manifest: Manifest, device: torch.device) -> EndToEnd:
        built.append(EndToEnd(config, manifest, device))
        return built[0]

    with mock.patch.object(train, "policy_class", lambda name: end_to_end):
        status = train.main(argv)
    arguments = train.parse_arguments(argv)
    if status == 0 and not arguments.check and os.environ.get("RANK", "0") == "0":
        config = load_config(arguments.config, arguments.overrides)
        save_fresh(built[0], Path(config.output), config.training.seed + 1)
    return status


@torch.no_grad()
def save_fresh(policy: EndToEnd, output: Path, seed: int) -> None:
    """Write OUTPUT/pretrained with an expert drawn from `seed`."""
    fresh = materialise(build_on_meta(policy.lerobot_config, SIZES[policy.model_config.size]), policy.device, seed)
    drawn = dict(fresh.named_parameters())
    for name, parameter in policy.core.named_parameters():
        if any(part in name for part in EXPERT):
            parameter.copy_(drawn[name])
    final = output / PRETRAINED
    temporary = final.with_name(PRETRAINED + PARTIAL)
    for path in (temporary, final):
        shutil.rmtree(path, ignore_errors=True)
    temporary.mkdir(parents=True)
    policy.save(temporary, final)
    shutil.copy2(output / "checkpoints" / checkpoint.LAST / checkpoint.PRETRAINED / checkpoint.ORIGIN, temporary)
    temporary.rename(final)
    print(f"{final}: the trained vision-language part with a fresh expert; give it as model.path")


if __name__ == "__main__":
    sys.exit(main())
