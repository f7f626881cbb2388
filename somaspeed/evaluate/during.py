"""Evaluation during training: saved checkpoints are rolled out by a process of its own, while training goes on.

<output>/evaluations/000300/result.json   what `somaspeed-eval` wrote, with its records and videos beside it
<output>/evaluations.jsonl                a line per evaluation: its step, success rate and interval, or its error
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dataio.atomic import sync
from somaspeed.config import ConfigError, EvaluateConfig
from somaspeed.sim.pool import PoolError, simulator_command

COMMAND = (sys.executable, "-m", "somaspeed.evaluate.cli")


def check_evaluation(settings: EvaluateConfig) -> None:
    """Raise ConfigError when `evaluate.every` is set and there is no simulator."""
    if settings.every:
        try:
            simulator_command(settings.suite)
        except PoolError as error:
            raise ConfigError(f"evaluate.every = {settings.every}: {error}") from None


class Evaluations:
    """Evaluates checkpoints one after another. Without `evaluate.every` it does nothing.

    Args:
        output: the run's directory.
    """

    def __init__(self, settings: EvaluateConfig, output: Path) -> None:
        self.settings, self.output = settings, output
        self.waiting: collections.deque[int] = collections.deque()
        self.running: tuple[int, subprocess.Popen[bytes]] | None = None

    def due(self, step: int) -> bool:
        """Whether the checkpoint of `step` is to be evaluated."""
        return self.settings.every is not None and step > 0 and step % self.settings.every == 0

    def submit(self, step: int, pretrained: Path) -> None:
        """Evaluate the policy directory `pretrained`. It may be removed afterwards: its files are linked, not read."""
        place = self.place(step)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(pretrained, place / "pretrained_model", copy_function=link)
        self.waiting.append(step)
        self.start()

    def resume(self) -> None:
        """Go on with the evaluations that an interrupted run left."""
        left = sorted((self.output / "evaluations").glob("*/pretrained_model"))
        self.waiting.extend(int(pretrained.parent.name) for pretrained in left)
        self.start()

    def start(self) -> None:
        """Start the next one, unless one is running."""
        if self.running or not self.waiting:
            return
        step = self.waiting.popleft()
        place, settings = self.place(step), self.settings
        options = {
            "--checkpoint": place / "pretrained_model",
            "--suite": settings.suite,
            "--tasks": settings.tasks,
            "--episodes": settings.episodes,
            "--first-init": settings.first_init,
            "--n-action-steps": settings.n_action_steps,
            "--workers": settings.workers,
            "--device": settings.device,
            "--output": place / "episodes",
            "--json": place / "result.json",
        }
        given = [str(part) for key, value in options.items() if value not in (None, "") for part in (key, value)]
        # Not one of the ranks: what torchrun tells them is kept from it.
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        with (place / "log.txt").open("wb") as log:
            process = subprocess.Popen([*COMMAND, *given], stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.running = step, process

    def poll(self) -> list[dict[str, Any]]:
        """What has ended since the last call: {"step", "success_rate", "interval", "episodes"} or {"step", "error"}."""
        ended = []
        while self.running and self.running[1].poll() is not None:
            step, process = self.running
            self.running = None
            ended.append(self.result(step, process.returncode))
            self.start()
        return ended

    def finish(self) -> list[dict[str, Any]]:
        """Wait for all that was submitted."""
        ended = self.poll()
        while self.running:
            time.sleep(0.2)
            ended += self.poll()
        return ended

    def stop(self) -> None:
        """End what is running. What it played stays, and `resume` goes on with it."""
        self.waiting.clear()
        if self.running:
            self.running[1].terminate()
            self.running[1].wait()
            self.running = None

    def result(self, step: int, status: int) -> dict[str, Any]:
        """One line of `evaluations.jsonl`, which it writes. The linked weights are let go of."""
        place = self.place(step)
        try:
            whole = json.loads((place / "result.json").read_bytes())
            line = {"step": step} | {key: whole[key] for key in ("success_rate", "interval", "successes", "episodes")}
        except (OSError, ValueError, KeyError):
            words = (place / "log.txt").read_text(errors="replace").strip().splitlines()
            line = {"step": step, "error": words[-1] if words else f"it ended with status {status}"}
        shutil.rmtree(place / "pretrained_model", ignore_errors=True)
        with (self.output / "evaluations.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        sync(self.output / "evaluations.jsonl")
        return line

    def place(self, step: int) -> Path:
        return self.output / "evaluations" / f"{step:06d}"


def describe(line: dict[str, Any]) -> str:
    """A result in words."""
    if "error" in line:
        return f"evaluation of step {line['step']} failed: {line['error']}"
    low, high = line["interval"]
    return (
        f"success of step {line['step']}: {line['success_rate']:.0%} "
        f"({line['successes']} of {line['episodes']}, 95 % interval {low:.0%} – {high:.0%})"
    )


def link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
