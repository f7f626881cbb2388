"""Checkpoints: a complete LeRobot policy directory beside the training state, written atomically.

checkpoints/000300/pretrained_model/   what LeRobot loads
checkpoints/000300/training_state/     state.json, optimizer.safetensors
checkpoints/last                       link to the newest
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dataio.atomic import PARTIAL, sync, write_bytes
from somaspeed.optim import ArenaAdamW
from somaspeed.policies.base import Policy

PRETRAINED, TRAINING, LAST = "pretrained_model", "training_state", "last"
UNREADABLE = "{path}: cannot read its {what} ({error}). Remove it to resume from the one before."


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not belong to this run. The message says what to do."""


class TrainingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What resuming needs beside the tensors. `identity` must be the same in the run that resumes."""

    step: int
    loader: dict[str, Any]
    identity: dict[str, Any]
    slots: list[list[tuple[str, int, list[int]]]]
    skipped_updates: int = 0


def slots_of(optimizer: ArenaAdamW) -> list[list[tuple[str, int, list[int]]]]:
    """The layout of every arena: (parameter name, offset, shape)."""
    return [[(slot.name, slot.offset, list(slot.shape)) for slot in arena.slots] for arena in optimizer.arenas]


def save_checkpoint(
    output: Path, policy: Policy, optimizer: ArenaAdamW, state: TrainingState, keep: int | None
) -> Path:
    """Write `checkpoints/<step>`: everything under a temporary name, then one rename. Returns its path."""
    final = output / "checkpoints" / f"{state.step:06d}"
    temporary = final.with_name(final.name + PARTIAL)
    shutil.rmtree(temporary, ignore_errors=True)
    pretrained, training = temporary / PRETRAINED, temporary / TRAINING
    pretrained.mkdir(parents=True)
    training.mkdir()
    policy.save(pretrained, final / PRETRAINED)
    tensors = {name: tensor.detach().cpu() for name, tensor in optimizer.state_dict().items()}
    save_file(tensors, training / "optimizer.safetensors")
    write_bytes(training / "state.json", msgspec.json.format(msgspec.json.encode(state), indent=1))
    for path in sorted(temporary.rglob("*")):
        sync(path)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    link_last(final)
    if keep is not None:
        for old in finished(output)[:-keep]:
            shutil.rmtree(old)
    return final


def link_last(final: Path) -> None:
    """Point `checkpoints/last` at `final`, atomically."""
    link = final.with_name(LAST)
    temporary = link.with_name(LAST + PARTIAL)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(final.name)
    os.replace(temporary, link)
    sync(final.parent)


def finished(output: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path for path in (output / "checkpoints").glob("*") if path.name.isdigit())


def load_state(output: Path, identity: dict[str, Any]) -> tuple[Path, TrainingState]:
    """The newest checkpoint of a run and its state.

    Raises CheckpointError when there is none, when it cannot be read, or when it belongs to other data or another
    order: then resuming would not be the same run.
    """
    checkpoints = finished(output)
    if not checkpoints:
        raise CheckpointError(f"{output}: nothing to resume, it has no complete checkpoint. Start without --resume.")
    path = checkpoints[-1]
    try:
        state = msgspec.json.decode((path / TRAINING / "state.json").read_bytes(), type=TrainingState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(UNREADABLE.format(path=path, what="training state", error=error)) from None
    for key, value in identity.items():
        if state.identity.get(key) != value:
            raise CheckpointError(
                f"{path}: was made with {key} = {state.identity.get(key)!r}, this run has {value!r}. "
                "Resuming would not continue that run; use another output for a new one."
            )
    return path, state


def load_tensors(path: Path, state: TrainingState, optimizer: ArenaAdamW) -> None:
    """Restore masters, moments and compute parameters from checkpoint `path`. Raises CheckpointError."""
    if slots_of(optimizer) != [[(name, offset, list(shape)) for name, offset, shape in arena] for arena in state.slots]:
        raise CheckpointError(f"{path}: its parameters are not those of this policy; the configuration has changed.")
    try:
        tensors: dict[str, Tensor] = load_file(path / TRAINING / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(UNREADABLE.format(path=path, what="optimizer state", error=error)) from None
    with torch.no_grad():
        optimizer.load_state_dict(tensors)
    optimizer.skipped.fill_(state.skipped_updates)


def load_processors(directory: Path) -> tuple[Any, Any]:
    """LeRobot's pre- and post-processor of checkpoint `directory`, with the tokenizer that is stored in it.

    Works offline and after the checkpoint was moved to another machine.
    """
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import make_pre_post_processors
    from transformers import AutoTokenizer

    config = PreTrainedConfig.from_pretrained(str(directory))
    overrides: dict[str, Any] = {}
    if (directory / "tokenizer").is_dir():
        overrides["tokenizer_processor"] = {"tokenizer": AutoTokenizer.from_pretrained(str(directory / "tokenizer"))}
    return make_pre_post_processors(config, str(directory), preprocessor_overrides=overrides)
