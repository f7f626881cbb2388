"""Flat arena optimizer: live parameters, gradients and moments are views into contiguous buffers.

One arena per compute dtype holds the parameters that train, ordered by parameter group, so that each group is one
slice. Clearing gradients is one memset per arena, the reduction sends one buffer, and the update is torch's fused
AdamW on flat fp32 slices, with averaging and clipping folded into its `grad_scale`. Masters and moments are always
fp32. When optimizer state is sharded, a rank holds and updates one range of every arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from somaspeed.config import TrainingConfig

ALIGNMENT = 64  # elements: every view starts on a 128-byte boundary even in bf16
FLATS = ("master", "exp_avg", "exp_avg_sq")


class Group(NamedTuple):
    """How a parameter is updated: with weight decay or without, and the factor on the learning rate."""

    decay: bool = True
    lr_scale: float = 1.0


class Slot(NamedTuple):
    """Where one parameter lies in its arena: [offset, offset + elements)."""

    name: str
    offset: int
    shape: torch.Size


class Arena:
    """The live parameters of one dtype and their gradients as flat tensors of equal layout.

    Attributes:
        compute: the parameters as the forward reads them, [N] in the compute dtype.
        grad: their gradients, [N] fp32; also the accumulator over micro-batches.
        groups: each parameter group's slice of the arena.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], groups: dict[str, Group], shards: int) -> None:
        ordered = sorted(parameters, key=lambda name: groups[name])  # stable: the module's order within a group
        self.parameters = {name: parameters[name] for name in ordered}
        self.slots: list[Slot] = []
        self.groups: dict[Group, slice] = {}
        size = 0
        for name, parameter in self.parameters.items():
            self.slots.append(Slot(name, size, parameter.shape))
            start = self.groups[groups[name]].start if groups[name] in self.groups else size
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            self.groups[groups[name]] = slice(start, size)
        unit = ALIGNMENT * shards
        size = -(-size // unit) * unit
        last = groups[ordered[-1]]  # the padding at the end belongs to a group too: zeros that stay zero
        self.groups[last] = slice(self.groups[last].start, size)
        first = next(iter(self.parameters.values()))
        self.wide = first.dtype == torch.float32
        self.compute = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(size, dtype=torch.float32, device=first.device)
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            view = self.view(self.compute, slot)
            view.copy_(parameter.detach())
            parameter.data = view
            # In fp32 backward writes into the arena; narrower gradients are added to it by `collect`.
            parameter.grad = self.view(self.grad, slot) if self.wide else None

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset : slot.offset + slot.shape.numel()].view(slot.shape)

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
        if views:
            torch._foreach_add_(views, gradients)

    def check(self) -> None:
        """Assert that every parameter still lies in the arena; a reallocation would train a dead copy."""
        low, high = self.compute.data_ptr(), self.compute.data_ptr() + self.compute.nbytes
        for name, parameter in self.parameters.items():
            assert low <= parameter.data_ptr() < high, f"{name} has left the arena"


def watch_gradients(arenas: list[Arena]) -> Callable[[], list[str]]:
    """Watch the next backward: the function returned ends that, and names the parameters no gradient has reached.

    In fp32 a gradient lies in the arena before it is computed, so its absence cannot be seen there: it is zero.
    """
    missing = {id(p): name for arena in arenas for name, p in arena.parameters.items()}

    def reach(parameter: Tensor) -> None:
        missing.pop(id(parameter), None)

    hooks = [
        parameter.register_post_accumulate_grad_hook(reach)
        for arena in arenas
        for parameter in arena.parameters.values()
    ]

    def finish() -> list[str]:
        for hook in hooks:
            hook.remove()
        return list(missing.values())

    return finish


def make_arenas(
    live: dict[str, nn.Parameter], group_of: Callable[[str, nn.Parameter], Group], shards: int = 1
) -> list[Arena]:
    """One arena per dtype, in order of first appearance. A parameter under two names is kept once."""
    by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    seen: set[int] = set()
    for name, parameter in live.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            by_dtype.setdefault(parameter.dtype, {})[name] = parameter
    groups = {name: group_of(name, parameter) for name, parameter in live.items()}
    return [Arena(parameters, groups, shards) for parameters in by_dtype.values()]


class Shard(NamedTuple):
    """This rank's range of an arena and the fp32 tensors over it: [stop - start] each."""

    arena: Arena
    start: int
    stop: int
    grad: Tensor
    flats: dict[str, Tensor]  # by `FLATS`


class ArenaAdamW:
    """AdamW with decoupled weight decay and global-norm clipping over arenas (Loshchilov & Hutter 2019).

    A non-finite gradient norm skips the update on the device: nothing moves, and `skipped` counts it.

    Args:
        shard, shards: which of how many equal ranges of every arena this rank updates.
        total: sums a scalar tensor in place over the ranks that hold the other ranges.
    """

    def __init__(
        self,
        arenas: list[Arena],
        settings: TrainingConfig,
        shard: int = 0,
        shards: int = 1,
        total: Callable[[Tensor], Any] = lambda scalar: None,
    ) -> None:
        self.arenas, self.clip, self.total = arenas, settings.clip_grad, total
        self.shards = [self.make_shard(arena, shard, shards) for arena in arenas]
        self.steps: list[list[Tensor]] = []
        groups = []
        for part in self.shards:
            steps = []
            for group, span in part.arena.groups.items():
                start, stop = max(span.start, part.start) - part.start, min(span.stop, part.stop) - part.start
                if start >= stop:
                    continue
                master = nn.Parameter(part.flats["master"][start:stop])
                master.grad = part.grad[start:stop]
                steps.append(torch.zeros((), device=master.device))
                groups.append((group, master, steps[-1], part, slice(start, stop)))
            self.steps.append(steps)
        self.adamw: Any = torch.optim.AdamW(
            [
                {
                    "params": [master],
                    "weight_decay": settings.weight_decay if group.decay else 0.0,
                    "lr_scale": group.lr_scale,
                }
                for group, master, *_ in groups
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for _, master, step, part, span in groups:
            moments = {name: part.flats[name][span] for name in FLATS[1:]}
            self.adamw.state[master] = {"step": step, **moments}
        self.skipped = torch.zeros((), dtype=torch.int64, device=arenas[0].compute.device)

    @staticmethod
    def make_shard(arena: Arena, shard: int, shards: int) -> Shard:
        length = len(arena.compute) // shards
        start, stop = shard * length, (shard + 1) * length
        mine = arena.compute[start:stop]
        flats = {
            "master": mine if arena.wide else mine.float(),
            "exp_avg": torch.zeros(length, device=mine.device),
            "exp_avg_sq": torch.zeros(length, device=mine.device),
        }
        grad = arena.grad if shards == 1 else torch.zeros(length, device=mine.device)
        return Shard(arena, start, stop, grad, flats)

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> Tensor:
        """One update from gradients that are sums of `divisor` parts; returns their mean's global L2 norm, fp32."""
        norms = torch.stack([torch.linalg.vector_norm(part.grad) for part in self.shards])
        squared = norms.square().sum()
        self.total(squared)
        norm = squared.sqrt() / divisor
        # The clip of torch.nn.utils.clip_grad_norm_: gradients times min(1, clip / (norm + 1e-6)).
        self.adamw.grad_scale = divisor * ((norm + 1e-6) / self.clip).clamp_(min=1.0)
        found = (~norm.isfinite()).float()
        self.adamw.found_inf = found
        self.skipped += found.long()
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.adamw.step()
        for part in self.shards:
            if not part.arena.wide:
                part.arena.compute[part.start : part.stop].copy_(part.flats["master"])
        return norm

    def zero_grad(self) -> None:
        for arena in self.arenas:
            arena.grad.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's flat ranges by name, `arena.<i>.{master,exp_avg,exp_avg_sq}`, and `arena.<i>.step`; no copies."""
        state: dict[str, Tensor] = {}
        for index, (part, steps) in enumerate(zip(self.shards, self.steps, strict=True)):
            state |= {f"arena.{index}.{name}": part.flats[name] for name in FLATS}
            state[f"arena.{index}.step"] = steps[0] if steps else torch.zeros(())
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore from whole arenas: `state_dict` of an unsharded optimizer, or the shards' ranges put together.

        Every rank takes its own range, and all of `compute`. Raises ValueError when the layouts differ.
        """
        for index, (part, steps) in enumerate(zip(self.shards, self.steps, strict=True)):
            arena = part.arena
            used = arena.slots[-1].offset + arena.slots[-1].shape.numel()  # behind it is padding, which shards change
            for name in FLATS:
                whole = state[f"arena.{index}.{name}"]
                if len(whole) < used:
                    raise ValueError(f"arena {index} holds {used} elements, the checkpoint {len(whole)}")
                if name == "master":
                    arena.compute[:used].copy_(whole[:used])
                stop = min(part.stop, used)
                if part.start < stop:
                    part.flats[name][: stop - part.start].copy_(whole[part.start : stop])
            for step in steps:
                step.copy_(state[f"arena.{index}.step"])
