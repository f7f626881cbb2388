"""Preallocated host buffers that are handed out again only when nobody can see them any more."""

from __future__ import annotations

import collections
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class Lease:
    """One buffer on loan. It goes back when the last tensor over `memory` is gone, views included.

    memory: uint8 [bytes], uninitialised.
    """

    memory: torch.Tensor
    _fences: list[torch.cuda.Event]

    def fence(self, event: torch.cuda.Event) -> None:
        """Keep the buffer from being reused before `event`, recorded after an asynchronous copy out of it."""
        self._fences.append(event)


@dataclass
class _Slot:
    array: np.ndarray
    fences: list[torch.cuda.Event] = field(default_factory=list)


class Ring:
    """Buffers of `size` bytes, page-locked when `pinned`; `spare` of them are kept while nobody needs them.

    A consumer that holds many leases makes the ring grow instead of seeing its data change; the surplus is
    freed when it comes back.
    """

    def __init__(self, size: int, spare: int, pinned: bool):
        self.size = size
        self.spare = spare
        self.pinned = pinned
        # Last in, first out: what was used last is still in the processor's cache. A deque's append and pop are atomic,
        # and append may run inside a finaliser, whichever thread drops the last reference.
        self._free: collections.deque[_Slot] = collections.deque()

    def lease(self) -> Lease:
        """A buffer that nobody else sees; waits for copies out of it that are still under way on a device."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot(torch.empty(self.size, dtype=torch.uint8, pin_memory=self.pinned).numpy())
        for event in slot.fences:
            event.synchronize()
        slot.fences.clear()
        # The tensor's storage, which all its views share, owns this array object: its end is theirs.
        view = slot.array[:]
        weakref.finalize(view, _give_back, self._free, self.spare, slot).atexit = False
        return Lease(torch.from_numpy(view), slot.fences)


def _give_back(free: collections.deque[_Slot], spare: int, slot: _Slot) -> None:
    if len(free) < spare:
        free.append(slot)
