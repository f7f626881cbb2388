"""Push a checkpoint to the Hugging Face Hub: LeRobot's policy directory with a model card, never the training state.

`python -m somaspeed.hub --checkpoint RUN_OR_DIR --repository USER/NAME [--private]` pushes one by hand, and repeats a
push that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.utils import validate_repo_id

from somaspeed.checkpoint import find_policy, load_origin

CARD = "README.md"
LOADING = """\
```python
from pathlib import Path

from huggingface_hub import snapshot_download
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from somaspeed.checkpoint import load_processors

directory = snapshot_download("{repository}")
config = PreTrainedConfig.from_pretrained(directory)
policy = get_policy_class(config.type).from_pretrained(directory)
preprocess, postprocess = load_processors(Path(directory))
```"""
# What the client raises: no network and HTTP statuses (both HTTPError and OSError), no token (OSError), a bad name.
FAILURES = (httpx.HTTPError, OSError, ValueError)


class HubError(ValueError):
    """A push cannot be begun. The message says what to do."""


class UploadError(RuntimeError):
    """A checkpoint could not be uploaded. The message says where it is and how to repeat the push."""


class Hub:
    """A repository of the Hub to push to.

    Args:
        repository: "USER/NAME".
        private: whether a repository that `check` makes is private.
        dataset: what the checkpoint was trained on, a Hub id or any name, for the model card.
        api: the client; by default the library's, with its own way to find the token.
    """

    def __init__(self, repository: str, private: bool = False, dataset: str = "", api: Any = None) -> None:
        self.repository, self.private, self.dataset = repository, private, dataset
        self.api: Any = api if api is not None else HfApi()

    def check(self, create: bool = True) -> None:
        """Find out before a long run whether the push at its end can work.

        Asks who we are and, with `create`, makes the repository unless it is there. Raises HubError.
        """
        if self.repository.count("/") != 1:
            raise HubError(f"{self.repository!r} is no name of a Hub repository; give USER/NAME.")
        try:
            validate_repo_id(self.repository)
        except ValueError as error:
            raise HubError(f"{self.repository!r} is no name of a Hub repository: {error}") from None
        try:
            self.api.whoami()
        except FAILURES as error:
            raise HubError(
                f"the Hub does not know who pushes to {self.repository}: {first_line(error)}\n"
                "Run `hf auth login`, or set HF_TOKEN to a token that may write; or leave the push out."
            ) from None
        if not create:
            return
        try:
            self.api.create_repo(self.repository, private=self.private, repo_type="model", exist_ok=True)
        except FAILURES as error:
            raise HubError(
                f"{self.repository} cannot be made on the Hub: {first_line(error)}\n"
                "Give a repository of yours, and a token (`hf auth login`, or HF_TOKEN) that may write to it."
            ) from None

    def push(self, directory: Path) -> str:
        """Upload the policy directory of a checkpoint with a model card, or the card that lies in it, and return the
        repository's address. Raises UploadError.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="somaspeed-push-") as place:
                staged = Path(place)
                stage(directory, staged)
                if not (staged / CARD).exists():
                    (staged / CARD).write_text(card(directory, self.repository, self.dataset))
                self.api.upload_folder(
                    repo_id=self.repository,
                    repo_type="model",
                    folder_path=staged,
                    commit_message=f"Step {load_origin(directory).get('step', 'unknown')}",
                )
        except FAILURES as error:
            raise UploadError(
                f"the upload to {self.repository} failed: {first_line(error)}\n"
                f"The checkpoint is complete and kept: {directory}\nRepeat the push with: {self.command(directory)}"
            ) from None
        return f"https://huggingface.co/{self.repository}"

    def command(self, directory: Path) -> str:
        """The command that pushes `directory`."""
        words = ["python", "-m", "somaspeed.hub", "--checkpoint", str(directory), "--repository", self.repository]
        words += ["--dataset", self.dataset] if self.dataset else []
        return shlex.join(words + ["--private"] * self.private)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def stage(directory: Path, staged: Path) -> None:
    """Fill `staged` with links to the files of `directory`.

    Configurations that name a part of the checkpoint by its place on this machine name it relative to the checkpoint.
    """
    places = {str(directory.absolute()), str(directory.resolve())}
    for path in sorted(directory.rglob("*")):
        target = staged / path.relative_to(directory)
        if path.is_dir():
            target.mkdir()
        elif path.suffix == ".json":
            text = path.read_text()
            for place in places:
                text = text.replace(json.dumps(f"{place}{os.sep}")[1:-1], "")
            target.write_text(text)
        else:
            target.symlink_to(path.resolve())


def card(directory: Path, repository: str, dataset: str) -> str:
    """The model card: LeRobot's metadata, how to load it, and what the run measured, from the files it left."""
    config = json.loads((directory / "config.json").read_bytes())
    origin, kind = load_origin(directory), config["type"]
    base = origin.get("model.path", "")
    data = ModelCardData(
        library_name="lerobot",
        pipeline_tag="robotics",
        tags=["lerobot", "robotics", kind, "somaspeed"],
        base_model=base if on_hub(base) else None,
        datasets=dataset if on_hub(dataset) else None,
        model_name=kind,
    )
    size = origin.get("model.size", "full")
    reduced = (
        f"Its size is {size!r}, which LeRobot's configuration cannot express: SomaSpeed's commands load it, "
        "`somaspeed-doctor` and `somaspeed-eval` among them."
    )
    sections = [
        f"# {repository.rpartition('/')[2]}",
        f"A [LeRobot](https://github.com/huggingface/lerobot) policy directory of type `{kind}`, fine-tuned with "
        "SomaSpeed: weights, configuration, both processors with the statistics of the data. Only the action expert "
        "was trained.",
        "## The run",
        "\n".join(f"- {name}: {value}" for name, value in facts(directory, dataset).items()),
        "What was not measured is not stated; a falling loss does not say that the policy drives a robot.",
        "## Load it",
        LOADING.format(repository=repository) if size == "full" else reduced,
        "## Licence",
        "That of the base model and of the data applies; neither is stated here.",
    ]
    return f"---\n{data}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def on_hub(name: str) -> bool:
    """Whether `name` can be a Hub id: the card's metadata must not name a directory of this machine."""
    if name.count("/") != 1 or Path(name).expanduser().exists():
        return False
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def facts(directory: Path, dataset: str) -> dict[str, str]:
    """What is known of the run, as text: from `somaspeed.json`, `summary.json` and `metrics.jsonl`."""
    origin = load_origin(directory)
    if not origin:
        return {"data": dataset} if dataset else {}
    base, step, output = origin.get("model.path", ""), origin["step"], directory.resolve().parents[2]
    found = {"base": (base if on_hub(base) else "a local checkpoint") if base else "random weights"}
    if dataset:
        found["data"] = f"{dataset if on_hub(dataset) else Path(dataset).name}, {origin['samples']:,} frames"
    found["updates"] = f"{step:,}"
    records = read_records(output / "metrics.jsonl", step)
    if records:
        found["training loss"] = f"{records[-1]['loss']:.4g} at update {records[-1]['step']:,}"
    held = [record for record in records if "held_out_loss" in record]
    if held:
        found["held-out loss"] = f"{held[-1]['held_out_loss']:.4g} at update {held[-1]['step']:,}"
    summary = output / "summary.json"
    run = json.loads(summary.read_bytes()) if summary.is_file() else {}
    if run.get("completed_steps") == step and run["measured_steps"]:
        found["rate"] = (
            f"{run['samples_per_second_steady']:.4g} samples per second steady over {run['measured_steps']:,} "
            f"updates; {run['peak_allocated_gib']:.1f} GiB of memory at most"
        )
    return found


def read_records(path: Path, step: int) -> list[dict[str, Any]]:
    """The logged steps of a run up to `step`."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [record for record in map(json.loads, lines) if record["step"] <= step]


def policy_directory(place: Path) -> Path:
    """The policy directory that `place` names: itself, a checkpoint's, or a run's newest. Raises HubError."""
    found = find_policy(place)
    if found:
        return found.resolve()
    raise HubError(f"{place}: no LeRobot policy directory there, nor a checkpoint or a run that holds one.")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0, 2 when the push cannot be begun, 4 when it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m somaspeed.hub", description="Push a checkpoint's LeRobot policy directory to the Hub."
    )
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="DIR", help="a run, a checkpoint or a policy directory")
    add("--repository", required=True, metavar="USER/NAME", help="made if it is not there")
    add("--private", action="store_true", help="make it private")
    add("--dataset", default="", metavar="NAME", help="what it was trained on, for the model card")
    arguments = parser.parse_args(argv)
    try:
        directory = policy_directory(arguments.checkpoint)
        hub = Hub(arguments.repository, arguments.private, arguments.dataset)
        hub.check()
        print(f"pushed to {hub.push(directory)}")
    except (HubError, UploadError) as error:
        print(f"somaspeed.hub: error: {error}", file=sys.stderr)
        return 4 if isinstance(error, UploadError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
