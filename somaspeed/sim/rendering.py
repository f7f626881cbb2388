"""Camera images of a MuJoCo scene on the CPU, where time goes with the vertices drawn: what no pixel shows is left out.

`full` gives the pixels that the simulator itself gives. `fast` leaves out multi-sampling and mirrors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mujoco import mjtGeom, mjtRndFlag

from somaspeed.sim.protocol import Rendering

HIDDEN = 5  # a group of geometries that is not drawn
FLAT = (mjtGeom.mjGEOM_PLANE, mjtGeom.mjGEOM_BOX)  # the shapes that can mirror


class Renderer:
    """Renders robosuite's simulation `sim`, which must have its offscreen context."""

    def __init__(self, sim: Any, side: int, rendering: Rendering) -> None:
        self._sim, self._side = sim, side
        self._model, self._data = sim.model._model, sim.data._data
        self._context = sim._render_context_offscreen
        self._context.vopt.geomgroup[HIDDEN] = 0
        self._mirrors = rendering == "full"
        if rendering == "fast":
            self._model.vis.quality.offsamples = 0
            self._context._set_mujoco_context_and_buffers()

    def image(self, camera: str) -> np.ndarray:
        """uint8 [side, side, 3], as MuJoCo gives it: the bottom row first."""
        self._context.gl_ctx.make_current()
        groups = self._model.geom_group
        shown = groups.copy()
        seen = self._seen(camera)
        mirror = self._mirrors and bool((seen & self._reflecting(shown)).any())
        self._context.scn.flags[mjtRndFlag.mjRND_REFLECTION] = mirror
        if not mirror:  # a mirror shows what is behind the camera
            groups[~seen] = HIDDEN
        try:
            return self._sim.render(camera_name=camera, width=self._side, height=self._side)
        finally:
            groups[:] = shown

    def _seen(self, camera: str) -> np.ndarray:
        """bool [geometries]: whose bounding sphere reaches into the camera's pyramid of view."""
        index = self._model.camera(camera).id
        offset = self._data.geom_xpos - self._data.cam_xpos[index]
        across, up, behind = (offset @ self._data.cam_xmat[index].reshape(3, 3)).T
        half = np.deg2rad(self._model.cam_fovy[index]) / 2  # the image is square
        radius = np.where(self._model.geom_type == mjtGeom.mjGEOM_PLANE, np.inf, self._model.geom_rbound)
        seen = radius > behind
        for aside in (across, up):
            seen &= np.abs(aside) * np.cos(half) + behind * np.sin(half) < radius
        return seen

    def _reflecting(self, groups: np.ndarray) -> np.ndarray:
        """bool [geometries]: which of those that are drawn can mirror."""
        material = self._model.geom_matid
        shiny = (material >= 0) & (self._model.mat_reflectance[material] > 0)
        return shiny & np.isin(self._model.geom_type, FLAT) & self._context.vopt.geomgroup[groups].astype(bool)
