"""Checkpoints: a complete LeRobot policy directory beside the training state, written atomically.

checkpoints/000300/pretrained_model/   what LeRobot loads, and somaspeed.json: which run it is from
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

from dataio.atomic import PARTIAL, sync, write_bytes
from somaspeed.optim import ArenaAdamW

PRETRAINED, TRAINING, LAST = "pretrained_model", "training_state", "last"
OPTIMIZER = "optimizer-{shard:03d}-of-{shards:03d}.safetensors"
ORIGIN = "somaspeed.json"
# Of the policies whose pre-processor reads files by a path: the checkpoint's folder, the step and its field.
STORED = {
    "groot": ("processor", "groot_n1_7_vlm_encode_v1", "model_name"),
    "molmoact2": ("base", "molmoact2_pack_inputs", "checkpoint_path"),
}
UNREADABLE = "{path}: cannot read its {what} ({error}). Remove it to resume from the one before."


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not belong to this run. The message says what to do."""


class TrainingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What resuming needs beside the tensors. `identity` must be the same in the run that resumes."""

    step: int
    loader: dict[str, Any]
    identity: dict[str, Any]
    slots: list[list[tuple[str, int, list[int]]]]
    shards: int = 1
    skipped_updates: int = 0


def slots_of(optimizer: ArenaAdamW) -> list[list[tuple[str, int, list[int]]]]:
    """The layout of every arena: (parameter name, offset, shape)."""
    return [[(slot.name, slot.offset, list(slot.shape)) for slot in arena.slots] for arena in optimizer.arenas]


def begin(output: Path, step: int) -> Path:
    """Make the empty directory, under a temporary name, that `write_optimizer` and the policy fill. Main rank."""
    temporary = partial(output, step)
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / PRETRAINED).mkdir(parents=True)
    (temporary / TRAINING).mkdir()
    return temporary


def write_optimizer(output: Path, step: int, optimizer: ArenaAdamW, shard: int, shards: int) -> None:
    """Write one shard's flat ranges. One rank of every shard group position calls it."""
    tensors = {name: tensor.detach().cpu() for name, tensor in optimizer.state_dict().items()}
    save_file(tensors, partial(output, step) / TRAINING / OPTIMIZER.format(shard=shard, shards=shards))


def finish(output: Path, state: TrainingState, keep: int | None) -> Path:
    """Write the state, flush everything and give the checkpoint its name. Main rank, after all have written."""
    temporary = partial(output, state.step)
    final = place(output, state.step)
    write_bytes(temporary / TRAINING / "state.json", msgspec.json.format(msgspec.json.encode(state), indent=1))
    origin = state.identity | {"step": state.step}
    write_bytes(temporary / PRETRAINED / ORIGIN, msgspec.json.format(msgspec.json.encode(origin), indent=1))
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


def find_policy(path: Path) -> Path | None:
    """The LeRobot policy directory that `path` names: itself, a checkpoint's, or a run's newest."""
    candidates = (path, path / PRETRAINED, path / "checkpoints" / LAST / PRETRAINED)
    return next((candidate for candidate in candidates if (candidate / "config.json").is_file()), None)


def load_origin(directory: Path) -> dict[str, Any]:
    """What `somaspeed.json` says of the run that wrote the checkpoint; empty when there is none.

    Raises CheckpointError when it cannot be read.
    """
    try:
        return msgspec.json.decode((directory / ORIGIN).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{directory / ORIGIN}: not readable: {error}") from None


def place(output: Path, step: int) -> Path:
    """Where the checkpoint of `step` is once it is finished."""
    return output / "checkpoints" / f"{step:06d}"


def partial(output: Path, step: int) -> Path:
    return place(output, step).with_name(f"{step:06d}{PARTIAL}")


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
    """Restore masters, moments and compute parameters, saved in whatever layout. Raises CheckpointError."""
    if slots_of(optimizer) != [[(name, offset, list(shape)) for name, offset, shape in arena] for arena in state.slots]:
        raise CheckpointError(f"{path}: its parameters are not those of this policy; the configuration has changed.")
    try:
        parts = [
            load_file(path / TRAINING / OPTIMIZER.format(shard=shard, shards=state.shards))
            for shard in range(state.shards)
        ]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(UNREADABLE.format(path=path, what="optimizer state", error=error)) from None
    tensors = {name: torch.cat([part[name] for part in parts]) if parts[0][name].ndim else parts[0][name]
               for name in parts[0]}  # fmt: skip
    optimizer.load_state_dict(tensors)
    optimizer.skipped.fill_(state.skipped_updates)


def load_processors(directory: Path) -> tuple[Any, Any]:
    """LeRobot's pre- and post-processor of checkpoint `directory`, with the tokenizer that is stored in it.

    Works offline and after the checkpoint was moved to another machine. Raises CheckpointError when a folder that they
    read was left behind.
    """
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import make_pre_post_processors
    from transformers import AutoTokenizer

    config = PreTrainedConfig.from_pretrained(str(directory))
    overrides: dict[str, Any] = {}
    if has_folder(directory, "tokenizer", "tokenizer_processor", "tokenizer_name"):
        overrides["tokenizer_processor"] = {"tokenizer": AutoTokenizer.from_pretrained(str(directory / "tokenizer"))}
    folder, step, field = STORED.get(config.type, ("", "", ""))
    if folder and has_folder(directory, folder, step, field):
        overrides[step] = {field: str(directory / folder)}
    return make_pre_post_processors(config, str(directory), preprocessor_overrides=overrides)


def has_folder(directory: Path, folder: str, step: str, field: str) -> bool:
    """Whether `folder`, which `field` of the pre-processor's `step` names, is in checkpoint `directory`.

    Raises CheckpointError when it was there where the checkpoint was written.
    """
    if (directory / folder).is_dir():
        return True
    try:
        steps = msgspec.json.decode((directory / "policy_preprocessor.json").read_bytes())["steps"]
        named = [entry["config"].get(field) for entry in steps if entry.get("registry_name") == step]
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return False  # LeRobot will say what is wrong with it
    for path in named:
        if isinstance(path, str) and Path(path).is_absolute() and Path(path).name == folder:
            raise CheckpointError(f"{directory}: its {folder}/ is missing; copy the checkpoint whole.")
    return False
