"""A checkpoint that acts: LeRobot's policy behind the checkpoint's own pre- and post-processor."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataio.manifest import did_you_mean
from somaspeed.checkpoint import ORIGIN, CheckpointError, find_policy, load_origin, load_processors
from somaspeed.policies.base import PolicyError
from somaspeed.policies.weights import check_loaded, randomise, weight_files

OBS_IMAGES, OBS_STATE = "observation.images", "observation.state"
BASES = {"groot": "base_model_path", "molmoact2": "checkpoint_path"}  # the field that names a base checkpoint
FLOW_STEPS = ("num_inference_steps", "num_inference_timesteps")  # what LeRobot's policies call them


class Actor:
    """Acts as checkpoint `directory` does in LeRobot.

    Attributes:
        config: LeRobot's configuration of the policy.
        cameras: the cameras that the policy looks at, by the names of the data it was trained on.
        origin: `somaspeed.json`, empty for checkpoints of other programs.
        n_action_steps: actions taken of each chunk before looking again.
        preprocessor, postprocessor: the checkpoint's own.
    """

    def __init__(
        self,
        directory: Path,
        device: torch.device | None = None,
        n_action_steps: int | None = None,
        flow_steps: int | None = None,
    ) -> None:
        """Load it. Raises CheckpointError when it is not a complete LeRobot policy directory: LeRobot goes on with
        random weights where the file's are missing, cannot be read or have other shapes.
        """
        self.directory = checkpoint_directory(directory)
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.origin = load_origin(self.directory)
        self.size: str = self.origin.get("model.size", "full")
        self.config = load_config(self.directory)
        self.config.device = self.device.type
        self.n_action_steps = n_action_steps or self.config.n_action_steps
        self.chunk_size: int = getattr(self.config, "chunk_size", self.config.n_action_steps)
        if self.n_action_steps > self.chunk_size:
            raise CheckpointError(
                f"{directory}: its chunks have {self.chunk_size} actions; {self.n_action_steps} cannot be taken of one."
            )
        self.config.n_action_steps = self.n_action_steps  # MolmoAct2's chunks have no more
        if hasattr(self.config, "per_episode_seed"):
            self.config.per_episode_seed = False  # MolmoAct2 would draw noise that depends on the episodes before
        self._set_flow_steps(flow_steps)
        targets = [key.removeprefix(f"{OBS_IMAGES}.") for key in self.config.image_features]
        targets = [name for name in targets if not name.startswith("empty_camera_")]
        self.renames: dict[str, str] = self.origin.get("data.map", {})
        sources = {target: source for source, target in self.renames.items()}
        self.cameras = [sources.get(target, target) for target in targets]
        self.preprocessor, self.postprocessor = read(load_processors, self.directory)
        self.policy = self._load_policy()

    def _set_flow_steps(self, steps: int | None) -> None:
        name = next((name for name in FLOW_STEPS if hasattr(self.config, name)), None)
        if steps is not None:
            if name is None:
                raise CheckpointError(f"{self.directory}: a {self.config.type} policy has no flow steps to set.")
            setattr(self.config, name, steps)
        self.flow_steps: int | None = getattr(self.config, name) if name else None

    def _load_policy(self) -> Any:
        from lerobot.policies.factory import get_policy_class

        try:
            weight_files(self.directory)
            if self.config.type == "pi05":  # what its keys are renamed to is known before anything is built
                importlib.import_module("somaspeed.policies.pi05.policy").check_weights(
                    self.config, str(self.directory), self.size
                )
            with loading(self.config.type, self.size):
                load = get_policy_class(self.config.type).from_pretrained
                policy = read(load, str(self.directory), config=self.config)
            if self.config.type != "pi05":
                check_loaded(self.directory, policy.state_dict(), self.size)
        except PolicyError as error:
            assumed = "" if self.origin else f"\nWithout a {ORIGIN} it counts as one of the published size."
            raise CheckpointError(f"{error}{assumed}") from None
        return policy.to(self.device).eval()

    def untrained(self) -> Actor:
        """The same actor with random weights in place of the checkpoint's."""
        twin = copy.copy(self)
        twin.policy = copy.deepcopy(self.policy)
        randomise(twin.policy, seed=0)
        return twin

    def check_cameras(self, available: Sequence[str]) -> None:
        """Raise CheckpointError for a camera that the policy needs and `available` lacks."""
        for camera in self.cameras:
            if camera not in available:
                raise CheckpointError(
                    f"{self.directory}: the policy needs camera {camera!r}, which is not there"
                    f"{did_you_mean(camera, available)}"
                )

    def act(self, images: Mapping[str, np.ndarray], state: np.ndarray, task: str, seed: int) -> np.ndarray:
        """The next `n_action_steps` actions, float32 [n, D], of uint8 images [H, W, 3] and state float32 [S].

        All that is random is drawn from `seed`, whatever was drawn before.
        """
        batch = {name: image[None] for name, image in images.items()}
        return self.chunks(batch, state[None], [task], seed)[0, : self.n_action_steps]

    def observation(self, images: Mapping[str, np.ndarray], state: np.ndarray, tasks: list[str]) -> dict[str, Any]:
        """What the pre-processor takes, by LeRobot's keys; see `chunks`."""
        seen: dict[str, Any] = {OBS_STATE: torch.from_numpy(np.array(state, np.float32)), "task": tasks}
        for camera in self.cameras:
            pixels = torch.from_numpy(np.array(images[camera])).permute(0, 3, 1, 2)
            seen[f"{OBS_IMAGES}.{self.renames.get(camera, camera)}"] = pixels.to(torch.float32) / 255
        return seen

    @torch.no_grad()
    def chunks(self, images: Mapping[str, np.ndarray], state: np.ndarray, tasks: list[str], seed: int) -> np.ndarray:
        """Whole action chunks, float32 [B, chunk, D], of uint8 images [B, H, W, 3] and states float32 [B, S]."""
        batch = {
            key: value.to(self.device) if isinstance(value, Tensor) else value
            for key, value in self.preprocessor(self.observation(images, state, tasks)).items()
        }
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            chunk = self.policy.predict_action_chunk(batch)
        # Step by step, as LeRobot's own rollout calls the post-processor.
        steps = [self.postprocessor(chunk[:, step]) for step in range(chunk.shape[1])]
        return torch.stack(steps, dim=1).to("cpu", torch.float32).numpy()


def checkpoint_directory(path: Path) -> Path:
    """The LeRobot policy directory at `path`: itself, or the one in a checkpoint or run directory of ours.

    Raises CheckpointError when there is none.
    """
    found = find_policy(path)
    if found:
        return found
    raise CheckpointError(f"{path}: no LeRobot policy (config.json) here, nor in pretrained_model/ under it.")


def load_config(directory: Path) -> Any:
    """LeRobot's configuration of the checkpoint. What the policy is built from is taken from inside it, where it is."""
    from lerobot.configs import PreTrainedConfig

    importlib.import_module("lerobot.policies")  # registers the policies' configurations
    config = read(PreTrainedConfig.from_pretrained, str(directory))
    if config.type in BASES and (directory / "base").is_dir():
        setattr(config, BASES[config.type], str(directory / "base"))
    return config


def loading(policy: str, size: str) -> AbstractContextManager[None]:
    """The context in which LeRobot builds a reduced policy; published sizes need none."""
    if size == "full" or policy not in ("pi05", "groot"):
        return contextlib.nullcontext()
    return importlib.import_module(f"somaspeed.policies.{policy}").sized(size)


def read(load: Any, *arguments: Any, **settings: Any) -> Any:
    """Call a loader of LeRobot, without what it prints. Raises CheckpointError for what it cannot read."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return load(*arguments, **settings)
    except CheckpointError:
        raise
    except Exception as error:  # of LeRobot, draccus, safetensors or transformers
        where = next((a for a in arguments if isinstance(a, str | Path)), "checkpoint")
        raise CheckpointError(f"{where}: LeRobot cannot load it: {type(error).__name__}: {error}") from error


def fingerprint(directory: Path) -> str:
    """SHA-256 over all files of a checkpoint directory, names included."""
    total = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(directory)} {digest}\n".encode())
    return total.hexdigest()
