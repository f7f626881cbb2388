"""What test_reduction.py runs on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from somaspeed import reduction
from somaspeed.config import ParallelConfig, parse_config
from somaspeed.metrics import PhaseTimer
from somaspeed.optim import ArenaAdamW, Group, make_arenas
from somaspeed.parallel import Ranks
from somaspeed.reduction import Layout, Reduction

WIDTH = 50
RAW = {"output": "unused", "model": {"name": "pi05"}, "training": {"steps": 8, "microbatch": 1, "lr": 1e-2}}


def problem() -> tuple[dict[str, nn.Parameter], torch.Tensor]:
    """A linear regression with an fp32 and a bf16 parameter, and eight rows of data."""
    generator = torch.Generator().manual_seed(0)
    live = {
        "wide": nn.Parameter(torch.randn(WIDTH, generator=generator)),
        "narrow": nn.Parameter(torch.randn(WIDTH, generator=generator).to(torch.bfloat16)),
    }
    return live, torch.randn(8, 20, WIDTH, generator=generator)


def trajectory(ranks: Ranks, settings: ParallelConfig, skip: bool = False) -> dict:
    """Eight updates on this rank's share of the rows; the norms and the final parameters."""
    layout = Layout(ranks, settings)
    live, data = problem()
    arenas = make_arenas(live, lambda name, parameter: Group(), layout.shards)
    optimizer = ArenaAdamW(arenas, parse_config(RAW, "test").training, layout.shard, layout.shards, layout.total)
    reduce = Reduction(layout, optimizer, settings.wire)
    mine = data[ranks.rank :: ranks.world]
    norms = []
    for _ in range(8):
        loss = ((mine @ live["wide"]) ** 2).mean() + ((mine @ live["narrow"].float()) ** 2).mean()
        loss.backward()
        for arena in arenas:
            arena.collect()
        reduce.start()
        if skip:  # what a forgotten wait would do: every rank goes on with its own gradients
            reduce.finish()
            for arena in arenas:
                arena.grad.mul_(1 + ranks.rank)
        else:
            reduce.finish()
        norms.append(optimizer.step(1e-2, divisor=ranks.world).item())
        reduce.gather()
        optimizer.zero_grad()
    flat = torch.cat([live["wide"].detach(), live["narrow"].detach().float()])
    copies = [torch.empty_like(flat) for _ in range(ranks.world)]
    if ranks.world > 1:
        dist.all_gather(copies, flat)
    same = all(torch.equal(copy, flat) for copy in copies) if ranks.world > 1 else True
    live_bytes = sum(arena.grad.numel() for arena in arenas) * reduce.wire.itemsize
    reduced = {"bytes": reduce.bytes_per_step, "live": live_bytes}
    return {"norms": norms, "final": flat.tolist(), "same": same, **reduced}


def three_and_four(ranks: Ranks, shard: int) -> float:
    """Gradients [3, 0] and [0, 4] on two ranks: the norm of their sum is 5, sharded or not."""
    layout = Layout(ranks, ParallelConfig(shard=shard))
    live = {"a": nn.Parameter(torch.zeros(100)), "b": nn.Parameter(torch.zeros(100))}
    arenas = make_arenas(live, lambda name, parameter: Group(), layout.shards)
    optimizer = ArenaAdamW(arenas, parse_config(RAW, "test").training, layout.shard, layout.shards, layout.total)
    live["a" if ranks.rank == 0 else "b"].grad[0] = 3.0 if ranks.rank == 0 else 4.0
    reduce = Reduction(layout, optimizer, "float32")
    reduce.start()
    reduce.finish()
    return optimizer.step(0.0, divisor=1).item()


class SlowWork:
    """A collective over a link that takes `seconds`."""

    def __init__(self, work, seconds: float) -> None:
        self.work, self.ready = work, time.perf_counter() + seconds

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(self.ready - time.perf_counter(), 0))


def slow_link(ranks: Ranks, lookahead: int) -> float:
    """Median seconds of a step of the real loop whose prefix takes 0.18 s, expert 0.02 s and reduction 0.2 s."""
    from somaspeed.loop import Trainer

    prefix, expert, link = 0.18, 0.02, 0.2
    real = dist.all_reduce
    reduction.dist.all_reduce = lambda tensor, **kwargs: (
        SlowWork(real(tensor, **kwargs), link) if kwargs.get("async_op") else real(tensor, **kwargs)
    )
    config = parse_config({**RAW, "prefix": {"lookahead": lookahead}}, "test")
    live = {"w": nn.Parameter(torch.zeros(1000))}

    class Policy:
        learning_rate = staticmethod(lambda steps, settings: lambda step: 0.0)

        def expert_loss(self, *_):
            time.sleep(expert)
            return live["w"].sum()

    class Stage:
        cached = None

        class loader:
            state_dict = staticmethod(dict)

        def next(self):
            from somaspeed.prefix import Ready

            time.sleep(prefix)

            class Batch:
                sample = torch.zeros(1, dtype=torch.int64)

            return Ready(Batch(), None, None, None, None, {})

    layout = Layout(ranks, config.parallel)
    optimizer = ArenaAdamW(make_arenas(live, lambda name, parameter: Group()), config.training)
    timer = PhaseTimer(ranks.device)
    reduce = Reduction(layout, optimizer, "float32")
    trainer = Trainer(config, ranks, Policy(), optimizer, reduce, Stage(), timer, None, {}, None, time.perf_counter())
    trainer.ready = trainer.stage.next()
    for _ in range(5):
        trainer.train_step()
    _, steps = timer.collect()
    reduction.dist.all_reduce = real
    return sorted(steps)[len(steps) // 2] / max(prefix + expert, link)


def cases() -> dict:
    torch.set_num_threads(1)
    ranks = Ranks(ParallelConfig(timeout_seconds=60))
    found: dict = {"world": ranks.world}
    found["unsharded"] = trajectory(ranks, ParallelConfig())
    if ranks.world > 1:
        found["bf16"] = trajectory(ranks, ParallelConfig(wire="bfloat16"))
        found["sharded"] = trajectory(ranks, ParallelConfig(shard=ranks.world))
        found["sharded bf16"] = trajectory(ranks, ParallelConfig(shard=ranks.world, wire="bfloat16"))
        found["skipped"] = trajectory(ranks, ParallelConfig(), skip=True)
    if ranks.world == 4:
        found["hybrid"] = trajectory(ranks, ParallelConfig(shard=2))
    if ranks.world == 2:
        found["norms"] = [three_and_four(ranks, 1), three_and_four(ranks, 2)]
        found["hidden"] = slow_link(ranks, lookahead=1)
        found["awaited"] = slow_link(ranks, lookahead=0)
    ranks.close()
    return found
