"""transformers' Trainer under the stopwatch, with DeepSpeed ZeRO-2 where DeepSpeed is installed, else plain DDP."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lerobot.datasets import LeRobotDatasetMetadata
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from somaspeed.config import Config
from somaspeed.native.order import OurOrder
from somaspeed.native.stopwatch import Stopped, Stopwatch

WITHOUT_DEEPSPEED = "native-gr00t-hf-trainer-ddp"
BUCKET = 100_000_000  # elements; NVIDIA's recipe


class Problem(NamedTuple):
    """What the trainer trains. `inputs` turns a collated batch into what the model's forward takes."""

    model: nn.Module
    dataset: Dataset[Any]
    inputs: Callable[[dict[str, Any]], dict[str, Tensor]]


class MarkedTrainer(Trainer):
    """transformers' Trainer; every override calls the original and marks the time.

    `compute_loss` is the exception: the model returns its loss under a key, not as a `ModelOutput`.
    """

    def __init__(self, *, problem: Problem, stopwatch: Stopwatch, args: TrainingArguments, order: str) -> None:
        self.problem, self.stopwatch, self.order = problem, stopwatch, order
        self.loss: Any = 0.0
        self.norm: Any = float("nan")
        super().__init__(
            model=problem.model,
            args=args,
            train_dataset=problem.dataset,
            data_collator=default_collate,
            callbacks=[EndOfStep(self)],
        )
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, *arguments: Any, **settings: Any) -> Any:
        if self.order == "upstream":
            return super()._get_train_sampler(*arguments, **settings)
        samples = len(self.problem.dataset)  # type: ignore[arg-type]
        # One epoch as long as the run: the Trainer would begin the order again with each of its epochs.
        return OurOrder(samples, self.args.seed, self.args.max_steps * self.stopwatch.global_batch)

    def get_batch_samples(self, *arguments: Any, **settings: Any) -> Any:
        self.stopwatch.waiting()
        samples = super().get_batch_samples(*arguments, **settings)
        self.stopwatch.batch()
        return samples

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared = super()._prepare_inputs(self.problem.inputs(inputs))
        self.stopwatch.mark("prepare")
        return prepared

    def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        loss = model(inputs)["loss"]
        self.stopwatch.mark("forward")
        return loss

    def training_step(self, *arguments: Any, **settings: Any) -> Tensor:
        loss = super().training_step(*arguments, **settings)
        self.stopwatch.mark("backward")
        self.loss = self.loss + loss
        return loss

    def _get_grad_norm(self, *arguments: Any, **settings: Any) -> Any:
        self.norm = super()._get_grad_norm(*arguments, **settings)
        return self.norm


class EndOfStep(TrainerCallback):
    """Tells the stopwatch that an update is done."""

    def __init__(self, trainer: MarkedTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        loss, trainer.loss = trainer.loss, 0.0
        norm = float("nan") if trainer.norm is None else trainer.norm
        trainer.stopwatch.updated(loss, norm, trainer._get_learning_rate())


def run(
    config: Config,
    meta: LeRobotDatasetMetadata,
    prepared: contextlib.AbstractContextManager[Problem],
    stopwatch: Stopwatch,
    order: str,
) -> None:
    """Train on the dataset of `meta` until the configuration's end, in the context that `prepared` gives."""
    sharded = deepspeed_installed()
    if sharded:
        alone_as_a_group()
        if stopwatch.ranks.device.type == "cpu":
            reduce_with_gloo()
    else:
        stopwatch.backend = WITHOUT_DEEPSPEED
    with prepared as problem, contextlib.suppress(Stopped):
        stopwatch.model(problem.model)
        arguments = training_arguments(config, stopwatch, sharded)
        MarkedTrainer(problem=problem, stopwatch=stopwatch, args=arguments, order=order).train()


def deepspeed_installed() -> bool:
    """Whether the optional DeepSpeed is there."""
    return importlib.util.find_spec("deepspeed") is not None


def reduce_with_gloo() -> None:
    """On the CPU DeepSpeed would first compile a reduction of its own, for minutes; it also works without."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at the import
    operations = importlib.import_module("deepspeed.ops").__compatible_ops__
    operations["deepspeed_shm_comm"] = False


def training_arguments(config: Config, stopwatch: Stopwatch, sharded: bool) -> TrainingArguments:
    """Our configuration as the Trainer's."""
    settings = config.training
    on_cpu = stopwatch.ranks.device.type == "cpu"
    bfloat16 = (settings.precision or config.model.dtype) == "bfloat16"
    return TrainingArguments(
        output_dir=str(Path(config.output) / "trainer"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.microbatch,
        gradient_accumulation_steps=config.accumulation(stopwatch.ranks.world),
        learning_rate=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_epsilon=settings.eps,
        max_grad_norm=settings.clip_grad,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_steps,
        optim="adamw_torch",
        bf16=bfloat16,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and stopwatch.ranks.world > 1 else None,
        # DDP does not see the loss in what the model returns, and would take every parameter for unused.
        ddp_find_unused_parameters=False,
        deepspeed=zero2(bfloat16) if sharded else None,
        dataloader_num_workers=settings.workers,
        dataloader_pin_memory=not on_cpu,
        seed=settings.seed,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no" if settings.save_every is None else "steps",
        save_steps=settings.save_every or settings.steps,
        report_to=[],
        disable_tqdm=True,
    )


def zero2(bfloat16: bool) -> dict[str, Any]:
    """DeepSpeed's configuration: stage 2, with NVIDIA's bucket sizes."""
    return {
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
        },
        "bf16": {"enabled": bfloat16},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
    }


def alone_as_a_group() -> None:
    """DeepSpeed wants torchrun's variables even for one process."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
