"""The real simulator: repeatable episodes, frames as they were, and actions that survive the processors."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dataio.encode import decode_image
from somaspeed.actor import Actor
from somaspeed.policies.features import statistics_tensors
from somaspeed.policies.pi05.policy import processors
from somaspeed.sim.pool import Pool, PoolError, simulator_command
from somaspeed.sim.protocol import RENDERINGS, Act, Begin, Collect, Episode, Finished, Frames, Observation, Render
from somaspeed.train import main as train
from tests.conftest import ROOT, SIMULATOR
from tests.somaspeed.cases import loaded_policy, tiny_config

pytestmark = pytest.mark.sim
COLLECT = Collect(task=0, init=3, seed=11, noise=0.5)
PATIENCE = 5  # control steps


class Ask:
    """A job that asks one thing after the other, of one process."""

    task = 0

    def __init__(self, *requests) -> None:
        self.requests = requests

    def converse(self):
        replies = []
        for request in self.requests:
            replies.append((yield request))
        return replies


@pytest.fixture(scope="module")
def simulator():
    assert SIMULATOR.exists()
    said: list[str] = []
    with Pool(simulator_command("libero_spatial"), 1, said.append) as pool:
        yield pool
    assert not said


def ask(pool: Pool, *requests) -> list:
    ((_, replies),) = pool.run([Ask(*requests)], Ask.converse)
    return replies


@pytest.fixture(scope="module")
def episode(simulator) -> Episode:
    (reply,) = ask(simulator, COLLECT)
    assert isinstance(reply, Episode) and reply.success
    return reply


def begin(max_steps: int) -> Begin:
    return Begin(COLLECT.task, COLLECT.init, COLLECT.seed, max_steps)


def test_the_suite_is_libero_spatial(simulator):
    ready = simulator.greeting()
    assert len(ready.tasks) == 10 and {task.inits for task in ready.tasks} == {50}
    assert ready.versions["mujoco"] == "3.3.7"


def test_a_misspelt_suite_is_answered_with_the_closest(tmp_path):
    with (
        pytest.raises(PoolError, match="did you mean libero_spatial"),
        Pool(simulator_command("libero_spatail"), 1, print) as p,
    ):
        p.greeting()


def test_an_episode_repeats_bit_for_bit_after_another_one(simulator, episode):
    other, again = ask(simulator, Collect(0, 4, 12, 0.5), COLLECT)
    assert np.array_equal(again.action, episode.action) and np.array_equal(again.states, episode.states)
    assert other.action.shape != episode.action.shape or not np.array_equal(other.action, episode.action)


def test_recorded_actions_succeed_again_in_exactly_as_many_steps(simulator, episode):
    steps = len(episode.action)
    first, *_, last = ask(simulator, begin(steps), Act(episode.action[:10]), Act(episode.action[10:]))
    assert isinstance(first, Observation) and np.array_equal(first.state, episode.state[0])
    assert last == Finished(True, steps), "the last allowed step counts"
    *_, short = ask(simulator, begin(steps - 1), Act(episode.action))
    assert short == Finished(False, steps - 1)


@pytest.mark.parametrize("task", range(10))
def test_the_round_trip_through_a_checkpoints_processors_loses_nothing(simulator, task, sample):
    (episode,) = ask(simulator, Collect(task, init=3, seed=11, noise=0.5))
    assert episode.success
    policy = loaded_policy(tiny_config(), sample)
    pre, post = processors(policy.lerobot_config, statistics_tensors(sample.manifest), policy.tokenizer)
    normalised = pre(
        {
            "observation.state": torch.from_numpy(episode.state.copy()),
            "action": torch.from_numpy(episode.action.copy()),
            "task": ["pick up the black bowl"] * len(episode.action),
        }
    )["action"]
    actions = post(normalised).numpy()
    assert np.abs(actions - episode.action).max() < 1e-5
    # Rounded actions touch the bowl a little differently, so that it may come to rest a few steps later.
    patient = np.concatenate([actions, np.repeat(actions[-1:], PATIENCE, axis=0)])
    *_, end = ask(simulator, Begin(task, 3, 11, len(patient)), Act(patient))
    assert isinstance(end, Finished) and end.success
    mirrored = actions * np.array([1, 1, 1, 1, 1, 1, -1], np.float32)
    *_, end = ask(simulator, Begin(task, 3, 11, len(actions)), Act(mirrored))
    assert isinstance(end, Finished) and not end.success, "a wrong gripper fails"


def test_frames_rendered_afterwards_are_those_that_were_seen(simulator, episode):
    seen, frames = ask(simulator, begin(200), Render(0, COLLECT.seed, episode.states[:1]))
    assert isinstance(seen, Observation) and isinstance(frames, Frames)
    for name, image in seen.images.items():
        later = np.asarray(Image.open(io.BytesIO(frames.images[name][0]))).astype(int)
        assert later.shape == (256, 256, 3) and image.std() > 10
        assert np.abs(later - image).mean() < 0.2, "a fifth of a grey level: half a millisecond of motion"
        assert np.abs(later[::-1] - image).mean() > 5, "and not upside down"


def test_frames_rendered_by_another_process_are_the_same(simulator, episode):
    """Cabinet and stove stand where the episode's seed puts them, and they are not in the simulator's state."""
    request = Render(COLLECT.task, COLLECT.seed, episode.states[-1:])
    (here,) = ask(simulator, request)
    with Pool(simulator_command("libero_spatial"), 1, print) as pool:
        other, there = ask(pool, Render(COLLECT.task, COLLECT.seed + 1, episode.states[-1:]), request)
    assert isinstance(here, Frames) and here == there
    assert other.images["image"] != there.images["image"]


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_frames_are_the_same_after_another_task(rendering, episode):
    """Each scene has a rendering context of its own; one that is freed late takes the next one's with it."""
    requests = Render(0, 1, episode.states[:1]), Collect(1, 0, 1, 0.5)
    with Pool(simulator_command("libero_spatial", rendering), 1, print) as pool:
        first, other = ask(pool, *requests)
        second, again = ask(pool, Render(1, 1, other.states[-1:]), requests[0])
    assert again == first
    for name, (image,) in second.images.items():
        picture = decode_image(image).astype(int)
        assert np.abs(np.diff(picture, axis=0)).mean() < 12, (name, "a picture is smooth, noise is not")


def test_fast_rendering_leaves_out_little(simulator, episode):
    request = Render(COLLECT.task, COLLECT.seed, episode.states[::40])
    (full,) = ask(simulator, request)
    with Pool(simulator_command("libero_spatial", "fast"), 1, print) as pool:
        fast, played = ask(pool, request, COLLECT)
        assert pool.greeting().rendering == "fast" and simulator.greeting().rendering == "full"
    for name in full.images:
        for one, other in zip(full.images[name], fast.images[name], strict=True):
            apart = np.abs(decode_image(one).astype(int) - decode_image(other)).mean()
            assert 0 < apart < 4, (name, apart)
    assert np.array_equal(played.states, episode.states), "rendering touches nothing"


@pytest.mark.parametrize("at", [0, 50])
def test_what_is_left_undrawn_is_not_seen(at, episode):
    """Full rendering gives the simulator's own pixels."""
    script = f"""
import mujoco, sys, numpy as np
from somaspeed.sim import libero, protocol
scene = libero.Suite("libero_spatial").scene({COLLECT.task})
scene.furnish({COLLECT.seed})
scene.restore(np.frombuffer(sys.stdin.buffer.read()))
for name, camera in libero.CAMERAS.items():
    ours = scene.images()[name]
    scene._env.sim._render_context_offscreen.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 1
    print(np.array_equal(ours, scene._env.sim.render(camera_name=camera, width=256, height=256)[::-1, ::-1]))
"""
    done = subprocess.run([SIMULATOR, "-c", script], input=episode.states[at].tobytes(), capture_output=True)
    assert done.stdout.split() == [b"True", b"True"], done.stderr.decode()


def test_frames_look_like_the_shipped_sample(simulator, sample, tmp_path):
    """The orientation of the training data: rotated by 180° against the simulator's raw image."""
    language = simulator.greeting().tasks[0].language
    task = sample.manifest.tasks.index(language)
    row = int(np.flatnonzero((sample.task == task) & (sample.frame == 0))[0])
    (seen,) = ask(simulator, Begin(0, 0, 0, 10))
    for name in ("image", "image2"):
        stored = decode_image(sample.encoded(row, name).tobytes()).astype(int)
        here = seen.images[name].astype(int)
        apart = np.abs(stored - here).mean()
        turned = [np.abs(stored - view).mean() for view in (here[::-1], here[:, ::-1], here[::-1, ::-1])]
        assert apart < 0.7 * min(turned), (name, apart, turned)


def test_a_task_that_is_not_there_is_named(simulator):
    said: list[str] = []
    with Pool(simulator_command("libero_spatial"), 1, said.append) as pool, pytest.raises(PoolError, match="0 to 9"):
        ask(pool, Begin(77, 0, 0, 10))
    assert len(said) == 2


def test_the_environments_stay_apart():
    """The simulator brings another OpenCV and another numpy; neither may reach the training environment."""
    assert not list(Path(torch.__file__).parents[1].glob("libero*"))
    assert not list((SIMULATOR.parents[1] / "lib").glob("python*/site-packages/torch"))


def test_lerobots_own_environment_accepts_the_checkpoint_and_acts_alike(simulator, sample_dir, tmp_path):
    """The first action of LeRobot's own rollout is that of ours, and both environments show the same."""
    config = str(ROOT / "configs" / "pi05" / "somaspeed-tiny.toml")
    short = ["training.steps=1", "training.microbatch=2", "training.warmup_steps=0", "data.held_out=0"]
    assert train(["--config", config, "--shards", str(sample_dir), f"output={tmp_path / 'run'}", *short]) == 0
    script = Path(__file__).with_name("lerobot_env.py")
    done = subprocess.run([sys.executable, script, str(tmp_path / "run"), "7"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    theirs = json.loads(done.stdout)
    assert theirs["language"] == simulator.greeting().tasks[0].language
    assert theirs["theirs"] == theirs["ours"] and theirs["steps"] == 12
    (seen,) = ask(simulator, Begin(0, 0, 7, 10))
    np.testing.assert_allclose(seen.state, theirs["state"], atol=1e-4)
    for name, image in theirs["images"].items():
        here = seen.images[name][::16, ::16].astype(int)
        assert np.abs(here - np.array(image)).mean() < 1, name
        assert np.abs(here[::-1] - np.array(image)).mean() > 10, "and not upside down"
    actor = Actor(tmp_path / "run", torch.device("cpu"))
    first = actor.act(seen.images, seen.state, theirs["language"], 7)[0]
    np.testing.assert_allclose(first, theirs["ours"], atol=0.02)
