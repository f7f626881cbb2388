"""The arena optimizer against torch's own AdamW and clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from somaspeed.optim import ArenaAdamW, make_arenas
from tests.somaspeed.cases import tiny_config


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (65, 2), "d": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def optimizer_for(live: dict[str, nn.Parameter], **settings: object) -> ArenaAdamW:
    return ArenaAdamW(make_arenas(live), tiny_config(training=settings).training)


def test_hundred_updates_equal_torch():
    ours, theirs = parameters(), parameters()
    optimizer = optimizer_for(ours, lr=1e-2, weight_decay=0.1, clip_grad=1.0)
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        lr = 1e-2 * (step + 1) / 100
        for name in ours:
            gradient = torch.randn(ours[name].shape, generator=generator) * (10 if step % 2 else 0.01)
            ours[name].grad += gradient
            theirs[name].grad = gradient.clone()
        expected = nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        norm = optimizer.step(lr, divisor=1)
        optimizer.zero_grad()
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for name in ours:
        assert (ours[name] - theirs[name]).norm() <= 1e-6 * theirs[name].norm()


def test_gradients_three_and_four_have_norm_five():
    live = {"a": nn.Parameter(torch.zeros(1)), "b": nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))}
    optimizer = optimizer_for(live)
    assert len(optimizer.arenas) == 2, "one arena per dtype"
    live["a"].grad += 3 * 2
    live["b"].grad = torch.tensor([4.0 * 2], dtype=torch.bfloat16)
    for arena in optimizer.arenas:
        arena.collect()
    assert optimizer.step(1e-3, divisor=2).item() == 5.0


def test_bf16_parameters_have_fp32_masters_that_move():
    live = {"w": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    optimizer = optimizer_for(live, weight_decay=0.0)
    for _ in range(1000):
        live["w"].grad = torch.full((4,), 1e-3, dtype=torch.bfloat16)
        optimizer.arenas[0].collect()
        optimizer.step(1e-5, divisor=1)
        optimizer.zero_grad()
    assert torch.all(optimizer.arenas[0].master[:4] < 0.995)
    assert torch.all(live["w"] < 1.0), "the compute copy follows"


def test_non_finite_gradients_move_nothing_and_are_counted():
    live = parameters()
    optimizer = optimizer_for(live)
    before = {name: p.detach().clone() for name, p in live.items()}
    live["a"].grad[0, 0] = float("inf")
    optimizer.step(1e-2, divisor=1)
    optimizer.zero_grad()
    assert optimizer.skipped.item() == 1
    assert all(torch.equal(before[name], live[name]) for name in live)
    live["a"].grad += 1
    optimizer.step(1e-2, divisor=1)
    assert not torch.equal(before["a"], live["a"]) and torch.isfinite(live["a"]).all()


def test_parameters_keep_their_place_and_leaving_it_is_noticed():
    live = parameters()
    arena = make_arenas(live)[0]
    arena.check()
    live["c"].data = live["c"].data.clone()
    with pytest.raises(AssertionError, match="c has left the arena"):
        arena.check()


def test_state_round_trip_continues_bit_for_bit():
    def run(optimizer: ArenaAdamW, live: dict[str, nn.Parameter], steps: range) -> None:
        for step in steps:
            for p in live.values():
                p.grad += torch.full_like(p, 0.1 * (step + 1))
            optimizer.step(1e-2, divisor=1)
            optimizer.zero_grad()

    whole, first, second = parameters(), parameters(), parameters()
    run(optimizer_for(whole), whole, range(6))
    half = optimizer_for(first)
    run(half, first, range(3))
    resumed = optimizer_for(second)
    resumed.load_state_dict({name: tensor.clone() for name, tensor in half.state_dict().items()})
    run(resumed, second, range(3, 6))
    assert all(torch.equal(whole[name], second[name]) for name in whole)


def test_tied_parameters_are_updated_once():
    shared = nn.Parameter(torch.ones(3))
    arenas = make_arenas({"one": shared, "two": shared})
    assert [slot.name for slot in arenas[0].slots] == ["one"]
