"""What an examination says."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """One check's result: `check` names it for programs, `text` says in words what was found and what to do."""

    check: str
    level: Level
    text: str


class Dimension(msgspec.Struct, frozen=True):
    """Open-loop error of one action dimension: mean absolute differences, in the data's own unit.

    `constant` is the error of always predicting the data's mean; `correlation` is between prediction and truth.
    """

    name: str
    error: float
    constant: float
    correlation: float
