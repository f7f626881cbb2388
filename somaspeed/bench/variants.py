"""How native may be run: each variant of a baseline that is compared."""

from __future__ import annotations

import msgspec


class Variant(msgspec.Struct, frozen=True):
    """One way of running the native forward. `published` marks the recipe of the published run."""

    name: str
    published: bool
    checkpointing: bool
    empty_slots: int = 0
