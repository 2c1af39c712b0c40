"""Descriptions read from a compiled MuJoCo model: the RobotSpec, the probes and the marked points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import mujoco
import numpy as np

from nerd_contact import Probe
from nerd_core.robot import Body, Joint, RobotSpec
from nerd_coupling.heightfield import FIELD
from nerd_coupling.refusal import effort_range, label, refuse_actuators, refuse_unsupported

__all__ = ["Point", "probes", "robot_bodies", "robot_spec"]

# Largest distance between neighbouring probes on a capsule [m].
_PROBE_SPACING = 0.07
_RIM_POINTS = 8
# A joint limit at MuJoCo's least impedance is a spring that any force overcomes: it bounds no state.
_SPRING_IMPEDANCE = 1e-4


class Point(NamedTuple):
    """A named point on a robot.

    Attributes:
        name: Site name.
        body: Index into ``RobotSpec.bodies``.
        pos: Position in the body frame [m].
    """

    name: str
    body: int
    pos: tuple[float, float, float]


def robot_spec(
    mj_model: mujoco.MjModel,
    *,
    name: str,
    substeps: int,
    control: Literal["effort", "position"] = "position",
    objects: Sequence[str] = (),
) -> RobotSpec:
    """Read a RobotSpec from a compiled model, ground bodies and objects left out.

    Gains come from the actuators' gain and bias parameters, effort limits from their force range and that of the
    joint, whichever is tighter.

    Args:
        mj_model: The robot, with or without ground from ``build_model``.
        name: Name to record.
        substeps: Physics steps per model step.
        control: ``position`` for position servos, ``effort`` for plain motors.
        objects: Root bodies of free objects in the model; they are no part of the robot.

    Raises:
        ValueError: If the model holds something a RobotSpec cannot express (equality constraints,
            tendons, ball joints, geared or unlimited actuators ...); the message names the element.
    """
    ids = robot_bodies(mj_model, objects)
    refuse_unsupported(mj_model, ids, _object_bodies(mj_model, objects))
    refuse_actuators(mj_model, control)
    index = {body: i for i, body in enumerate(ids)}
    bodies = tuple(
        Body(
            name=mj_model.body(i).name,
            parent=index.get(int(mj_model.body_parentid[i]), -1),
            pos=_tuple(mj_model.body_pos[i]),
            quat=_tuple(mj_model.body_quat[i]),
        )
        for i in ids
    )
    free = mujoco.mjtJoint.mjJNT_FREE
    hinge = mujoco.mjtJoint.mjJNT_HINGE
    movable = [j for j in range(mj_model.njnt) if mj_model.jnt_type[j] != free and mj_model.jnt_bodyid[j] in index]
    joints = tuple(
        Joint(
            name=mj_model.joint(j).name,
            kind="hinge" if mj_model.jnt_type[j] == hinge else "slide",
            body=index[int(mj_model.jnt_bodyid[j])],
            axis=_tuple(mj_model.jnt_axis[j]),
            pos=_tuple(mj_model.jnt_pos[j]),
            range=_tuple(mj_model.jnt_range[j]) if _is_limited(mj_model, j) else None,
        )
        for j in movable
    )
    position = control == "position"
    return RobotSpec(
        name=name,
        floating=bool(mj_model.njnt and mj_model.jnt_type[0] == free and mj_model.jnt_bodyid[0] in index),
        bodies=bodies,
        joints=joints,
        control=control,
        actuated=tuple(movable.index(int(j)) for j in mj_model.actuator_trnid[:, 0]),
        ctrl_range=tuple(_tuple(r) for r in mj_model.actuator_ctrlrange),
        kp=_tuple(mj_model.actuator_gainprm[:, 0]) if position else (),
        kd=_tuple(0.0 - mj_model.actuator_biasprm[:, 2]) if position else (),
        effort_limit=tuple(effort_range(mj_model, a)[1] for a in range(mj_model.nu)),
        timestep=float(mj_model.opt.timestep),
        substeps=substeps,
    )


def probes(
    mj_model: mujoco.MjModel, *, spacing: float = _PROBE_SPACING, objects: Sequence[str] = ()
) -> tuple[list[Probe], list[Point]]:
    """The robot's colliders as spheres, and its marked points.

    Every sphere geom is one probe; a capsule becomes spheres of its radius along its axis, both
    ends included; a box becomes its eight corners and a cylinder eight points on each rim, probes without radius.
    Against a plane the corners say everything; where a face or an edge of the robot meets an edge of the terrain,
    between two of these points, nothing is seen.

    Args:
        mj_model: The robot, with or without ground from ``build_model``.
        spacing: Largest distance between neighbouring probes on a capsule [m].
        objects: Root bodies of free objects in the model; they are no part of the robot.

    Returns:
        Probes in geom order, and one point per site, foot centres first, then the others.

    Raises:
        ValueError: If a collider is none of these.
    """
    index = {body: i for i, body in enumerate(robot_bodies(mj_model, objects))}
    found: list[Probe] = []
    for g in range(mj_model.ngeom):
        body = index.get(int(mj_model.geom_bodyid[g]))
        if body is None or not (mj_model.geom_contype[g] or mj_model.geom_conaffinity[g]):
            continue
        geom = mj_model.geom(g)
        offsets, radius = _spheres(geom, spacing)
        name = geom.name or f"geom{g}"
        axes = np.zeros((3, 3))
        for row, unit in zip(axes, np.eye(3), strict=True):
            mujoco.mju_rotVecQuat(row, unit, geom.quat)
        for n, offset in enumerate(offsets):
            found.append(
                Probe(
                    name=name if len(offsets) == 1 else f"{name}_{n}",
                    body=body,
                    pos=_tuple(geom.pos + sum(x * axis for x, axis in zip(offset, axes, strict=True))),
                    radius=radius,
                    friction=float(geom.friction[0]),
                )
            )
    sites = [mj_model.site(s) for s in range(mj_model.nsite)]
    points = [Point(s.name, index[int(s.bodyid[0])], _tuple(s.pos)) for s in sites if int(s.bodyid[0]) in index]
    # A foot's site is named like its geom: the centre of a probe.
    probe_names = {probe.name for probe in found}
    return found, sorted(points, key=lambda point: point.name not in probe_names)


def _spheres(geom: Any, spacing: float) -> tuple[np.ndarray, float]:
    """Centres (n, 3) in the geom's frame [m] and radius [m] of the spheres that stand for a collider."""
    size = geom.size
    if geom.type == mujoco.mjtGeom.mjGEOM_SPHERE:
        return np.zeros((1, 3)), float(size[0])
    if geom.type == mujoco.mjtGeom.mjGEOM_CAPSULE:
        half = float(size[1])
        along = np.linspace(-half, half, math.ceil(2.0 * half / spacing) + 1)
        return along[:, None] * np.array([0.0, 0.0, 1.0]), float(size[0])
    if geom.type == mujoco.mjtGeom.mjGEOM_BOX:
        return np.array(list(itertools.product((-1.0, 1.0), repeat=3))) * size, 0.0
    if geom.type == mujoco.mjtGeom.mjGEOM_CYLINDER:
        angle = np.arange(_RIM_POINTS) * (2.0 * math.pi / _RIM_POINTS)
        rim = np.stack([np.cos(angle), np.sin(angle), np.zeros_like(angle)], -1) * size[0]
        return np.concatenate([rim + np.array([0.0, 0.0, z]) for z in (-size[1], size[1])]), 0.0
    kind = mujoco.mjtGeom(int(geom.type[0])).name
    raise ValueError(f"geom {label(geom.name, geom.id)} is a {kind}: expected a sphere, a capsule, a box or a cylinder")


def _is_limited(mj_model: mujoco.MjModel, joint: int) -> bool:
    return bool(mj_model.jnt_limited[joint]) and mj_model.jnt_solimp[joint, :2].max() > _SPRING_IMPEDANCE


def is_box(name: str) -> bool:
    """Whether a body of this name is a box of the terrain."""
    return name.startswith("box") and name[3:].isdecimal()


def robot_bodies(mj_model: mujoco.MjModel, objects: Sequence[str] = ()) -> list[int]:
    """Ids of the robot's bodies: all but the world, the terrain's boxes and height field, and the objects."""
    left_out = _object_bodies(mj_model, objects)
    names = {i: mj_model.body(i).name for i in range(1, mj_model.nbody) if i not in left_out}
    return [i for i, name in names.items() if name != FIELD and not is_box(name)]


def _object_bodies(mj_model: mujoco.MjModel, objects: Sequence[str]) -> set[int]:
    roots = {mj_model.body(name).id for name in objects}
    return {i for i in range(1, mj_model.nbody) if int(mj_model.body_rootid[i]) in roots}


def _tuple(values: np.ndarray) -> tuple:
    return tuple(float(v) for v in values)
