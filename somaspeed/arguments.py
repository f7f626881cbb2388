"""What the commands' arguments have in common: types for argparse, and SIGTERM that stops as Ctrl-C does."""

from __future__ import annotations

import argparse
import signal

import torch


def positive(text: str) -> int:
    return at_least(1, text)


def natural(text: str) -> int:
    return at_least(0, text)


def at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number


def task_list(text: str) -> list[int] | None:
    """`all` (None) or numbers with commas between them."""
    if text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither `all` nor task numbers like 0,3") from None


def device(text: str) -> torch.device:
    """A device that is there."""
    try:
        found = torch.device(text)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"no device {text!r} here: {str(error).splitlines()[0]}") from None
    return found


def stop_when_terminated() -> None:
    """Let SIGTERM raise KeyboardInterrupt, so that what a command has begun is put in order."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
