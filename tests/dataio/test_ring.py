"""Buffers come back exactly when nobody can see them any more."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from dataio.batch import Batch
from dataio.ring import Ring


def test_a_buffer_is_handed_out_again_only_after_its_last_view() -> None:
    ring = Ring(64, spare=2, pinned=False)
    lease = ring.lease()
    place = lease.memory.data_ptr()
    view = lease.memory[8:24].view(4, 4)[1]
    del lease
    assert ring.lease().memory.data_ptr() != place
    array = view.numpy()
    del view
    others = [ring.lease() for _ in range(3)]
    assert place not in [other.memory.data_ptr() for other in others]
    del array
    assert place in [ring.lease().memory.data_ptr() for _ in range(3)]


def test_the_surplus_is_freed() -> None:
    ring = Ring(64, spare=2, pinned=False)
    many = [ring.lease() for _ in range(20)]
    assert len({lease.memory.data_ptr() for lease in many}) == 20
    del many
    assert len(ring._free) == 2


def test_buffers_may_be_dropped_by_any_thread() -> None:
    ring = Ring(1 << 12, spare=4, pinned=False)
    clashes = []

    def use(number: int) -> None:
        for _ in range(300):
            lease = ring.lease()
            lease.memory.fill_(number)
            if not bool((lease.memory == number).all()):
                clashes.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes


def test_fences_are_waited_for() -> None:
    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    ring, event = Ring(64, spare=1, pinned=False), Event()
    lease = ring.lease()
    lease.fence(event)  # type: ignore[arg-type]
    assert event.waited == 0
    del lease
    lease = ring.lease()
    assert event.waited == 1
    del lease
    ring.lease()
    assert event.waited == 1


@pytest.mark.gpu
def test_copies_from_page_locked_buffers_are_complete_before_reuse() -> None:
    ring = Ring(1 << 26, spare=1, pinned=True)
    tensors = {item.name: torch.empty(0) for item in dataclasses.fields(Batch)}
    copies = []
    for number in range(20):
        lease = ring.lease()
        assert lease.memory.is_pinned()
        lease.memory.fill_(number)
        fields = {"images": {"image": lease.memory}, "columns": {}, "is_pad": {}, "extra": {}, "lease": lease}
        batch = Batch(**(tensors | fields))
        copies.append(batch.to("cuda").images["image"])
        del lease, fields, batch
    torch.cuda.synchronize()
    assert [int(copy.min()) for copy in copies] == [int(copy.max()) for copy in copies] == list(range(20))
