"""The versions of what a measurement depends on."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("lerobot", "torch", "triton", "transformers", "accelerate", "deepspeed")


def installed_versions() -> dict[str, str]:
    """Version by package, as far as installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
