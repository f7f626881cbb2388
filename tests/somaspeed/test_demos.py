"""Demonstrations: the oracle's way through a world of moving points, and the dataset that comes of its episodes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.processor.env_processor import LiberoProcessorStep
from scipy.spatial.transform import Rotation

from dataio.manifest import DataError
from somaspeed.arguments import task_list
from somaspeed.demos import RECORD, make_demos
from somaspeed.sim.oracle import Oracle
from somaspeed.sim.pool import Pool
from somaspeed.sim.rotation import about_z, axis_angle, matrix, rotation_vector
from tests.conftest import ROOT

COMMAND = [sys.executable, str(ROOT / "tests" / "somaspeed" / "fake_sim.py")]


class Table:
    """Poses without physics: the hand goes where it is told, and takes the bowl along once it has closed on its rim."""

    def __init__(self, slippery: bool = False) -> None:
        self.hand, self.turn = np.array([-0.2, 0.0, 1.15]), Rotation.from_matrix(np.diag([1.0, -1.0, -1.0]))
        self.bowl, self.plate = np.array([-0.05, 0.2, 0.90]), np.array([0.06, -0.1, 0.90])
        self.opening, self.slippery = 0.08, slippery

    def seen(self) -> dict[str, np.ndarray]:
        return {
            "robot0_eef_pos": self.hand.copy(),
            "robot0_eef_quat": self.turn.as_quat(),
            "robot0_gripper_qpos": np.array([self.opening / 2, -self.opening / 2]),
            "akita_black_bowl_1_pos": self.bowl.copy(),
            "plate_1_pos": self.plate.copy(),
        }

    def step(self, action: np.ndarray) -> bool:
        motion = action[:3] * 0.02
        rim = np.linalg.norm((self.hand - self.bowl)[:2])
        held = self.opening < 0.02 and 0.03 < rim < 0.06 and abs(self.hand[2] - self.bowl[2]) < 0.05
        if held and not (self.slippery and self.bowl[2] > 0.95):
            self.bowl = self.bowl + motion
        self.hand = self.hand + motion
        self.turn = Rotation.from_rotvec(action[3:6] * 0.3) * self.turn
        self.opening = np.clip(self.opening - 0.01 * action[6], 0.0, 0.08)
        return bool(np.linalg.norm((self.bowl - self.plate)[:2]) < 0.02 and self.bowl[2] < 0.905)


def drive(table: Table, oracle: Oracle) -> tuple[bool, list[np.ndarray], set[str]]:
    """Whether it was solved, the actions, and the phases on the way."""
    actions, phases = [], set()
    for _ in range(220):
        actions.append(oracle.act(table.seen()))
        phases.add(oracle.phase)
        if table.step(actions[-1]):
            return True, actions, phases
        if oracle.lost(table.seen()):
            break
    return False, actions, phases


@pytest.mark.parametrize("side", [-90, 90, 169])
def test_the_oracle_brings_the_bowl_to_the_plate(side):
    table = Table()
    solved, actions, phases = drive(table, Oracle(table.seen(), side, np.random.default_rng(0), noise=0.5))
    assert solved and {"descend", "close", "lift", "carry"} <= phases
    assert all(action.dtype == np.float32 and np.abs(action).max() <= 1 for action in actions)
    assert {float(action[6]) for action in actions} == {-1.0, 1.0}


def test_noise_makes_episodes_differ_and_its_seed_makes_them_again():
    def actions(seed: int, noise: float) -> np.ndarray:
        table = Table()
        return np.stack(drive(table, Oracle(table.seen(), -90, np.random.default_rng(seed), noise))[1][:30])

    assert np.array_equal(actions(0, 0.5), actions(0, 0.5)) and not np.array_equal(actions(0, 0.5), actions(1, 0.5))
    assert np.array_equal(actions(0, 0.0), actions(1, 0.0))


def test_the_oracle_notices_a_lost_bowl():
    table = Table(slippery=True)
    oracle = Oracle(table.seen(), -90, np.random.default_rng(0), noise=0.0)
    solved, actions, _ = drive(table, oracle)
    assert not solved and oracle.lost(table.seen()) and len(actions) < 220


def test_rotations_agree_with_lerobot_and_scipy():
    quaternions = Rotation.random(50, np.random.default_rng(0)).as_quat(canonical=False)
    expected = LiberoProcessorStep()._quat2axisangle(torch.tensor(quaternions)).numpy()
    ours = np.stack([axis_angle(quaternion) for quaternion in quaternions])
    np.testing.assert_allclose(ours, expected, atol=2e-3)  # LeRobot computes in float32
    for quaternion in quaternions:
        scipy = Rotation.from_quat(quaternion)
        np.testing.assert_allclose(matrix(quaternion), scipy.as_matrix(), atol=1e-12)
        np.testing.assert_allclose(rotation_vector(scipy.as_matrix()), scipy.as_rotvec(), atol=1e-7)
    np.testing.assert_allclose(about_z(0.3), Rotation.from_euler("z", 0.3).as_matrix(), atol=1e-12)
    assert not rotation_vector(np.eye(3)).any() and not axis_angle(np.array([0, 0, 0, 1.0])).any()


def make(out: Path, episodes: int = 3, workers: int = 2, **changed) -> tuple:
    """The record, the stages that were reported, and what was said of dead processes."""
    stages: list[str] = []
    options = {"tasks": [0, 1], "seed": 0, "noise": 0.5, "store": "image"} | changed
    said: list[str] = []
    with Pool(COMMAND, workers, said.append) as pool:
        record = make_demos(
            out, "fake", options["tasks"], episodes, options["seed"], options["noise"], options["store"], pool,
            lambda stage, done, total, score: stages.append(stage),
        )  # fmt: skip
    return record, stages, said


def test_solved_episodes_become_a_lerobot_dataset(tmp_path):
    record, stages, _ = make(tmp_path / "demos")
    assert record.solved == {0: 2, 1: 2} and record.tried == {0: 3, 1: 3}, "initial state 1 is never solved"
    assert [(made.task, made.init) for made in record.episodes] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert stages == ["solve"] * 6 + ["render"] * 4 + ["write"] * 4
    dataset = LeRobotDataset("somaspeed/demos", root=tmp_path / "demos")
    assert (dataset.num_episodes, dataset.num_frames, dataset.fps) == (4, 3 + 5 + 3 + 5, 10)
    frame = dataset[4]  # the second frame of the second episode
    assert frame["task"] == "bring the point to the left" and frame["observation.state"].shape == (8,)
    expected = np.random.default_rng(record.episodes[1].seed).random((5, 7), np.float32)
    np.testing.assert_array_equal(frame["action"].numpy(), expected[1])
    colours = [(frame[f"observation.images.{name}"][:2, 0, 0] * 255).round().tolist() for name in ("image", "image2")]
    assert colours == [[10, 0], [10, 200]], "state 1, seen by each camera"
    assert not (tmp_path / "demos.partial").exists()


def test_the_same_command_resumes_and_another_is_refused(tmp_path, monkeypatch):
    out, work = tmp_path / "demos", tmp_path / "demos.partial"
    with monkeypatch.context() as patched:
        patched.setattr("somaspeed.demos.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(out)
    kept = {path: path.stat().st_mtime_ns for path in work.rglob("*.msgpack")}
    assert len(kept) == 6 + 4
    lost = work / "frames" / "01-0002.msgpack"
    lost.unlink()
    with pytest.raises(DataError, match="seed = 0, now it is 1"):
        make(out, seed=1)
    (work / "solved" / "00-0000.msgpack").rename(work / "aside")
    (work / "solved" / "00-0000.msgpack").write_bytes((work / "aside").read_bytes()[:50])
    with pytest.raises(DataError, match="00-0000.msgpack"):
        make(out)
    (work / "aside").rename(work / "solved" / "00-0000.msgpack")
    record, stages, _ = make(out)
    assert stages == ["render"] + ["write"] * 4 and len(record.episodes) == 4
    again, stages, _ = make(out)
    assert again == record and not stages and (out / RECORD).exists()
    with pytest.raises(DataError, match="noise = 0.5, now it is 0.1"):
        make(out, noise=0.1)
    with pytest.raises(DataError, match="tasks 0 to 1, not 4"):
        make(tmp_path / "other", tasks=[4])


def test_task_lists():
    assert task_list("all") is None and task_list("0,3") == [0, 3]
