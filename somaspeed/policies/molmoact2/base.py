"""The base checkpoint that LeRobot's `checkpoint_path` names: model configuration, tokenizer, processor settings.

LeRobot's policy reads them from there even when its weights come from a LeRobot checkpoint. For random weights a base
is made locally, with a tokenizer trained on the prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import MolmoAct2Config as ModelConfig
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from somaspeed.policies.base import PolicyError
from somaspeed.policies.molmoact2.sizes import TOKEN_IDS, Size, model_config

NATIVE_BACKEND = "native-molmoact2-lerobot-accelerate"
OWN = "base"  # the directory of a base checkpoint inside a LeRobot checkpoint
FILES = ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
SMALL_FILES = ("*.json", "*.jinja", "*.txt")  # everything but weights
IMAGE_TOKENS = tuple(token for key, token in TOKEN_IDS.items() if key.startswith(("image", "low_res", "frame")))
STATE_BINS = 256
ACTION_BINS = 64
MERGES = 1024 - 256  # of the trained tokenizer, beside the 256 bytes


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Qwen2Tokenizer:
    """A Qwen tokenizer trained on `texts`, with MolmoAct2's special tokens.

    As in the released one, the image tokens come after `vocabulary` other ids, so that they lie in the second
    embedding table. A vocabulary too large to be filled up with reserved tokens is left as it is.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sorted(set(texts)), trainer)
    learnt: dict[str, Any] = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(pair) for pair in learnt["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        padding_side="left",
    )
    special = ["<|im_start|>", "<action_output>", "<action_start>", "<action_end>", "<state_start>", "<state_end>"]
    special += [f"<{kind}_{end}>" for kind in ("setup", "control") for end in ("start", "end")]
    special += [f"<action_{index}>" for index in range(ACTION_BINS)]
    special += [f"<state_{index}>" for index in range(STATE_BINS)]
    missing = vocabulary - len(tokenizer) - len(special)
    if missing < 10_000:
        special += [f"<|reserved_{index}|>" for index in range(missing)]
    special += IMAGE_TOKENS
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def make_base(directory: Path, size: Size, texts: Iterable[str]) -> None:
    """Write a base checkpoint of `size` without weights; its tokenizer is trained on `texts`."""
    tokenizer = train_tokenizer(texts, size.vocabulary)
    tokenizer.save_pretrained(directory)
    token_ids: dict[str, Any] = {key: tokenizer.convert_tokens_to_ids(token) for key, token in TOKEN_IDS.items()}
    model_config(size, token_ids).save_pretrained(directory)
    image = {
        "crop_mode": "resize",
        "size": {"height": size.vision.resolution, "width": size.vision.resolution},
        "patch_size": 14,
        "pooling_size": [2, 2],
    }
    settings = {"image_processor": image, "video_processor": {}, "use_single_crop_col_tokens": False}
    (directory / "processor_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def fetch(path: str, weights: bool = True) -> Path:
    """The directory of checkpoint `path`, a directory or a hub id. Raises PolicyError when it is not to be had."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise PolicyError(f"checkpoint {path}: no such directory, and no hub id (owner/name) either.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    patterns = [*SMALL_FILES, "*.safetensors"] if weights else list(SMALL_FILES)
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PolicyError(
            f"checkpoint {path}: cannot be fetched from the hub: {reason}\n"
            f"Download it where there is access (`hf download {path}`) and give the directory. "
            f"A base checkpoint has {', '.join(FILES)} and safetensors."
        ) from None


def find_base(path: str) -> Path:
    """The directory of base checkpoint `path`, with all its files but perhaps the weights.

    Raises PolicyError naming what is missing.
    """
    directory = fetch(path, weights=False)
    missing = [name for name in FILES if not (directory / name).is_file()]
    if missing:
        raise PolicyError(
            f"base checkpoint {path}: no {', '.join(missing)} in it. Give the directory or hub id of a released "
            "MolmoAct2 as model.checkpoint_path."
        )
    return directory


def read_model_config(directory: Path) -> ModelConfig:
    """The model configuration of a base checkpoint. Raises PolicyError for what the fast step does not compute."""
    config = ModelConfig.from_pretrained(directory)
    text = config.text_config
    expert = config.action_expert_config
    unsupported = {
        "no action expert": expert is None,
        "rotary scaling": text.rope_scaling_layers is not None,
        "norms after attention": text.norm_after,
        "query and key norms other than qwen3's": not text.use_qk_norm or text.qk_norm_type != "qwen3",
        "one embedding table": text.additional_vocab_size is None,
        "an expert without rotary positions, norms or context norm": expert is not None
        and not (expert.rope and expert.qk_norm and expert.context_layer_norm),
        "a causal expert": expert is not None and expert.causal_attn,
        "dropout": expert is not None and (expert.dropout > 0 or expert.attn_dropout > 0),
    }
    for what, found in unsupported.items():
        if found:
            raise PolicyError(
                f"base checkpoint {directory} has {what}, which is not supported here. "
                f'Use backend = "{NATIVE_BACKEND}".'
            )
    return config


def save_base(directory: Path, source: Path, model: nn.Module, originals: dict[str, Tensor]) -> None:
    """Copy the small files of base `source` into `directory` and write the weights of `model` beside them.

    `originals` replace weights that `narrow_frozen` stored in bf16.
    """
    directory.mkdir()
    for pattern in SMALL_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, directory)
    state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    save_file(state | originals, directory / "model.safetensors", metadata={"format": "pt"})
