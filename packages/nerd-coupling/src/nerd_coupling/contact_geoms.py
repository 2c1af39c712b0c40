"""What the geoms of a scene are to a robot, and how an engine is made to list their contacts before they touch."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from torch import Tensor

from nerd_core import RobotSpec

__all__ = ["ContactGeoms", "contact_geoms", "list_approaching", "list_approaching_in_warp", "robot_geoms"]


@dataclass(frozen=True, kw_only=True)
class ContactGeoms:
    """What the geoms of a scene are to a robot.

    Attributes:
        link: Index of the robot's link that carries each geom, -1 where it is not the robot's, shape (ngeom,), int64.
        body: Body of each geom, shape (ngeom,), int64.
        moves: Whether each geom's body can move, shape (ngeom,), bool.
        sphere: Whether each geom is a sphere, shape (ngeom,), bool.
        root: Root body of each body, shape (nbody,), int64.
        base: The robot's base body, or None where it is fixed and the base frame is the world.
        reach: Rows with a larger gap are left out [m]; None for whatever the engine lists.
        beyond: Rows with a smaller gap are left out [m]; None for none.
        grown: How much the robot's spheres and capsules are larger than they should be [m].
        fields: Whether there is a height field, against which a sphere has a contact for each prism.
    """

    link: Tensor
    body: Tensor
    moves: Tensor
    sphere: Tensor
    root: Tensor
    base: int | None
    reach: float | None = None
    beyond: float | None = None
    grown: float = 0.0
    fields: bool = False


def contact_geoms(
    mj_model: mujoco.MjModel,
    robot: RobotSpec,
    *,
    reach: float | None = None,
    device: torch.device | str = "cpu",
) -> ContactGeoms:
    """Look a robot's links up in a compiled scene, by the names of their bodies.

    Args:
        mj_model: The scene.
        robot: The robot in it.
        reach: Rows with a larger gap are left out [m]; None for whatever the engine lists.
        device: Where the contacts will be.

    Raises:
        ValueError: If a link has no body of its name in the scene.
    """
    link_of_body = np.full(mj_model.nbody, -1)
    for index, link in enumerate(robot.bodies):
        body = mujoco.mj_name2id(mj_model, mujoco.mjtObj.mjOBJ_BODY, link.name)
        if body < 0:
            raise ValueError(f"robot {robot.name!r} has a link {link.name!r}, expected a body of that name in mj_model")
        link_of_body[body] = index
    body = np.asarray(mj_model.geom_bodyid)
    place = torch.device(device)
    return ContactGeoms(
        link=torch.tensor(link_of_body[body], device=place),
        body=torch.tensor(body, device=place).long(),
        moves=torch.tensor(mj_model.body_weldid[body] != 0, device=place),
        sphere=torch.tensor(mj_model.geom_type == mujoco.mjtGeom.mjGEOM_SPHERE, device=place),
        root=torch.tensor(np.asarray(mj_model.body_rootid), device=place).long(),
        base=int(np.flatnonzero(link_of_body == 0)[0]) if robot.floating else None,
        reach=reach,
        fields=bool((mj_model.geom_type == mujoco.mjtGeom.mjGEOM_HFIELD).any()),
    )


def robot_geoms(mj_model: mujoco.MjModel, robot: RobotSpec) -> list[int]:
    """Ids of the geoms that the robot's links carry."""
    return torch.nonzero(contact_geoms(mj_model, robot).link >= 0).flatten().tolist()


def list_approaching(mj_model: mujoco.MjModel, robot: RobotSpec, reach: float) -> None:
    """Make a compiled model list the robot's contacts up to a gap, in place, without any force from them.

    The robot's geoms get ``gap = reach``; the gap of a pair is the sum of both. In MuJoCo 3.17 the gap alone is not
    enough: its broad and middle phase drop pairs whose bounding volumes do not overlap, and know neither the gap nor
    a margin that was set after compiling. So the volumes of the robot's geoms grow by as much. A margin would push:
    forces begin where the distance is less than the margin.

    Self contacts are listed up to twice the reach; :func:`read_contacts` cuts them.

    Args:
        mj_model: The scene; its motion stays what it was.
        robot: The robot in it.
        reach: Largest gap that is listed [m].

    Raises:
        ValueError: If ``reach`` is not positive.
    """
    if not reach > 0:
        raise ValueError(f"reach is {reach}, expected a positive distance [m]")
    geoms = robot_geoms(mj_model, robot)
    mj_model.geom_gap[geoms] += reach
    mj_model.pair_gap[_robot_pairs(mj_model, geoms)] += reach
    mj_model.geom_rbound[geoms] += reach
    mj_model.geom_aabb[geoms, 3:] += reach
    for body in {int(mj_model.geom_bodyid[g]) for g in geoms}:
        first = int(mj_model.body_bvhadr[body])
        mj_model.bvh_aabb[first : first + int(mj_model.body_bvhnum[body]), 3:] += reach


def list_approaching_in_warp(warp_model: mjw.Model, mj_model: mujoco.MjModel, robot: RobotSpec, reach: float) -> None:
    """Make MuJoCo Warp list the robot's contacts up to a gap, in place, without any force from them.

    Its broad phase knows the gap, so the gap is enough. Height fields are another matter: MuJoCo Warp 3.17 looks only
    at the cells under a geom and only at prisms that reach its lowest point, so that the rows before a touch would be
    missing or of the wrong place. :class:`nerd_coupling.engine_colliders.MjWarpCollider` reads them.

    Args:
        warp_model: The scene on the device, not captured in a graph yet; one copy or one row per world.
        mj_model: The same scene on the host.
        robot: The robot in it.
        reach: Largest gap that is listed [m].

    Raises:
        ValueError: If ``reach`` is not positive or the scene has a height field.
    """
    if not reach > 0:
        raise ValueError(f"reach is {reach}, expected a positive distance [m]")
    if mj_model.nhfield:
        raise ValueError("mj_model has a height field, expected none: MuJoCo Warp lists it only where it touches")
    geoms = robot_geoms(mj_model, robot)
    wp.to_torch(warp_model.geom_gap)[:, geoms] += reach
    if mj_model.npair:
        wp.to_torch(warp_model.pair_gap)[:, _robot_pairs(mj_model, geoms)] += reach


def _robot_pairs(mj_model: mujoco.MjModel, geoms: list[int]) -> list[int]:
    """Explicit contact pairs with a geom of the robot; they have a gap of their own."""
    pairs = np.isin(mj_model.pair_geom1, geoms) | np.isin(mj_model.pair_geom2, geoms)
    return np.flatnonzero(pairs).tolist()
