"""Reading a LeRobot checkpoint: the file, and the check of its header before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from dataio.manifest import did_you_mean
from somaspeed.policies.base import PolicyError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Give `module` random weights from `seed`, the same for every device.

    Matrices have variance 1/fan-in and norm weights lie around one. LeRobot starts some modulations at zero, which
    would leave most gradients zero; here every weight takes part.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.05
        centre = 1.0 if parameter.ndim == 1 and name.endswith(".weight") else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + centre)


def find_weights(path: str) -> Path:
    """`model.safetensors` of checkpoint directory or hub id `path`. Raises PolicyError when it is not there."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        file = directory / FILE
        if not file.is_file():
            raise PolicyError(f"model.path = {path}: no {FILE} in it; a LeRobot checkpoint has one.")
        return file
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise PolicyError(f"model.path = {path}: no such directory, and no hub id (owner/name) either.")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(hf_hub_download(path, FILE))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PolicyError(
            f"model.path = {path}: cannot fetch {FILE} from the hub: {reason}\n"
            f"Download it where there is access (`hf download {path}`) and give the directory as model.path."
        ) from None


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights of checkpoint `directory`: one, or those that its index names.

    Raises PolicyError when there are none or one of them is missing.
    """
    if (directory / FILE).is_file():
        return [directory / FILE]
    try:
        index = json.loads((directory / INDEX).read_text())
        files = [directory / name for name in sorted(set(index["weight_map"].values()))]
    except FileNotFoundError:
        raise PolicyError(f"{directory}: neither {FILE} nor {INDEX} in it; copy the checkpoint whole.") from None
    except (json.JSONDecodeError, KeyError) as error:
        raise PolicyError(f"{directory / INDEX}: not an index of weights: {error}") from None
    for file in files:
        if not file.is_file():
            raise PolicyError(f"{directory / INDEX} names {file.name}, which is not there; copy it again.")
    return files


def load_weights(files: list[Path], device: torch.device) -> dict[str, Tensor]:
    """All tensors of `files`, on `device`."""
    return {name: tensor for file in files for name, tensor in load_file(file, device=str(device)).items()}


def read_header(file: Path) -> dict[str, Tensor]:
    """Meta tensors of the shapes in the header of `file`. Raises PolicyError when it cannot be read."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {key: torch.empty(handle.get_slice(key).get_shape(), device="meta") for key in handle.keys()}
    except SafetensorError as error:
        raise PolicyError(f"{file}: not a readable safetensors file: {error}") from None


def check_loaded(directory: Path, state: dict[str, Tensor], size: str) -> None:
    """Compare the headers of a checkpoint with the state dict of the policy that LeRobot loaded from it.

    LeRobot itself passes over what is missing or left over. A tensor may be missing that another name shares. Raises
    PolicyError.
    """
    files = weight_files(directory)
    found = {name: tensor for file in files for name, tensor in read_header(file).items()}
    shared = {state[name].data_ptr() for name in found.keys() & state.keys()}
    expected = {name: tensor for name, tensor in state.items() if name in found or tensor.data_ptr() not in shared}
    compare_shapes(files[0], expected, found, size)


def check_header(file: Path, expected: dict[str, Tensor], rename: Rename, size: str) -> None:
    """Compare names and shapes in the header of `file` with `expected` (meta tensors), reading no weight.

    `rename` is LeRobot's own key mapping for the policy. Raises PolicyError listing what is missing, left over or of
    another shape: a partial load would leave the rest random.
    """
    compare_shapes(file, expected, rename(read_header(file)), size)


def compare_shapes(file: Path, expected: dict[str, Tensor], found: dict[str, Tensor], size: str) -> None:
    """Raise PolicyError listing what `found` in `file` lacks or has beside `expected`, and other shapes."""
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    shapes = [key for key in sorted(expected.keys() & found.keys()) if expected[key].shape != found[key].shape]
    if not (missing or unknown or shapes):
        return
    lines = [f"{file}: its tensors are not those of this policy at model.size = {size!r}; refusing a partial load."]
    for label, keys in (("missing", missing), ("not the policy's", unknown)):
        if keys:
            lines.append(f"  {len(keys)} {label}: {', '.join(keys[:3])}{' …' if len(keys) > 3 else ''}")
    for key in shapes[:3]:
        lines.append(f"  {key}: {list(found[key].shape)} in the file, {list(expected[key].shape)} in the policy")
    if len(shapes) > 3:
        lines.append(f"  … and {len(shapes) - 3} more of another shape")
    if missing and unknown:
        lines.append(f"  {missing[0]}{did_you_mean(missing[0], unknown[:50])}")
    raise PolicyError("\n".join(lines))
