"""GR00T's parts from LeRobot: configuration, processors, and the module with its weights."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import lerobot.policies.groot.processor_groot as upstream_processor
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.groot.configuration_groot import GROOT_ACTION_DECODE_TRANSFORM_LIBERO, GrootConfig
from lerobot.policies.groot.groot_n1_7 import GR00T_N1_7_DEFAULTS, CategorySpecificLinear
from lerobot.policies.groot.modeling_groot import GrootPolicy
from lerobot.policies.groot.processor_groot import N1_7_EMBODIMENT_MAPPING
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3VLProcessor

from dataio.manifest import Manifest, did_you_mean
from somaspeed.config import ModelConfig
from somaspeed.policies.base import PolicyError
from somaspeed.policies.groot.images import JitterRanges
from somaspeed.policies.groot.sizes import SIZES, SPECIAL_IDS, TUNE, build_core, sized
from somaspeed.policies.lerobot import check_supported, checked_options
from somaspeed.policies.weights import check_header, find_weights

NATIVE_BACKEND = "native-gr00t-hf-trainer-zero2"
HORIZON: int = GR00T_N1_7_DEFAULTS["action_horizon"]
TIME: tuple[float, float, float] = tuple(
    GR00T_N1_7_DEFAULTS[key] for key in ("noise_beta_alpha", "noise_beta_beta", "noise_s")
)
CORE_KEYS = ("color_jitter_params", "state_dropout_prob")  # keys of GR00TN17Config that [model] may set
LM_HEAD = "_groot_model.backbone.model.lm_head.weight"
EMBEDDING = "_groot_model.backbone.model.model.language_model.embed_tokens.weight"


class Options(NamedTuple):
    """The policy's own keys of `[model]`: for `GrootConfig`, for `GR00TN17Config`, and the colour jitter."""

    policy: ModelConfig
    core: dict[str, Any]
    jitter: JitterRanges | None


def split_options(model: ModelConfig) -> Options:
    """Sort the policy's own keys. Raises PolicyError for a jitter that torchvision would refuse."""
    core = {key: value for key, value in model.options.items() if key in CORE_KEYS}
    rest = {key: value for key, value in model.options.items() if key not in CORE_KEYS}
    given = core.get("color_jitter_params")
    if given is None:
        jitter = None
    else:
        for key, value in given.items():
            limit = 0.5 if key == "hue" else 1.0
            if key not in JitterRanges._fields:
                known = JitterRanges._fields
                raise PolicyError(f"model.color_jitter_params.{key} is unknown{did_you_mean(key, known)}")
            if not 0 <= value <= limit:
                raise PolicyError(f"model.color_jitter_params.{key} = {value} must lie in [0, {limit:g}]")
        jitter = JitterRanges(**given) if any(given.values()) else None
    dropout = core.get("state_dropout_prob", 0.0)
    if not 0 <= dropout < 1:
        raise PolicyError(f"model.state_dropout_prob = {dropout} must lie in [0, 1)")
    return Options(replaced_options(model, rest), core, jitter)


def replaced_options(model: ModelConfig, options: dict[str, Any]) -> ModelConfig:
    fields = {name: getattr(model, name) for name in model.__struct_fields__}
    return ModelConfig(**{**fields, "options": options})


def lerobot_config(
    model: ModelConfig,
    policy: ModelConfig,
    renames: dict[str, str],
    manifest: Manifest,
    device: torch.device,
    autocast: bool,
) -> GrootConfig:
    """LeRobot's configuration: from the checkpoint or from the shards' features, with `[model]`'s own keys on top.

    `policy` is `model` without the keys that are not `GrootConfig`'s.
    """
    check_supported(model, SIZES, NATIVE_BACKEND)
    options = checked_options(policy, GrootConfig)
    for key in ("tune_llm", "tune_visual", "tune_top_llm_layers"):
        if options.get(key):
            raise PolicyError(
                f"model.{key} is not supported here: the frozen prefix is what makes this trainer fast. "
                f'Use backend = "{NATIVE_BACKEND}".'
            )
    chunk = options.get("chunk_size", HORIZON)
    if not 1 <= chunk <= HORIZON:
        raise PolicyError(f"model.chunk_size = {chunk}: GR00T N1.7 predicts {HORIZON} steps, so 1 to {HORIZON}")
    fixed = {"device": device.type, "use_bf16": autocast, **options}
    if model.path:
        find_weights(model.path)
        base = PreTrainedConfig.from_pretrained(model.path)
        if not isinstance(base, GrootConfig):
            raise PolicyError(f"model.path = {model.path} holds a {base.type!r} policy, not groot")
        chunk = options.get("chunk_size", base.chunk_size)
        fixed.setdefault("n_action_steps", min(base.n_action_steps, chunk))
        config = dataclasses.replace(base, **fixed)
    else:
        images = {
            f"{OBS_IMAGES}.{renames.get(camera.name, camera.name)}": PolicyFeature(
                FeatureType.VISUAL, (3, camera.height, camera.width)
            )
            for camera in manifest.cameras
        }
        state = {OBS_STATE: PolicyFeature(FeatureType.STATE, manifest.column(OBS_STATE).shape)}
        action = {ACTION: PolicyFeature(FeatureType.ACTION, manifest.column(ACTION).shape)}
        fixed.setdefault("n_action_steps", chunk)
        config = GrootConfig(input_features={**dict(sorted(images.items())), **state}, output_features=action, **fixed)
    check_fit(config, manifest)
    config.validate_features()
    return config


def check_fit(config: GrootConfig, manifest: Manifest) -> None:
    """Raise PolicyError where the shards do not fit the configuration."""
    for key, limit in ((OBS_STATE, config.max_state_dim), (ACTION, config.max_action_dim)):
        if manifest.column(key).shape[0] > limit:
            raise PolicyError(f"{key} has {manifest.column(key).shape[0]} dimensions, groot takes at most {limit}")
    if config.embodiment_tag not in N1_7_EMBODIMENT_MAPPING:
        raise PolicyError(
            f"model.embodiment_tag = {config.embodiment_tag!r} is unknown"
            f"{did_you_mean(config.embodiment_tag, N1_7_EMBODIMENT_MAPPING)}"
        )
    lowest = manifest.statistics[ACTION].min[-1] if ACTION in manifest.statistics else 0.0
    if config.action_decode_transform == GROOT_ACTION_DECODE_TRANSFORM_LIBERO and lowest < -0.5:
        raise PolicyError(
            f"model.action_decode_transform = 'libero' (the default of embodiment 'libero_sim') takes a gripper in "
            f"[0, 1] and turns its sign, but the shards' last action goes down to {lowest:g}: they hold the "
            'simulator\'s own command. Set model.action_decode_transform = "none".'
        )


def processors(
    config: GrootConfig,
    statistics: dict[str, dict[str, Tensor]],
    processor: Qwen3VLProcessor,
    resolution: int,
    crop: int,
) -> tuple[Any, Any]:
    """LeRobot's own pre- and post-processor for `config`, on the CPU, with `processor` in place of the hub's.

    The statistics are the shards' (minimum and maximum, as LeRobot normalises GR00T), also where the base checkpoint
    has some. A chunk shorter than the model's horizon is padded to it and masked.
    """
    on_cpu = dataclasses.replace(config, device="cpu", base_model_path=None)
    before, after = upstream_processor.make_groot_pre_post_processors(on_cpu, statistics)
    for step in before.steps:
        if isinstance(step, upstream_processor.GrootN17PackInputsStep):
            step.action_horizon, step.valid_action_horizon = HORIZON, config.chunk_size
        if isinstance(step, upstream_processor.GrootN17VLMEncodeStep):
            step.image_target_size, step.image_crop_size = [resolution] * 2, [crop] * 2
            step._proc = processor
    return before, after


def tied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with both names of the embedding that LeRobot ties to the unused language head, when it has one."""
    for name, other in ((LM_HEAD, EMBEDDING), (EMBEDDING, LM_HEAD)):
        if name not in state and other in state:
            return {**state, name: state[other]}
    return state


def core_changes(config: GrootConfig, core_options: dict[str, Any]) -> dict[str, Any]:
    """The keys of `GR00TN17Config` that the run sets."""
    return {**{key: getattr(config, key) for key in TUNE}, **core_options}


def check_weights(config: GrootConfig, model: ModelConfig, core_options: dict[str, Any]) -> None:
    """Compare the checkpoint's header with the policy at `model.size`. Raises PolicyError; reads no weight."""
    shell = nn.Module()
    shell._groot_model = build_core(SIZES[model.size], torch.device("meta"), 0, **core_changes(config, core_options))
    check_header(find_weights(model.path), shell.state_dict(), tied, model.size)


def build_module(config: GrootConfig, model: ModelConfig, seed: int, core_options: dict[str, Any]) -> GrootPolicy:
    """`GrootPolicy` at `model.size`: from `model.path`, from a named base checkpoint, or random weights from `seed`."""
    if "base_model_path" in model.options and not model.path:
        module = from_base(config)
        head = module._groot_model.action_head
        head.state_dropout_prob = core_options.get("state_dropout_prob", head.state_dropout_prob)
    else:
        with sized(model.size, seed, **core_options):
            module = GrootPolicy(config)
        if SIZES[model.size] and not model.path:
            widen(module)
    if model.path:
        module.load_state_dict(tied(load_file(find_weights(model.path), device=str(config.device))), strict=True)
    module.to(config.device)
    module.train()
    return module


@torch.no_grad()
def widen(module: GrootPolicy) -> None:
    """Draw the tables of a reduced head wider.

    LeRobot's deviation of 0.02 suits its widths of a thousand; through narrow layers it lets no signal pass.
    """
    for layer in module.modules():
        if isinstance(layer, CategorySpecificLinear):
            layer.W.mul_(layer.W.shape[1] ** -0.5 / 0.02)


def from_base(config: GrootConfig) -> GrootPolicy:
    """`GrootPolicy` from the base checkpoint that `config` names, as LeRobot loads it."""
    try:
        return GrootPolicy(config)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PolicyError(
            f"model.base_model_path = {config.base_model_path} cannot be loaded: {reason}\n"
            f"Download it where there is access (`hf download {config.base_model_path}`) and give its directory."
        ) from None


def name_special_tokens(module: GrootPolicy, processor: Any) -> None:
    """Give LeRobot's backbone the ids that `processor` has for images: for a trained tokenizer at full size."""
    config = module._groot_model.backbone.model.config
    for key, token in SPECIAL_IDS.items():
        setattr(config, key, processor.tokenizer.convert_tokens_to_ids(token))
