"""The policies, by the name that `[model] name` gives."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dataio.manifest import did_you_mean

if TYPE_CHECKING:
    from somaspeed.policies.base import Policy

POLICIES = {
    "groot": "somaspeed.policies.groot.policy:Groot",
    "molmoact2": "somaspeed.policies.molmoact2.policy:MolmoAct2",
    "pi05": "somaspeed.policies.pi05.policy:PI05",
}


def policy_class(name: str) -> type[Policy]:
    """The class of policy `name`. Raises PolicyError with the closest match when there is none."""
    from somaspeed.policies.base import PolicyError

    if name not in POLICIES:
        raise PolicyError(f"model.name = {name!r} is no policy{did_you_mean(name, POLICIES)}")
    module, attribute = POLICIES[name].split(":")
    return getattr(importlib.import_module(module), attribute)
