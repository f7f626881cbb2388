"""The training loop: expert backward → reduction in flight → prefix of the next batch → update."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from dataio.atomic import write_bytes
from dataio.batch import Batch
from somaspeed import checkpoint
from somaspeed.config import Config
from somaspeed.evaluate.during import Evaluations, describe
from somaspeed.metrics import MetricsFile, PhaseTimer, Summary, Tracker, peak_allocated_gib
from somaspeed.optim import ArenaAdamW, watch_gradients
from somaspeed.parallel import Ranks
from somaspeed.policies.base import Policy
from somaspeed.prefix import PrefixStage, Ready
from somaspeed.preview import save_preview
from somaspeed.progress import Progress
from somaspeed.reduction import Reduction


class NonFiniteError(RuntimeError):
    """Too many updates had non-finite gradients."""


class Trainer:
    """One run. Build it, call `run`; everything it writes lies under `config.output`.

    Args:
        held_out: a function giving the held-out batches, prepared as the loader's are; None without held-out episodes.
        identity: what a checkpoint must share with this run to be resumed by it.
        resumed: the checkpoint and state to go on from, already checked against `identity`.
        started: `time.perf_counter()` when the process began: set-up counts.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        policy: Policy,
        optimizer: ArenaAdamW,
        reduction: Reduction,
        stage: PrefixStage,
        timer: PhaseTimer,
        held_out: Callable[[], Iterable[Batch]] | None,
        identity: dict[str, Any],
        resumed: tuple[Path, checkpoint.TrainingState] | None,
        started: float,
    ) -> None:
        self.config, self.ranks, self.policy, self.optimizer = config, ranks, policy, optimizer
        self.reduction = reduction
        self.stage, self.timer, self.held_out, self.identity = stage, timer, held_out, identity
        self.settings, self.output, self.started = config.training, Path(config.output), started
        self.accumulation = config.accumulation(ranks.world)
        self.global_batch = self.settings.microbatch * ranks.world * self.accumulation
        self.learning_rate = policy.learning_rate(self.settings.steps, self.settings)
        self.step = resumed[1].step if resumed else 0
        self.first_step = self.step
        self.loader_state = stage.loader.state_dict()
        self.slowest: list[float] = []  # per update, the slowest rank's seconds
        self.stop_reason = ""
        self.ready: Ready | None = None
        self.saved_step = self.step if resumed else -1
        self.held_out_loss: float | None = None
        self.skipped = 0
        self.evaluations = Evaluations(config.evaluate, self.output)
        if resumed and ranks.main:
            self.evaluations.resume()

    def run(self) -> Summary:
        """Train until the last step, the time limit or SIGTERM; checkpoint; return what `summary.json` holds.

        Raises NonFiniteError when more than `training.max_nonfinite` updates were skipped.
        """
        self.setup_seconds = time.perf_counter() - self.started
        self.setup_peak = peak_allocated_gib(self.ranks.device)
        writer = self.open_writers()
        try:
            self.optimizer.zero_grad()
            if self.step < self.settings.steps:
                self.ready = self.stage.next()
                if self.ranks.main and self.step == 0:
                    save_preview(self.output / "first_batch.png", self.policy, self.ready.inputs)
            unreached = watch_gradients(self.optimizer.arenas)
            while self.step < self.settings.steps and not self.stop_reason:
                self.train_step()
                if self.step == self.first_step + 1:
                    self.warn_of(unreached())
                self.after_step(writer)
            self.save()
            summary = self.summarise()
            if self.stop_reason == "completed" and self.evaluations.running:
                self.finish_evaluations(writer)
        finally:
            self.evaluations.stop()
            writer.close()
        return summary

    def finish_evaluations(self, writer: Writers) -> None:
        writer.progress.note("training has ended; the evaluations under way are waited for")
        for result in self.evaluations.finish():
            writer.evaluation(result, self.step)

    def warn_of(self, unreached: list[str]) -> None:
        if unreached and self.ranks.main:
            print(
                f"warning: the first update's gradients did not reach {len(unreached)} trained parameters, which now "
                f"move by weight decay alone: {', '.join(unreached)}",
                file=sys.stderr,
            )

    def train_step(self) -> None:
        """One update, on `self.ready`; the prefix of the batch after it hides the reduction."""
        start = self.timer.mark()
        self.loss = torch.zeros((), device=self.ranks.device)
        self.digest = 0
        last_update = self.step + 1 == self.settings.steps
        for micro in range(self.accumulation):
            ready, self.ready = self.ready, None
            assert ready is not None
            with self.timer.phase("expert"):
                loss = self.policy.expert_loss(ready.prefix, ready.inputs, ready.noise, ready.time)
                loss.backward()
                for arena in self.optimizer.arenas:
                    arena.collect()
            self.loss += loss.detach()
            self.digest = zlib.crc32(ready.batch.sample.numpy().tobytes(), self.digest)
            self.loader_state = ready.loader_state
            del ready, loss  # two prefixes are never alive at once
            if micro + 1 < self.accumulation:
                self.ready = self.stage.next()
        self.reduction.start()
        ahead = self.config.prefix.lookahead and not last_update
        if ahead:
            self.ready = self.stage.next()
        with self.timer.phase("reduce_exposed"):
            self.reduction.finish()
        if not ahead and not last_update:
            self.ready = self.stage.next()
        with self.timer.phase("update"):
            self.lr = self.learning_rate(self.step)
            self.grad_norm = self.optimizer.step(self.lr, divisor=self.ranks.world * self.accumulation)
            self.reduction.gather()
            self.optimizer.zero_grad()
        self.timer.spans.append(("step", start, self.timer.mark()))
        self.step += 1

    def after_step(self, writer: Writers) -> None:
        """Log, evaluate and save when they are due. Only here does the host wait for the device."""
        settings = self.settings
        final = self.step == settings.steps
        to_evaluate = self.evaluations.due(self.step)
        due_save = to_evaluate or (settings.save_every is not None and self.step % settings.save_every == 0)
        first = self.step == self.first_step + 1
        # With several ranks the next logged step decides.
        alone_signalled = self.ranks.stop_requested and self.ranks.world == 1
        every = settings.evaluate_every
        due_evaluation = self.held_out is not None and (final or (self.step % every == 0 if every else due_save))
        if self.step % settings.log_every == 0 or first or final or due_save or due_evaluation or alone_signalled:
            record = self.measure()
            if due_evaluation:
                record["held_out_loss"] = self.held_out_loss = self.evaluate()
            writer.metrics(record)
            self.check_finite()
            self.decide_stop()
        if due_save or final:
            self.save()
        if self.ranks.main:
            if to_evaluate:
                self.evaluations.submit(self.step, checkpoint.place(self.output, self.step) / checkpoint.PRETRAINED)
            for result in self.evaluations.poll():
                writer.evaluation(result, self.step)

    def measure(self) -> dict[str, Any]:
        """One line of metrics over the steps since the last one. Waits for the device."""
        seconds, steps = self.timer.collect()
        slowest = self.ranks.maximum(steps)
        self.slowest += slowest
        loss, grad_norm = self.ranks.mean([self.loss.item() / self.accumulation, self.grad_norm.item()])
        return {
            "step": self.step,
            "epoch": self.loader_state["epoch"],
            "position": self.loader_state["position"],
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.lr,
            "samples_per_second": len(slowest) * self.global_batch / sum(slowest),
            "seconds": {phase: value / len(steps) for phase, value in seconds.items()},
            "samples_crc32": self.digest,
        }

    def check_finite(self) -> None:
        """Raise NonFiniteError when more updates were skipped than the configuration allows."""
        self.skipped = int(self.optimizer.skipped)
        if self.skipped > self.settings.max_nonfinite:
            raise NonFiniteError(
                f"{self.skipped} updates had non-finite gradients by step {self.step}, more than "
                f"training.max_nonfinite = {self.settings.max_nonfinite}. Nothing moved in them. Lower training.lr, "
                "or look at the data's statistics with --check. The last checkpoint is intact."
            )

    def decide_stop(self) -> None:
        """Whether to stop here; every rank takes the same decision."""
        total, updates = self.settings.max_seconds, self.settings.max_training_seconds
        late = total is not None and time.perf_counter() - self.started >= total
        late = late or (updates is not None and sum(self.slowest) >= updates)
        timed_out, signalled = self.ranks.maximum([float(late), float(self.ranks.stop_requested)])
        if self.step == self.settings.steps:
            self.stop_reason = "completed"
        else:
            self.stop_reason = "signal" if signalled else "time_limit" if timed_out else ""

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the held-out episodes, with noise and time fixed per sample."""
        assert self.held_out is not None
        total, count = torch.zeros((), dtype=torch.float64, device=self.ranks.device), 0
        timer, self.stage.timer = self.stage.timer, PhaseTimer(self.ranks.device)
        cached, self.stage.cached = self.stage.cached, None  # held-out frames come with their images
        for batch in self.held_out():
            ready = self.stage.run(batch, {})
            loss = self.policy.expert_loss(ready.prefix, ready.inputs, ready.noise, ready.time)
            total += loss.double() * len(batch.sample)
            count += len(batch.sample)
        self.stage.timer, self.stage.cached = timer, cached
        mean_total, mean_count = self.ranks.mean([total.item(), float(count)])
        return mean_total / mean_count

    def save(self) -> None:
        """Write a checkpoint of the state after the last update."""
        if self.saved_step == self.step:
            return
        if self.stage.cached:
            self.stage.cached.make_durable()
        layout = self.reduction.layout
        if self.ranks.main:
            temporary = checkpoint.begin(self.output, self.step)
            final = checkpoint.place(self.output, self.step)
            self.policy.save(temporary / checkpoint.PRETRAINED, final / checkpoint.PRETRAINED)
        self.ranks.barrier()
        if self.ranks.rank < layout.shards:  # the first shard group
            checkpoint.write_optimizer(self.output, self.step, self.optimizer, layout.shard, layout.shards)
        self.ranks.barrier()
        if self.ranks.main:
            state = checkpoint.TrainingState(
                step=self.step,
                loader=self.loader_state,
                identity=self.identity,
                slots=checkpoint.slots_of(self.optimizer),
                shards=layout.shards,
                skipped_updates=int(self.optimizer.skipped),
            )
            checkpoint.finish(self.output, state, self.settings.keep_checkpoints)
        self.ranks.barrier()
        self.saved_step = self.step

    def open_writers(self) -> Writers:
        return Writers(self.config, self.ranks, self.first_step, self.global_batch)

    def summarise(self) -> Summary:
        """Write and return `summary.json`."""
        wall = time.perf_counter() - self.started
        done = self.step - self.first_step
        measured = self.slowest[self.settings.warmup_measurement :]
        summary = Summary(
            completed_steps=self.step,
            target_steps=self.settings.steps,
            setup_seconds=self.setup_seconds,
            setup_peak_allocated_gib=self.setup_peak,
            wall_seconds=wall,
            samples_per_second_end_to_end=done * self.global_batch / wall,
            samples_per_second_steady=len(measured) * self.global_batch / sum(measured) if measured else 0.0,
            measured_steps=len(measured),
            bounded_early_stop=self.stop_reason == "time_limit",
            stop_reason=self.stop_reason or "completed",
            peak_allocated_gib=peak_allocated_gib(self.ranks.device),
            held_out_loss=self.held_out_loss,
            skipped_updates=self.skipped,
            ranks=self.ranks.world,
        )
        if self.ranks.main:
            encoded = msgspec.json.format(msgspec.json.encode(summary), indent=1)
            write_bytes(self.output / "summary.json", encoded + b"\n")
        return summary


class Writers:
    """Metrics file, tracker and progress line of the main rank; silent on the others."""

    def __init__(self, config: Config, ranks: Ranks, first_step: int, global_batch: int) -> None:
        self.active = ranks.main
        if not self.active:
            return
        output = Path(config.output)
        output.mkdir(parents=True, exist_ok=True)
        self.file = MetricsFile(output / "metrics.jsonl", first_step)
        self.tracker = Tracker(config.training.tracker, output, msgspec.to_builtins(config), first_step)
        self.progress = Progress(config.training.steps, first_step, global_batch)

    def metrics(self, record: dict[str, Any]) -> None:
        if self.active:
            self.file.write(record)
            self.tracker.write(record)
            self.progress.show(record)

    def evaluation(self, result: dict[str, Any], step: int) -> None:
        """A result of `Evaluations`, which came while training was at `step`."""
        self.progress.note(describe(result))
        if "success_rate" in result:
            self.tracker.write({"step": step, "success_rate": result["success_rate"], "success_step": result["step"]})

    def close(self) -> None:
        if self.active:
            self.progress.close()
            self.tracker.close()
            self.file.close()
