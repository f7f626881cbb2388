"""LeRobot's `lerobot-train` under the stopwatch: its dataset, sampler, DataLoader, pre-processor and `update_policy`.

The upstream function runs as it is. Two names in its module are replaced for the time of the run, by functions that
mark the time and call the original: `cycle`, which yields the batches, and `update_policy`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot.scripts.lerobot_train as upstream
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.configs.default import DatasetConfig, PeftConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets import LeRobotDatasetMetadata
from lerobot.transforms import ImageTransformsConfig

from somaspeed.config import Config, ConfigError
from somaspeed.native.order import OurOrder
from somaspeed.native.stopwatch import Stopped, Stopwatch

REPOSITORY = "local/dataset"  # LeRobot wants a name; the directory is what it reads


def run(
    config: Config,
    meta: LeRobotDatasetMetadata,
    prepared: contextlib.AbstractContextManager[PreTrainedConfig],
    stopwatch: Stopwatch,
    order: str,
) -> None:
    """Train on the dataset of `meta` until the configuration's end, in the context that `prepared` gives.

    Raises ConfigError for what `lerobot-train` cannot do.
    """
    with contextlib.ExitStack() as stack:
        pipeline = pipeline_config(config, meta.root, stack.enter_context(prepared))
        for name, replacement in hooks(stopwatch).items():
            stack.enter_context(mock.patch.object(upstream, name, replacement))
        if order == "somaspeed":
            stack.enter_context(mock.patch.object(upstream, "EpisodeAwareSampler", our_order))
        stack.enter_context(contextlib.suppress(Stopped))
        upstream.train(pipeline)


def pipeline_config(config: Config, root: Path, policy: PreTrainedConfig) -> TrainPipelineConfig:
    """LeRobot's training configuration for ours. Raises ConfigError for what `lerobot-train` cannot do."""
    settings = config.training
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if config.accumulation(world) != 1:
        raise ConfigError(
            "training.global_batch: lerobot-train does not accumulate gradients; leave it out, or set it to "
            "microbatch × ranks."
        )
    return TrainPipelineConfig(
        dataset=DatasetConfig(
            repo_id=REPOSITORY,
            root=str(root),
            image_transforms=ImageTransformsConfig(enable=bool(config.model.options.get("image_augmentation"))),
        ),
        policy=policy,
        output_dir=Path(config.output) / "lerobot",
        seed=settings.seed,
        num_workers=settings.workers,
        batch_size=settings.microbatch,
        steps=settings.steps,
        save_checkpoint=settings.save_every is not None,
        save_freq=settings.save_every or settings.steps,
        env_eval_freq=0,
        rename_map={f"observation.images.{old}": f"observation.images.{new}" for old, new in config.data.map.items()},
        peft=PeftConfig() if config.model.lora else None,
    )


def hooks(stopwatch: Stopwatch) -> dict[str, Callable[..., Any]]:
    """The two replaced functions of `lerobot_train`."""
    upstream_cycle, upstream_update = upstream.cycle, upstream.update_policy

    def cycle(loader: Iterable[Any]) -> Iterator[Any]:
        batches = upstream_cycle(loader)
        while True:
            stopwatch.waiting()
            batch = next(batches)
            stopwatch.batch()
            yield batch

    @functools.wraps(upstream_update)
    def update_policy(tracker: Any, policy: Any, *arguments: Any, accelerator: Any, **settings: Any) -> Any:
        if stopwatch.step == 0:
            stopwatch.model(policy)
        stopwatch.mark("prepare")
        with marked_backward(accelerator, stopwatch):
            tracker, outputs = upstream_update(tracker, policy, *arguments, accelerator=accelerator, **settings)
        stopwatch.updated(tracker.loss.val, tracker.grad_norm.val, tracker.lr.val)
        return tracker, outputs

    return {"cycle": cycle, "update_policy": update_policy}


@contextlib.contextmanager
def marked_backward(accelerator: Any, stopwatch: Stopwatch) -> Iterator[None]:
    """Mark where `accelerator.backward` begins and ends."""
    backward = accelerator.backward

    def marked(loss: Any, **settings: Any) -> None:
        stopwatch.mark("forward")
        backward(loss, **settings)
        stopwatch.mark("backward")

    with mock.patch.object(accelerator, "backward", marked):
        yield


def our_order(_starts: Any, ends: Any, *, seed: int, **_settings: Any) -> OurOrder:
    """In place of LeRobot's sampler, with its arguments."""
    return OurOrder(int(max(ends)), seed)
