"""Descriptions read from a compiled MuJoCo model: the RobotSpec, the probes and the marked points."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import mujoco
import numpy as np

from nerd_contact import Probe
from nerd_core.robot import Body, Joint, RobotSpec

__all__ = ["Point", "probes", "robot_spec"]

# Largest distance between neighbouring probes on a capsule [m].
_PROBE_SPACING = 0.07
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
) -> RobotSpec:
    """Read a RobotSpec from a compiled model, ground bodies left out.

    Gains come from the actuators' gain and bias parameters, effort limits from their force range.

    Args:
        mj_model: The robot, with or without ground from ``build_model``.
        name: Name to record.
        substeps: Physics steps per model step.
        control: ``position`` for position servos, ``effort`` for plain motors.

    Raises:
        ValueError: If the model holds something a RobotSpec cannot express (equality constraints,
            tendons, ball joints, geared or unlimited actuators ...); the message names the element.
    """
    _refuse_unsupported(mj_model)
    _refuse_actuators(mj_model, control)
    ids = _robot_bodies(mj_model)
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
    movable = [j for j in range(mj_model.njnt) if mj_model.jnt_type[j] != free]
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
        floating=bool(mj_model.njnt and mj_model.jnt_type[0] == free),
        bodies=bodies,
        joints=joints,
        control=control,
        actuated=tuple(movable.index(int(j)) for j in mj_model.actuator_trnid[:, 0]),
        ctrl_range=tuple(_tuple(r) for r in mj_model.actuator_ctrlrange),
        kp=_tuple(mj_model.actuator_gainprm[:, 0]) if position else (),
        kd=_tuple(-mj_model.actuator_biasprm[:, 2]) if position else (),
        effort_limit=_tuple(mj_model.actuator_forcerange[:, 1]),
        timestep=float(mj_model.opt.timestep),
        substeps=substeps,
    )


def probes(mj_model: mujoco.MjModel, *, spacing: float = _PROBE_SPACING) -> tuple[list[Probe], list[Point]]:
    """The robot's colliders as spheres, and its marked points.

    Every sphere geom is one probe; a capsule becomes spheres of its radius along its axis, both
    ends included.

    Args:
        mj_model: The robot, with or without ground from ``build_model``.
        spacing: Largest distance between neighbouring probes on a capsule [m].

    Returns:
        Probes in geom order, and one point per site, foot centres first, then the others.

    Raises:
        ValueError: If a collider is neither a sphere nor a capsule.
    """
    index = {body: i for i, body in enumerate(_robot_bodies(mj_model))}
    found: list[Probe] = []
    for g in range(mj_model.ngeom):
        body = index.get(int(mj_model.geom_bodyid[g]))
        if body is None or not (mj_model.geom_contype[g] or mj_model.geom_conaffinity[g]):
            continue
        geom = mj_model.geom(g)
        if geom.type == mujoco.mjtGeom.mjGEOM_SPHERE:
            offsets = [0.0]
        elif geom.type == mujoco.mjtGeom.mjGEOM_CAPSULE:
            half = float(geom.size[1])
            offsets = np.linspace(-half, half, math.ceil(2.0 * half / spacing) + 1).tolist()
        else:
            kind = mujoco.mjtGeom(int(geom.type[0])).name
            raise ValueError(f"geom {geom.name!r} is a {kind}: expected a sphere or a capsule")
        axis = np.zeros(3)
        mujoco.mju_rotVecQuat(axis, np.array([0.0, 0.0, 1.0]), geom.quat)
        for n, offset in enumerate(offsets):
            name = geom.name if len(offsets) == 1 else f"{geom.name}_{n}"
            found.append(
                Probe(
                    name=name,
                    body=body,
                    pos=_tuple(geom.pos + offset * axis),
                    radius=float(geom.size[0]),
                    friction=float(geom.friction[0]),
                )
            )
    sites = [mj_model.site(s) for s in range(mj_model.nsite)]
    points = [Point(s.name, index[int(s.bodyid[0])], _tuple(s.pos)) for s in sites if int(s.bodyid[0]) in index]
    # A foot's site is named like its geom: the centre of a probe.
    probe_names = {probe.name for probe in found}
    return found, sorted(points, key=lambda point: point.name not in probe_names)


def _is_limited(mj_model: mujoco.MjModel, joint: int) -> bool:
    return bool(mj_model.jnt_limited[joint]) and mj_model.jnt_solimp[joint, :2].max() > _SPRING_IMPEDANCE


def is_box(name: str) -> bool:
    """Whether a body of this name is a box of the terrain."""
    return name.startswith("box") and name[3:].isdecimal()


def _robot_bodies(mj_model: mujoco.MjModel) -> list[int]:
    return [i for i in range(1, mj_model.nbody) if not is_box(mj_model.body(i).name)]


def _refuse_unsupported(mj_model: mujoco.MjModel) -> None:
    """Name the first element that a RobotSpec would silently lose."""
    if mj_model.neq:
        raise ValueError(f"equality constraint {mj_model.eq(0).name!r} cannot be honoured")
    if mj_model.ntendon:
        raise ValueError(f"tendon {mj_model.tendon(0).name!r} cannot be honoured")
    for j in range(mj_model.njnt):
        kind = mujoco.mjtJoint(int(mj_model.jnt_type[j]))
        if kind == mujoco.mjtJoint.mjJNT_BALL or (kind == mujoco.mjtJoint.mjJNT_FREE and j > 0):
            raise ValueError(
                f"joint {mj_model.joint(j).name!r} is {kind.name}: expected hinge or slide joints "
                "and at most one free joint, the first"
            )


def _refuse_actuators(mj_model: mujoco.MjModel, control: str) -> None:
    """Name the first actuator that is not the plain servo or motor a RobotSpec describes."""
    hinge_or_slide = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
    for a in range(mj_model.nu):
        name = mj_model.actuator(a).name
        gain, bias = mj_model.actuator_gainprm[a], mj_model.actuator_biasprm[a]
        if mj_model.actuator_trntype[a] != mujoco.mjtTrn.mjTRN_JOINT or (
            mujoco.mjtJoint(int(mj_model.jnt_type[mj_model.actuator_trnid[a, 0]])) not in hinge_or_slide
        ):
            raise ValueError(f"actuator {name!r} must drive a hinge or slide joint")
        if mj_model.actuator_gear[a, 0] != 1.0 or not mj_model.actuator_forcelimited[a]:
            raise ValueError(f"actuator {name!r} must have gear 1 and a force range")
        if mj_model.actuator_forcerange[a, 0] != -mj_model.actuator_forcerange[a, 1]:
            raise ValueError(f"actuator {name!r} must have a force range symmetric about zero")
        if not mj_model.actuator_ctrllimited[a]:
            raise ValueError(f"actuator {name!r} must have a control range")
        if control == "position" and (bias[0] != 0.0 or bias[1] != -gain[0]):
            raise ValueError(f"actuator {name!r} is not a position servo (bias {bias[:3]})")
        if control == "effort" and (gain[0] != 1.0 or bias.any()):
            raise ValueError(f"actuator {name!r} is not a motor with gain 1 (gain {gain[0]})")


def _tuple(values: np.ndarray) -> tuple:
    return tuple(float(v) for v in values)
