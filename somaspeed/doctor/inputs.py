"""Whether the checkpoint and the shards speak of the same things: cameras, widths, prompts."""

from __future__ import annotations

from typing import Any

from torch import nn

from dataio.manifest import Manifest
from somaspeed.actor import Actor
from somaspeed.checkpoint import CheckpointError
from somaspeed.doctor.findings import Finding
from somaspeed.doctor.replay import ACTION, STATE, Frames

TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"


def check_keys(actor: Actor, manifest: Manifest) -> list[Finding]:
    """Cameras, state and action as the policy declares them, and as the shards have them."""
    findings = []
    try:
        actor.check_cameras([camera.name for camera in manifest.cameras])
    except CheckpointError as error:
        findings.append(Finding("key map", "problem", str(error)))
    unused = [camera.name for camera in manifest.cameras if camera.name not in actor.cameras]
    if unused:
        findings.append(Finding("key map", "note", f"the policy does not look at camera(s) {', '.join(unused)}"))
    for key, features in ((STATE, actor.config.input_features), (ACTION, actor.config.output_features)):
        here, there = manifest.column(key).shape, tuple(features[key].shape) if key in features else None
        if here != there:
            findings.append(Finding("key map", "problem", f"{key} is {there} in the policy and {here} in the shards"))
    pairs = ", ".join(f"{camera} → {actor.renames.get(camera, camera)}" for camera in actor.cameras)
    return findings or [Finding("key map", "ok", f"cameras {pairs}; state and action have the widths of the data")]


def check_prompts(actor: Actor, frames: Frames) -> list[Finding]:
    """Whether every task's prompt reaches the policy whole, and different tasks differently."""
    firsts = {task: row for row, task in reversed(list(enumerate(frames.tasks)))}
    rows = list(firsts.values())
    images = {camera: stack[rows] for camera, stack in frames.images.items()}
    processed = actor.preprocessor(actor.observation(images, frames.state[rows], list(firsts)))
    tokens, mask = processed.get(TOKENS), processed.get(MASK)
    if tokens is None or mask is None:
        return [Finding("tokenizer", "note", f"a {actor.config.type} policy's prompts are made elsewhere; not checked")]
    findings = []
    if mask.bool().all(dim=1).any():
        text = f"prompts are cut at {mask.shape[1]} tokens; the tokenizer is not the one the policy was trained with"
        findings.append(Finding("tokenizer", "problem", text))
    known = embeddings(actor.policy)
    if known and int(tokens.max()) >= known:
        text = f"token {int(tokens.max())} is beyond the policy's {known} embeddings: another policy's tokenizer"
        findings.append(Finding("tokenizer", "problem", text))
    if len({tuple(row) for row in tokens.tolist()}) < len(rows):
        findings.append(Finding("tokenizer", "problem", "different tasks give the same tokens"))
    lengths = mask.sum(dim=1)
    return findings or [
        Finding("tokenizer", "ok", f"prompts of {int(lengths.min())} to {int(lengths.max())} tokens, none cut")
    ]


def embeddings(policy: Any) -> int:
    """How many tokens the policy has embeddings for; 0 when it has no table."""
    return max((m.num_embeddings for m in policy.modules() if isinstance(m, nn.Embedding)), default=0)
