"""The prompt of GR00T: the same tokens around the same images for every sample, and one text per task.

A prompt is `<|im_start|>user\\n`, then per camera `<|vision_start|>`, its image tokens and `<|vision_end|>`, then the
task's text and `<|im_end|>\\n`. All before the text is the same for every sample, so tokens are made once per task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from lerobot.policies.groot.utils import prepare_n1_7_language_batch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATCH, MERGE, TEMPORAL = 16, 2, 2  # pixels of a patch's side, patches of a token's side, frames of a patch
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)


def train_chat_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens with the chat tokens of Qwen3-VL as its first ids.

    The same texts give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(set(texts)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=CHAT_TEMPLATE,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast, resolution: int) -> Qwen3VLProcessor:
    """The Qwen3-VL processor that LeRobot builds for GR00T, for images of `resolution` pixels a side."""
    images = Qwen2VLImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=TEMPORAL,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": resolution**2, "longest_edge": 4096**2},
    )
    videos = Qwen3VLVideoProcessor(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=TEMPORAL, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    tokenizer.padding_side = "left"
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)


class Layout(NamedTuple):
    """Where things lie in a prompt of F fixed tokens, counted from its start.

    fixed: int64 [F], the tokens before the text, image tokens included.
    images: first position of every camera's image tokens.
    tokens: image tokens per camera.
    positions: int64 [3, F], rotary positions in time, height and width; the text goes on from `text_position`.
    """

    fixed: Tensor
    images: tuple[int, ...]
    tokens: int
    positions: Tensor
    text_position: int

    def is_image(self, size: int) -> Tensor:
        """bool [size], True at image tokens, for a prompt padded to `size` tokens."""
        mask = torch.zeros(size, dtype=torch.bool)
        for start in self.images:
            mask[start : start + self.tokens] = True
        return mask


class Prompts(NamedTuple):
    """The texts of all tasks: tokens int64 [tasks, L] padded on the right with `pad`, their lengths int64 [tasks]."""

    layout: Layout
    text: Tensor
    lengths: Tensor
    pad: int


def make_prompts(processor: Any, tasks: Sequence[str], cameras: int, resolution: int) -> Prompts:
    """Tokenise every task as LeRobot's processor does, and find the layout that they share."""
    tokenizer = processor.tokenizer
    side = resolution // PATCH // MERGE
    rows = []
    for text in prepare_n1_7_language_batch(list(tasks), len(tasks), formalize_language=True):
        content = [*[{"type": "image", "image": None}] * cameras, {"type": "text", "text": text}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        rows.append(tokenizer(prompt.replace(processor.image_token, processor.image_token * side**2))["input_ids"])
    layout = find_layout(rows[0], processor.image_token_id, side)
    fixed = len(layout.fixed)
    assert all(row[:fixed] == rows[0][:fixed] for row in rows), "prompts differ before their text"
    lengths = torch.tensor([len(row) - fixed for row in rows])
    text = torch.full((len(rows), int(lengths.max())), tokenizer.pad_token_id)
    for index, row in enumerate(rows):
        text[index, : len(row) - fixed] = torch.tensor(row[fixed:])
    return Prompts(layout, text, lengths, tokenizer.pad_token_id)


def find_layout(tokens: Sequence[int], image: int, side: int) -> Layout:
    """The layout of a tokenised prompt whose images have `side` × `side` tokens.

    Rotary positions as in Qwen3-VL: text counts up in all three axes; an image holds time still, counts rows and
    columns, and takes as many positions as its side.
    """
    count = side * side
    images = [i for i, token in enumerate(tokens) if token == image and (i == 0 or tokens[i - 1] != image)]
    fixed = images[-1] + count + 1
    positions = torch.zeros(3, fixed, dtype=torch.int64)
    grid = torch.stack([torch.zeros(count), *(axis.flatten() for axis in torch.meshgrid(
        torch.arange(side), torch.arange(side), indexing="ij"))]).long()  # fmt: skip
    index, position = 0, 0
    while index < fixed:
        if index in images:
            positions[:, index : index + count] = position + grid
            index, position = index + count, position + side
        else:
            positions[:, index] = position
            index, position = index + 1, position + 1
    return Layout(torch.tensor(tokens[:fixed]), tuple(images), count, positions, position)
