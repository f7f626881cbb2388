"""Flat arena optimizer: live parameters, gradients and moments are views into contiguous buffers.

One arena per compute dtype holds the parameters that train. Clearing gradients is one memset per arena, the
reduction sends one buffer, and the update is torch's fused AdamW on one flat fp32 tensor, with averaging and
clipping folded into its `grad_scale`. Masters and moments are always fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from somaspeed.config import TrainingConfig

ALIGNMENT = 64  # elements: every view starts on a 128-byte boundary even in bf16


class Slot(NamedTuple):
    """Where one parameter lies in its arena: [offset, offset + elements)."""

    name: str
    offset: int
    shape: torch.Size


class Arena:
    """The live parameters of one dtype, their gradients and fp32 masters as flat tensors of equal layout.

    Attributes:
        compute: the parameters as the forward reads them, [N] in the compute dtype.
        grad: their gradients, [N] fp32; also the accumulator over micro-batches.
        master: fp32 values that the optimizer updates; the same storage as `compute` when that is fp32.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        first = next(iter(parameters.values()))
        self.parameters = parameters
        self.slots: list[Slot] = []
        size = 0
        for name, parameter in parameters.items():
            self.slots.append(Slot(name, size, parameter.shape))
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.compute = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.wide = first.dtype == torch.float32
        self.grad = torch.zeros(size, dtype=torch.float32, device=first.device)
        for slot, parameter in zip(self.slots, parameters.values(), strict=True):
            view = self.view(self.compute, slot)
            view.copy_(parameter.detach())
            parameter.data = view
        self.master = self.compute if self.wide else self.compute.float()
        self.attach_gradients()

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset : slot.offset + slot.shape.numel()].view(slot.shape)

    def attach_gradients(self) -> None:
        """Let backward write into the arena: fp32 gradients are views, narrower ones are added after backward."""
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            parameter.grad = self.view(self.grad, slot) if self.wide else None

    def collect(self) -> None:
        """Add the gradients of a backward in a narrow dtype to the fp32 accumulator and free them."""
        if self.wide:
            return
        views, gradients = [], []
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            if parameter.grad is not None:
                views.append(self.view(self.grad, slot))
                gradients.append(parameter.grad)
                parameter.grad = None
        torch._foreach_add_(views, gradients)

    def publish(self) -> None:
        """Copy the updated masters to the compute parameters."""
        if not self.wide:
            self.compute.copy_(self.master)

    def check(self) -> None:
        """Assert that every parameter still lies in the arena; a reallocation would train a dead copy."""
        low, high = self.compute.data_ptr(), self.compute.data_ptr() + self.compute.nbytes
        for name, parameter in self.parameters.items():
            assert low <= parameter.data_ptr() < high, f"{name} has left the arena"


def make_arenas(live: dict[str, nn.Parameter]) -> list[Arena]:
    """One arena per dtype, in order of first appearance. A parameter under two names is kept once."""
    groups: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    seen: set[int] = set()
    for name, parameter in live.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            groups.setdefault(parameter.dtype, {})[name] = parameter
    return [Arena(group) for group in groups.values()]


class ArenaAdamW:
    """AdamW with decoupled weight decay and global-norm clipping over arenas (Loshchilov & Hutter 2019).

    A non-finite gradient norm skips the update on the device: nothing moves, and `skipped` counts it.
    """

    def __init__(self, arenas: list[Arena], settings: TrainingConfig) -> None:
        self.arenas, self.clip = arenas, settings.clip_grad
        device = arenas[0].compute.device
        self.masters = [nn.Parameter(arena.master, requires_grad=True) for arena in arenas]
        for master, arena in zip(self.masters, arenas, strict=True):
            master.grad = arena.grad
        self.adamw: Any = torch.optim.AdamW(
            self.masters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> Tensor:
        """One update from gradients that are sums of `divisor` parts; returns their mean's global L2 norm, fp32."""
        norms = torch.stack([torch.linalg.vector_norm(arena.grad) for arena in self.arenas])
        norm = torch.linalg.vector_norm(norms) / divisor
        # The clip of torch.nn.utils.clip_grad_norm_: gradients times min(1, clip / (norm + 1e-6)).
        self.adamw.grad_scale = divisor * ((norm + 1e-6) / self.clip).clamp_(min=1.0)
        found = (~norm.isfinite()).float()
        self.adamw.found_inf = found
        self.skipped += found.long()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for arena in self.arenas:
            arena.publish()
        return norm

    def zero_grad(self) -> None:
        for arena in self.arenas:
            arena.grad.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Flat tensors by name: `arena.<i>.{master,exp_avg,exp_avg_sq,step}`; references, not copies."""
        state = {}
        for index, (arena, master) in enumerate(zip(self.arenas, self.masters, strict=True)):
            moments = self.adamw.state.get(master) or self.fresh_state(master)
            state[f"arena.{index}.master"] = arena.master
            for name in ("exp_avg", "exp_avg_sq", "step"):
                state[f"arena.{index}.{name}"] = moments[name]
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` gave, on any device. Raises ValueError when the layouts differ."""
        for index, (arena, master) in enumerate(zip(self.arenas, self.masters, strict=True)):
            saved = state[f"arena.{index}.master"]
            if saved.shape != arena.master.shape:
                raise ValueError(f"arena {index} holds {arena.master.numel()} elements, the checkpoint {saved.numel()}")
            arena.master.copy_(saved)
            arena.publish()
            fresh = self.fresh_state(master)
            self.adamw.state[master] = {
                name: tensor.copy_(state[f"arena.{index}.{name}"]) for name, tensor in fresh.items()
            }

    @staticmethod
    def fresh_state(master: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
