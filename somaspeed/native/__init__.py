"""The baselines: the upstream trainers' own code under our stopwatch, and nothing else of ours."""

from __future__ import annotations

from typing import NamedTuple

from somaspeed.config import Config


class Backend(NamedTuple):
    """A baseline: which policy it trains, and the module here that drives its trainer."""

    policy: str
    trainer: str


BACKENDS = {
    "native-pi05-lerobot-accelerate": Backend("pi05", "lerobot"),
    "native-molmoact2-lerobot-accelerate": Backend("molmoact2", "lerobot"),
    "native-gr00t-hf-trainer-zero2": Backend("groot", "huggingface"),
}


def faster_variants(config: Config) -> dict[str, list[str]]:
    """Configurations of a baseline that may be faster than the recipe in `config`: name → overrides.

    All of them compute the recipe's loss: checkpointing trades time for memory, a masked camera slot is computed and
    ignored, compilation changes rounding only. Which one is fastest, and which fit, depends on the devices.
    """
    options = config.model.options
    plain = ["model.gradient_checkpointing=false"] if options.get("gradient_checkpointing") else []
    slots = ["model.empty_cameras=0"] if options.get("empty_cameras") else []
    eager = ["model.compile_model=false"] if options.get("compile_model") else []
    variants = {}
    if plain and slots:
        variants["no checkpointing, no empty slot"] = plain + slots
    if plain:
        variants["no checkpointing"] = plain
    if slots:
        variants["no empty slot"] = slots
    if eager:
        variants["no checkpointing, no empty slot, not compiled"] = plain + slots + eager
    return variants
