"""Text tokenizers: the published one where it is, a small trained one for reduced models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from somaspeed.policies.base import PolicyError

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
WORDS = r" ?-?\d+| ?[^\s\d]+|\s+"  # where `whole_numbers` lets tokens end


def train_tokenizer(texts: Iterable[str], vocabulary: int, whole_numbers: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, trained on `texts`, with single digits and a
    leading `<bos>` as PaliGemma's has. The same texts give the same tokenizer.

    With `whole_numbers`, a number with the space before it, as in " -1", can be one token, and is if `texts` have it.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        if whole_numbers
        else [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(set(texts)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def load_tokenizer(name: str) -> Any:
    """The tokenizer in directory `name` or of hub id `name`.

    Raises PolicyError listing the files that are needed when it cannot be had.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub client raises many kinds; every one means "not here"
        reason = str(error).strip().splitlines()[0]
        raise PolicyError(
            f"tokenizer {name!r} cannot be loaded: {reason}\n"
            "It needs tokenizer.json, tokenizer_config.json and special_tokens_map.json. Download them on a machine "
            f"with access (`hf download {name}`, accepting its licence first) and give their directory as "
            "model.tokenizer."
        ) from None
