"""An engine's collision stage as a function of the state, with the rows of :class:`nerd_contact.PrimitiveCollider`.

No time passes and no force is computed. Any shapes that the engine knows; not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from nerd_contact import ContactSet
from nerd_coupling.contact_geoms import (
    ContactGeoms,
    contact_geoms,
    list_approaching,
    list_approaching_in_warp,
    robot_geoms,
)
from nerd_coupling.engine_contacts import read_contacts
from nerd_coupling.launches import Launches, on_device
from nerd_coupling.robots import Robot, build_models
from nerd_coupling.terrain import Terrain
from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_coupling.worlds import check_state, spread_terrains

__all__ = ["MjWarpCollider", "MujocoCollider"]

_ROUND = (int(mujoco.mjtGeom.mjGEOM_SPHERE), int(mujoco.mjtGeom.mjGEOM_CAPSULE))


class MujocoCollider:
    """Rows of states from C MuJoCo, one world after the other, in float64.

    Args:
        robot: The robot.
        terrains: One terrain for all rows, or one for each of ``nworld``.
        nworld: Rows of a batch.
        margin: Rows with a larger gap are left out [m].
        max_rows: Rows kept, the deepest first.
        dtype: Of the rows.

    Raises:
        ValueError: If a number is out of range or the terrains are of another number.
    """

    def __init__(
        self,
        robot: Robot,
        terrains: Terrain | Sequence[Terrain],
        nworld: int,
        *,
        margin: float = 0.08,
        max_rows: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.robot, self.nworld, self.margin, self.max_rows = robot, nworld, margin, max_rows
        self._dtype = dtype
        each = spread_terrains(terrains, nworld)
        compiled = build_models(robot, each, num_boxes=max(1, *(len(t.boxes) for t in each)))
        for model in compiled.values():
            list_approaching(model, robot.spec, margin)
        self._models = [compiled[terrain] for terrain in each]
        self._data = [mujoco.MjData(model) for model in self._models]
        self._geoms = contact_geoms(self._models[0], robot.spec, reach=margin)

    def __call__(self, state: Tensor) -> ContactSet:
        """Rows, shape (nworld, K, ...), of states (nworld, nq + nv).

        Raises:
            ValueError: If the shape does not fit or a state is not finite.
        """
        spec = self.robot.spec
        check_state(state, self.nworld, spec.state_size)
        if not torch.isfinite(state).all():
            raise ValueError("state holds values that are not finite, expected finite ones")
        rows = state.detach().to("cpu", torch.float64).numpy()
        for model, data, row in zip(self._models, self._data, rows, strict=True):
            data.qpos[:], data.qvel[:] = row[: spec.nq], row[spec.nq :]
            data.warning.number[:] = 0
            for stage in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_comVel, mujoco.mj_collision):
                stage(model, data)
        return read_contacts(self._geoms, self._data, max_rows=self.max_rows, dtype=self._dtype)


class MjWarpCollider:
    """Rows of states from MuJoCo Warp, all worlds at once, float32, on a CPU or a CUDA device.

    Where a terrain has a height field, MuJoCo Warp 3.17 looks only at the cells under a geom and only at prisms that
    reach its lowest point, and with a margin its distances are wrong on slopes. There the stage runs twice: once as it
    is, for the rows that touch, and once with the robot's spheres and capsules thicker by the margin, which the
    distances are then made smaller by, for the rows that approach.

    Args:
        robot: The robot; over a height field its colliders must be spheres and capsules.
        terrains: One terrain for all worlds, or one per world.
        nworld: Number of worlds.
        margin: Rows with a larger gap are left out [m].
        max_rows: Rows kept, the deepest first.
        nconmax: Contacts that the engine can store per world, on average over the worlds; what finds no room counts
            as overflow.
        device: ``cpu`` or a CUDA device.

    Raises:
        ValueError: If a number is out of range, or a collider cannot be grown; the message names the geom.
    """

    def __init__(
        self,
        robot: Robot,
        terrains: Terrain | Sequence[Terrain],
        nworld: int,
        *,
        margin: float = 0.08,
        max_rows: int = 16,
        nconmax: int = 128,
        device: str = "cpu",
    ) -> None:
        if not margin > 0:
            raise ValueError(f"margin is {margin}, expected a positive distance [m]")
        self.robot, self.nworld, self.margin, self.max_rows = robot, nworld, margin, max_rows
        # These worlds never move: their Data and per-world terrains are what is wanted.
        self._worlds = MjWarpWorlds(robot, terrains, nworld, nconmax=nconmax, device=device, use_graph=False)
        model, mj_model = self._worlds.warp_model, self._worlds.mj_model
        self._fields = any(terrain.field is not None for terrain in self._worlds.terrains)
        near = 0.0 if self._fields else margin
        self._geoms = contact_geoms(mj_model, robot.spec, reach=near, device=self._worlds.device)
        if self._fields:
            self._grown = replace(self._geoms, reach=margin, grown=margin, beyond=0.0)
            self._sizes = self._thicker(robot_geoms(mj_model, robot.spec))
        else:
            list_approaching_in_warp(model, mj_model, robot.spec, margin)
        self._find = Launches(self._stages, use_graph=True)

    def __call__(self, state: Tensor) -> ContactSet:
        """Rows, shape (nworld, K, ...), of states (nworld, nq + nv).

        Raises:
            ValueError: If the shape does not fit.
        """
        spec, worlds = self.robot.spec, self._worlds
        check_state(state, self.nworld, spec.state_size)
        worlds.qpos.copy_(state[:, : spec.nq])
        worlds.qvel.copy_(state[:, spec.nq :])
        if not self._fields:
            return self._found(self._geoms)
        touching = self._found(self._geoms)
        for view, _, thick in self._sizes:
            view.copy_(thick)
        approaching = self._found(self._grown)
        for view, thin, _ in self._sizes:
            view.copy_(thin)
        both = [torch.cat(pair, 1) for pair in zip(touching[:-1], approaching[:-1], strict=True)]
        return ContactSet._make([*both, touching.count + approaching.count]).deepest(self.max_rows)

    def _found(self, geoms: ContactGeoms) -> ContactSet:
        data = self._worlds.warp_data
        wp.to_torch(data.overflow).zero_()
        with on_device(self._worlds.device):
            self._find()
        return read_contacts(geoms, data, max_rows=self.max_rows)

    def _thicker(self, geoms: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Views of the colliders' sizes and bounds, as they are, and thicker by the margin."""
        model, mj_model = self._worlds.warp_model, self._worlds.mj_model
        geoms = [g for g in geoms if mj_model.geom_contype[g] or mj_model.geom_conaffinity[g]]
        for g in geoms:
            if int(mj_model.geom_type[g]) not in _ROUND:
                raise ValueError(
                    f"geom {mj_model.geom(g).name!r} of {self.robot.name} is no sphere and no capsule, expected one: "
                    "over a height field MuJoCo Warp cannot list other shapes before they touch"
                )
        found = []
        for view in (wp.to_torch(model.geom_size), wp.to_torch(model.geom_rbound), wp.to_torch(model.geom_aabb)):
            thin, thick = view.clone(), view.clone()
            if view.dim() == 2:  # bounding radii
                thick[:, geoms] += self.margin
            elif view.dim() == 3:  # sizes, the radius first
                thick[:, geoms, 0] += self.margin
            else:  # bounding boxes, centre and half sizes
                thick[:, geoms, 1] += self.margin
            found.append((view, thin, thick))
        return found

    def _stages(self) -> None:
        model, data = self._worlds.warp_model, self._worlds.warp_data
        for stage in (mjw.kinematics, mjw.com_pos, mjw.com_vel, mjw.collision):
            stage(model, data)
