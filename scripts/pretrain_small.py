#!/usr/bin/env python
"""Give the vision-language part of a small π0.5 sense: train the whole policy end to end, then keep that part.

The stand-in for published pretraining where no weights can be had. Loss and gradients are those of LeRobot's joint
forward with everything trainable, on images shifted by a few pixels, for several draws of noise and time behind each
prefix; data, loop and checkpoints are those of somaspeed-train, so the same command with --resume goes on.
OUTPUT/pretrained is the result: a LeRobot checkpoint with the trained vision-language part and an expert of fresh
random weights, to be given as model.path.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from dataio.atomic import PARTIAL
from dataio.manifest import Manifest
from somaspeed import checkpoint, train
from somaspeed.config import Config, load_config
from somaspeed.policies.pi05.forward import live_prefix_kv
from somaspeed.policies.pi05.policy import PI05, STATE_BINS, Inputs, Prefix
from somaspeed.policies.pi05.sizes import SIZES, build_on_meta, materialise

PRETRAINED = "pretrained"
EXPERT = ("gemma_expert", "action_in_proj", "action_out_proj", "time_mlp")
# Of the last prefix layer only keys and values are read.
UNREAD = ("self_attn.q_proj", "self_attn.o_proj", "mlp", "post_attention_layernorm")
DRAWS = 2  # of noise and time for each sample: the expert costs less than the prefix before it
SHIFT = 4  # pixels of 84: as far as the random crops of robomimic's study (arXiv:2108.03298) move an image
WAVELENGTHS = (8, 1024)  # of the state bins' first embedding, in bins: the shortest and the longest


class EndToEnd(PI05):
    """π0.5 without a frozen part: everything trains, on `DRAWS` draws of noise and time for each sample.

    Training images are shifted by up to `shift` pixels; without gradients, for the held-out loss, they stay.
    """

    shift = SHIFT

    def load(self) -> None:
        super().load()
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(self.reached(name))
        if SIZES[self.model_config.size].whole_numbers and not self.model_config.path:
            self.order_numbers()

    @torch.no_grad()
    def order_numbers(self) -> None:
        """Give close state bins close embeddings: half of each becomes sinusoids of the bin's number."""
        weight = self.core.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight
        tokens = [self.tokenizer.encode(f" {number}", add_special_tokens=False)[0] for number in STATE_BINS]
        quarter = weight.shape[1] // 4
        lengths = torch.logspace(*np.log2(WAVELENGTHS), quarter, base=2)
        angles = 2 * torch.pi * torch.tensor(STATE_BINS)[:, None] / lengths
        waves = torch.cat([angles.sin(), angles.cos()], 1) * (2 / weight.shape[1]) ** 0.5
        rest = weight[tokens[:1], 2 * quarter :].expand(len(tokens), -1)
        weight[tokens] = torch.cat([waves.to(weight), rest], 1)

    def draw(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Noise [DRAWS, chunk, max_action_dim] and times [DRAWS]."""
        noise, time = zip(*(super(EndToEnd, self).draw(generator) for _ in range(DRAWS)), strict=True)
        return np.stack(noise), np.stack(time)

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
        """The mean over all draws: `noise` [B, D, S, A] and `time` [B, D], of one draw or more."""
        draws = time.shape[1]
        images = shifted(inputs.images, self.shift, time) if torch.is_grad_enabled() else inputs.images
        with self.precision():
            kv = live_prefix_kv(self.core, images, inputs.tokens, inputs.lengths)
        repeated = Inputs(*(column.repeat_interleave(draws, 0) for column in inputs))
        behind = Prefix(kv.repeat_interleave(draws, 0), repeated.lengths)
        return super().expert_loss(behind, repeated, noise.flatten(0, 1), time.flatten(0, 1))


def shifted(images: Tensor, most: int, time: Tensor) -> Tensor:
    """Each of `images` [B, C, 3, R, R] moved by up to `most` pixels up or down and aside, its edge repeated.

    The drawn `time` is the seed, so that a resumed run shifts alike.
    """
    flat, side = images.flatten(0, 1), images.shape[-1]
    generator = torch.Generator().manual_seed(int(time.cpu().contiguous().view(torch.int32).sum()))
    corners = torch.randint(2 * most + 1, (len(flat), 2), generator=generator).tolist()
    padded = nn.functional.pad(flat, [most] * 4, mode="replicate")
    moved = [image[:, y : y + side, x : x + side] for image, (y, x) in zip(padded, corners, strict=True)]
    return torch.stack(moved).view_as(images)


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
