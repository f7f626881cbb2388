"""A state-based oracle for LIBERO Spatial: take the black bowl by its rim and put it on the plate.

It reads object poses from the simulator and moves the end effector with LIBERO's relative controller
(OSC_POSE, 20 Hz): six relative motions in [-1, 1], and the gripper (-1 open, 1 close). Lengths are metres.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from somaspeed.sim.rotation import about_z, matrix, rotation_vector

Phase = Literal["hover", "descend", "close", "lift", "carry", "lower", "release"]
Seen = Mapping[str, np.ndarray]

OPEN, CLOSE = -1.0, 1.0
RIM = 0.047  # of the bowl: radius at which a finger goes over it
GAIN = 14.0  # action per metre of error
DOWN = np.diag([1.0, -1.0, -1.0])  # the gripper pointing straight down
ON_COOKIE_BOX = (1.02, 1.10)  # heights of a bowl that stands among obstacles: lift it higher

# Where the rim is grasped, seen from the bowl's centre, degrees in the table's plane, best first, for each task of
# the suite: other objects leave no room for the gripper elsewhere.
SIDES: list[tuple[float, ...]] = [
    (-90, 90),
    (90, -90),
    (-90, 90),
    (-90, 90),
    (-26, 154, 169),
    (90, -90),
    (90, -90),
    (90, -90),
    (90, -90),
    (90, 0, 180),
]


class Oracle:
    """Solves one episode: `act` gives the next action for what is seen.

    `noise` scales everything that makes episodes differ (0: none): the way there, where the rim is taken and
    where the bowl is put down, and a slow wander while the arm moves freely.
    """

    def __init__(self, seen: Seen, side: float, generator: np.random.Generator, noise: float) -> None:
        bowl = seen["akita_black_bowl_1_pos"]
        low, high = ON_COOKIE_BOX
        self.phase: Phase = "hover"
        self._steps = 0
        self._clearance = 0.12 if low < bowl[2] < high else 0.08
        angle = math.radians(side)
        self._rim = RIM * np.array([math.cos(angle), math.sin(angle)])
        # Fingers open along the gripper's y axis: turn it onto the rim's radius, by less than a quarter turn.
        self._orientation = about_z(angle % math.pi - math.pi / 2) @ DOWN
        self._generator, self._noise = generator, noise
        jitter = generator.standard_normal(8) * noise
        self._detour = jitter[:3] * (0.02, 0.02, 0.03)
        self._grasp_shift = jitter[3:5] * 0.004
        self._place_shift = jitter[5:7] * 0.006
        self._hover = 0.152 + 0.02 * jitter[7]
        self._wander: np.ndarray = np.zeros(3)
        self._integral: np.ndarray = np.zeros(3)
        self._opening = 1.0

    def act(self, seen: Seen) -> np.ndarray:
        """The next action, float32 [7]."""
        self._steps += 1
        return getattr(self, f"_{self.phase}_phase")(seen).astype(np.float32)

    def lost(self, seen: Seen) -> bool:
        """Whether the bowl has slipped from the gripper."""
        apart = np.linalg.norm(seen["akita_black_bowl_1_pos"] - seen["robot0_eef_pos"])
        return self.phase in ("carry", "lower") and bool(apart > 0.11)

    def _hover_phase(self, seen: Seen) -> np.ndarray:
        hand = seen["robot0_eef_pos"]
        target = self._above_rim(seen, self._hover)
        far = np.linalg.norm((target - hand)[:2]) > 0.06
        action, turn = self._move(seen, target + self._detour * far, OPEN)
        if np.linalg.norm(target - hand) < 0.018 and turn < 0.08:
            self._enter("descend")
        return action

    def _descend_phase(self, seen: Seen) -> np.ndarray:
        hand = seen["robot0_eef_pos"]
        target = self._above_rim(seen, 0.030)
        if np.linalg.norm((target - hand)[:2]) > 0.012:
            target[2] = max(target[2], hand[2] - 0.002)  # not yet above the rim: go sideways first
        action, _ = self._move(seen, target, OPEN, limit=0.8)
        if np.linalg.norm(target - hand) < 0.008 or self._steps > 40:
            self._enter("close")
            self._held = hand.copy()
        return action

    def _close_phase(self, seen: Seen) -> np.ndarray:
        action, _ = self._move(seen, self._held, CLOSE)
        fingers = seen["robot0_gripper_qpos"]
        opening = float(fingers[0] - fingers[1])
        still = abs(opening - self._opening) < 6e-4
        self._opening = opening
        if (self._steps >= 7 and still) or self._steps >= 18:
            self._enter("lift")
            self._grasp_height = seen["robot0_eef_pos"][2]
        return action

    def _lift_phase(self, seen: Seen) -> np.ndarray:
        hand, height = seen["robot0_eef_pos"], self._travel_height(seen)
        raised = hand[2] >= self._grasp_height + self._clearance - 0.035
        over = self._over_plate(seen) if raised else hand[:2]
        action, _ = self._move(seen, np.array([*over, height]), CLOSE)
        if hand[2] > height - 0.03:
            self._enter("carry")
        return action

    def _carry_phase(self, seen: Seen) -> np.ndarray:
        hand, bowl, plate = self._places(seen)
        height = self._travel_height(seen)
        if np.linalg.norm((plate - bowl)[:2]) <= 0.12:
            height = plate[2] + max(0.05 + hand[2] - bowl[2], 0.10)
        over = self._over_plate(seen) + self._place_shift
        action, _ = self._move(seen, np.array([*over, height]), CLOSE)
        if np.linalg.norm(over - hand[:2]) < 0.012:
            self._enter("lower")
        return action

    def _lower_phase(self, seen: Seen) -> np.ndarray:
        hand, bowl, plate = self._places(seen)
        over = self._over_plate(seen) + self._place_shift / 2
        action, _ = self._move(seen, np.array([*over, plate[2] + hand[2] - bowl[2] - 0.004]), CLOSE, limit=0.5)
        if bowl[2] < plate[2] + 0.004 or self._steps > 40:
            self._enter("release")
            self._held = hand.copy()
        return action

    def _release_phase(self, seen: Seen) -> np.ndarray:
        action, _ = self._move(seen, self._held + (0, 0, 0.02 if self._steps > 4 else 0), OPEN)
        return action

    def _enter(self, phase: Phase) -> None:
        self.phase, self._steps = phase, 0
        self._integral = np.zeros(3)

    def _places(self, seen: Seen) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return seen["robot0_eef_pos"], seen["akita_black_bowl_1_pos"], seen["plate_1_pos"]

    def _above_rim(self, seen: Seen, height: float) -> np.ndarray:
        bowl = seen["akita_black_bowl_1_pos"]
        return np.array([*(bowl[:2] + self._rim + self._grasp_shift), bowl[2] + height])

    def _over_plate(self, seen: Seen) -> np.ndarray:
        """Where the hand must be, [2], so that the bowl it holds is over the plate's centre."""
        hand, bowl, plate = self._places(seen)
        return plate[:2] + (hand - bowl)[:2]

    def _travel_height(self, seen: Seen) -> float:
        return max(self._grasp_height + self._clearance, seen["plate_1_pos"][2] + 0.16)

    def _move(self, seen: Seen, target: np.ndarray, grip: float, limit: float = 1.0) -> tuple[np.ndarray, float]:
        """One step towards `target`, float64 [7], and the angle by which the hand is still turned, in radians."""
        error = target - seen["robot0_eef_pos"]
        # The controller stalls up to 2 cm short of its goal; a small integral term closes that.
        near = np.abs(error) < 0.04
        self._integral = np.where(near, np.clip(self._integral + error, -0.35, 0.35), self._integral * 0.8)
        motion = np.clip(error * GAIN + self._integral, -limit, limit)
        self._wander = 0.8 * self._wander + self._generator.standard_normal(3) * 0.06 * self._noise
        if self.phase in ("hover", "carry", "lift"):
            motion = motion + self._wander
        turn = rotation_vector(self._orientation @ matrix(seen["robot0_eef_quat"]).T)
        turning = self.phase == "hover" or np.abs(turn).max() > 0.02
        rotation = np.clip(turn * 2.0, -0.6, 0.6) if turning else np.zeros(3)
        return np.concatenate([np.clip(motion, -1, 1), rotation, [grip]]), float(np.linalg.norm(turn))
