"""The run configuration: typed TOML sections, overrides from the command line, errors that name the fix."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, field

from dataio.manifest import did_you_mean

Positive = Annotated[int, Meta(gt=0)]
NonNegative = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the key and what it may be."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which policy, and where its weights come from.

    `options` collects every other key of the section: they go to the policy's own LeRobot configuration by name.
    """

    name: str
    path: str = ""  # LeRobot checkpoint directory or hub id; empty: random weights of `size`
    size: str = "full"
    dtype: Literal["float32", "bfloat16"] = "float32"
    numerics: Literal["default", "native"] = "default"  # "native": reproduce native's batch-dependent details
    tokenizer: str = ""  # tokenizer directory or hub id; empty: the policy's own
    mask_padded_actions: bool = False  # leave steps past the episode's end out of the loss; native keeps them
    train_expert_only: bool = True
    lora: bool = False
    options: dict[str, Any] = {}


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How shards become batches."""

    map: dict[str, str] = {}  # shard camera → the policy's camera, where the names differ
    held_out: Fraction = 0.0  # fraction of episodes kept for the held-out loss
    verify: Literal["auto", "full", "size"] = "auto"  # what to check of every shard before training
    prefetch: Positive = 2  # batches decoded ahead
    frame_cache: Literal["off", "disk", "memory"] = "off"  # keep decoded frames; later epochs decode nothing
    frame_cache_directory: str = ""  # of the disk cache; default: frame_cache beside the run's output
    order: Literal["auto", "global", "block"] = "auto"  # block for URLs and local sets beyond memory, else global
    shards_in_flight: Positive = 16  # of the block order: whole shards, shuffled across them
    remote_cache: str = ""  # where shards behind a URL are kept; default: shard_cache beside the run's output
    remote_cache_gb: Annotated[float, Meta(gt=0)] = 50.0  # at most so much of them


class PrefixConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frozen prefix."""

    cache: Literal["off", "memory", "disk"] = "off"  # keep what the frozen part computes, and read it back
    directory: str = ""  # of the disk cache; default: prefix_cache beside the run's output
    dtype: Literal["compute", "bfloat16"] = "compute"  # of the cache; bfloat16 rounds where the run computes in float32
    lookahead: Literal[0, 1] = 1  # prefixes computed ahead, hiding the reduction; 0 hides nothing
    buckets: tuple[Positive, ...] = (64, 96, 128, 200)  # static prompt lengths, in tokens


class ParallelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How ranks share the work. Frozen weights are replicated and never communicated."""

    replicate: Positive | None = None  # number of replicas; default: ranks / shard
    shard: Positive = 1  # consecutive ranks that split masters, moments and update between them
    wire: Literal["float32", "bfloat16"] = "float32"  # how gradients travel; they are summed in float32
    timeout_seconds: Annotated[float, Meta(gt=0)] = 600.0


class TrainingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Length, batch, optimizer and logging. `global_batch = microbatch × ranks × accumulation`."""

    steps: Positive
    microbatch: Positive
    global_batch: Positive | None = None  # default: microbatch × ranks
    workers: NonNegative = 2  # reading threads
    seed: int = 42
    lr: Rate = 2.5e-5
    weight_decay: Rate = 0.01
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    warmup_steps: NonNegative = 1000
    decay_lr: Rate = 2.5e-6
    decay_steps: Positive = 30_000
    clip_grad: Annotated[float, Meta(gt=0)] = 1.0
    precision: Literal["float32", "bfloat16"] | None = None  # default: model.dtype
    warmup_measurement: NonNegative = 5  # first updates left out of the steady rate
    max_seconds: Annotated[float, Meta(gt=0)] | None = None  # stop early, set-up included
    max_training_seconds: Annotated[float, Meta(gt=0)] | None = None  # stop early, by the updates' own time
    max_nonfinite: NonNegative = 5  # updates skipped for non-finite gradients before the run stops
    log_every: Positive = 10
    save_every: Positive | None = None  # default: at the end
    keep_checkpoints: Positive | None = None  # default: all
    evaluate_every: Positive | None = None  # held-out loss; default: when saving
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    threads: Positive | None = None  # CPU threads of torch; default: torch's


class EvaluateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Closed-loop evaluation of checkpoints while training goes on, as `somaspeed-eval` does it."""

    every: Positive | None = None  # updates between evaluations, each of a checkpoint saved for it; default: none
    suite: str = "libero_spatial"
    tasks: int | str = "all"  # or numbers: 0, "0,3"
    episodes: Positive = 5  # per task
    first_init: NonNegative = 0  # first stored initial state
    n_action_steps: Positive | None = None  # actions taken of each chunk; default: the policy's
    workers: Positive | None = None  # simulator processes; default: by the machine
    device: Literal["", "cpu", "cuda"] = ""  # of the policy; default: CUDA where there is one


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole run."""

    output: str
    model: ModelConfig
    training: TrainingConfig
    backend: str = "somaspeed"
    data: DataConfig = field(default_factory=DataConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def accumulation(self, ranks: int) -> int:
        """Micro-batches per update on each of `ranks` ranks.

        Raises ConfigError when `global_batch` is not a multiple of `microbatch × ranks`, naming the nearest that is.
        """
        unit = self.training.microbatch * ranks
        total = self.training.global_batch or unit
        if total % unit:
            low, high = total // unit * unit, (total // unit + 1) * unit
            near = high if low == 0 or high - total < total - low else low
            raise ConfigError(
                f"training.global_batch = {total} is not a multiple of microbatch × ranks = "
                f"{self.training.microbatch} × {ranks} = {unit}. The nearest that is: {near}."
            )
        return total // unit


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML configuration and apply `section.key=value` overrides.

    Raises ConfigError for a missing file, bad TOML, an unknown key (with the closest match), a wrong type or a value
    out of range, naming the key.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration. The repository's own are in configs/.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides or []:
        apply_override(raw, override)
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str) -> Config:
    """Build a `Config` from plain dictionaries; `where` names them in errors. Raises ConfigError."""
    raw = {**raw, "model": gather_options(raw.get("model", {}))}
    reject_unknown(raw, Config, where)
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        message = str(error).replace("`$.", "`").replace("Object missing required field", "missing key")
        raise ConfigError(f"{where}: {message}") from None


def gather_options(model: dict[str, Any]) -> dict[str, Any]:
    """Move the keys of `[model]` that are the policy's own into `options`."""
    if not isinstance(model, dict):
        return model
    own = {key: value for key, value in model.items() if key in ModelConfig.__struct_fields__}
    theirs = {key: value for key, value in model.items() if key not in own}
    return {**own, "options": {**own.get("options", {}), **theirs}}


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `raw`; the value is TOML, or a plain string where it is not."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"override {override!r}: expected section.key=value, e.g. training.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, key = name.strip().split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
    raw[key] = value


def reject_unknown(raw: dict[str, Any], struct: type[msgspec.Struct], where: str, prefix: str = "") -> None:
    """Raise ConfigError for the first key of `raw` that `struct` does not have."""
    hints = get_type_hints(struct)
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {prefix + key!r}{did_you_mean(key, hints)}")
        nested = hints[key]
        if isinstance(value, dict) and isinstance(nested, type) and issubclass(nested, msgspec.Struct):
            reject_unknown(value, nested, where, f"{prefix}{key}.")


def to_builtins(config: Config) -> dict[str, Any]:
    """`config` as plain dictionaries, with the policy's own keys back in `[model]`; `parse_config` reads it again."""
    raw = msgspec.to_builtins(config)
    raw["model"].update(raw["model"].pop("options"))
    return raw
