"""Prompt tokens of MolmoAct2 without tokenizing: a cached frame of tokens per task around a table of state tokens.

The state is written into the prompt as special tokens, one per dimension. A tokenizer splits its text at special
tokens first, so what lies before and behind the state is the same for every sample of a task.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from lerobot.policies.molmoact2 import processor_molmoact2 as upstream
from torch import Tensor

from somaspeed.policies.base import PolicyError

MULTIPLE = 8  # token counts are rounded up to it: what matrix units and attention kernels take


class Frame(NamedTuple):
    """The tokens of a task's prompt before and behind those of the state, int64."""

    before: np.ndarray
    behind: np.ndarray


class Prompts:
    """Composes prompts for the tasks that `packer` would otherwise tokenize sample by sample.

    Attributes:
        pad: the token id that fills a batch up on the right.
        image_rows: int64 [images · T], positions of the image patches: every prompt begins with the images.
        bidirectional: bool [·], for the first positions of every prompt, whether it is an image token; all image
            tokens see one another, everything else is causal.

    Raises PolicyError when the tokenizer has no single token for a state bin, or crops an image.
    """

    def __init__(self, packer: upstream.MolmoAct2PackInputsProcessorStep, images: int) -> None:
        self.packer, self.images = packer, images
        self.processor, self.tokenizer = packer.processor, packer.processor.tokenizer
        if self.processor.image_processor.crop_mode != "resize":
            raise PolicyError(
                f"the base checkpoint's processor_config.json has crop_mode = "
                f"{self.processor.image_processor.crop_mode!r}; only 'resize', one crop per camera, is supported here."
            )
        self.bins = packer.num_state_tokens
        names = [f"{upstream.STATE_TOKEN_PREFIX}{index}>" for index in range(self.bins)]
        encoded = self.tokenizer(names, add_special_tokens=False)["input_ids"]
        if any(len(ids) != 1 for ids in encoded):
            raise PolicyError(f"the base checkpoint's tokenizer has no tokens {names[0]} … {names[-1]}")
        self.state_tokens = np.array(encoded, dtype=np.int64)[:, 0]
        self.pad = int(self.tokenizer.pad_token_id)
        self.frames: dict[str, Frame] = {}
        grid = self.image_grid()
        self.image_text = "".join(self.processor.get_image_tokens(np.array([grid, grid, 0, 0])))
        before = self.frame("").before
        types = np.isin(before, self.processor.image_token_ids)
        last = int(types.nonzero()[0][-1]) + 1
        self.bidirectional = torch.from_numpy(types[:last])
        patch = self.tokenizer.convert_tokens_to_ids("<im_patch>")
        self.image_rows = torch.from_numpy((before[:last] == patch).nonzero()[0])

    def image_grid(self) -> int:
        """Pooled tokens per side of an image."""
        image = self.processor.image_processor
        patches = image.size["height"] // image.patch_size
        return -(-patches // image.pooling_size[0])

    def frame(self, task: str) -> Frame:
        """The tokens around the state for `task`, tokenized once."""
        if task not in self.frames:
            packer = self.packer
            text = upstream._build_robot_text(
                task=upstream._normalize_question_text(task) if packer.normalize_language else task,
                discrete_state_string=upstream.STATE_START_TOKEN + upstream.STATE_END_TOKEN,
                setup_type=packer.setup_type,
                control_mode=packer.control_mode,
                add_setup_tokens=packer.add_setup_tokens,
                add_control_tokens=packer.add_control_tokens,
                num_images=self.images,
            ).replace("<|image|>", self.image_text)
            before, behind = text.split(upstream.STATE_START_TOKEN + upstream.STATE_END_TOKEN)
            ids = self.tokenizer(
                [before + upstream.STATE_START_TOKEN, upstream.STATE_END_TOKEN + behind], add_special_tokens=False
            )["input_ids"]
            first = self.tokenizer.bos_token_id or self.tokenizer.eos_token_id
            start = [] if ids[0][0] == first else [first]
            self.frames[task] = Frame(np.array(start + ids[0], np.int64), np.array(ids[1], np.int64))
        return self.frames[task]

    def state_bins(self, state: np.ndarray) -> np.ndarray:
        """Normalised states, float32 [B, D], as bins, int64 [B, D]: LeRobot's `_build_discrete_state_string`."""
        clipped = np.clip(np.nan_to_num(state, nan=0.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)
        return np.rint((clipped + 1.0) / 2.0 * float(self.bins - 1)).astype(np.int64)

    def compose(self, tasks: list[str], state: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, L], padded on the right to the batch's longest rounded up, and their number int64 [B]."""
        states = self.state_tokens[self.state_bins(state)]
        rows = []
        for task, tokens in zip(tasks, states, strict=True):
            frame = self.frame(task)
            rows.append(np.concatenate([frame.before, tokens, frame.behind]))
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        padded = np.full((len(rows), -(-int(lengths.max()) // MULTIPLE) * MULTIPLE), self.pad, dtype=np.int64)
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)] = row
        return torch.from_numpy(padded), torch.from_numpy(lengths)
