"""What a RobotSpec cannot express: found in a compiled model and refused by the name of the element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import mujoco
import numpy as np

__all__ = ["effort_range", "label", "refuse_actuators", "refuse_inertia", "refuse_unsupported"]

_FREE, _BALL = mujoco.mjtJoint.mjJNT_FREE, mujoco.mjtJoint.mjJNT_BALL
_HINGE_OR_SLIDE = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
# Published tensors are rounded: a thin plate may miss the triangle inequality by its last digit.
_ROUNDING = 1e-4


def label(name: str, index: int) -> str:
    """The element's name in quotes, or its number where it has none."""
    return repr(name) if name else f"number {index} (unnamed)"


def refuse_unsupported(mj_model: mujoco.MjModel, robot: Sequence[int], objects: Collection[int] = ()) -> None:
    """Name the first element that a RobotSpec would silently lose.

    Args:
        mj_model: The model.
        robot: Ids of the robot's bodies.
        objects: Ids of the bodies of free objects, which are no part of the robot.

    Raises:
        ValueError: If there is one.
    """
    if mj_model.neq:
        kind = mujoco.mjtEq(int(mj_model.eq_type[0])).name.removeprefix("mjEQ_").lower()
        raise ValueError(f"equality constraint {label(mj_model.eq(0).name, 0)} ({kind}) cannot be honoured")
    if mj_model.ntendon:
        raise ValueError(f"tendon {label(mj_model.tendon(0).name, 0)} cannot be honoured")
    if mj_model.nflex:
        raise ValueError(f"flex {label(mj_model.flex(0).name, 0)} cannot be honoured")
    if mj_model.nplugin:
        raise ValueError("plugin number 0 cannot be honoured")
    for body in robot:
        if mj_model.body_mocapid[body] >= 0:
            raise ValueError(f"body {label(mj_model.body(body).name, body)} is a mocap body: expected a link")
    _refuse_joints(mj_model, robot, objects)
    roots = [b for b in robot if mj_model.body_parentid[b] == 0]
    if len(roots) > 1 and mj_model.njnt and mj_model.jnt_type[0] == _FREE:
        name = label(mj_model.body(roots[1]).name, roots[1])
        raise ValueError(f"body {name} is a second tree beside a floating robot: expected one tree")


def _refuse_joints(mj_model: mujoco.MjModel, robot: Sequence[int], objects: Collection[int]) -> None:
    for j in range(mj_model.njnt):
        if int(mj_model.jnt_bodyid[j]) in objects:
            continue
        kind = mujoco.mjtJoint(int(mj_model.jnt_type[j]))
        name = label(mj_model.joint(j).name, j)
        if kind == _BALL or (kind == _FREE and j > 0):
            raise ValueError(
                f"joint {name} is {kind.name}: expected hinge or slide joints and at most one free joint, the first"
            )
        zero = float(mj_model.qpos0[mj_model.jnt_qposadr[j]])
        if kind in _HINGE_OR_SLIDE and zero != 0.0:
            raise ValueError(f"joint {name} has ref {zero:g}: expected 0, where the links' frames are given")
    count = Counter(int(b) for b in mj_model.jnt_bodyid)
    for body in robot:
        if count[body] > 1:
            name = label(mj_model.body(body).name, body)
            raise ValueError(f"body {name} has {count[body]} joints: expected at most one per link")


def refuse_actuators(mj_model: mujoco.MjModel, control: str) -> None:
    """Name the first actuator that is not the plain servo or motor a RobotSpec describes.

    Args:
        mj_model: The model.
        control: ``position`` or ``effort``.

    Raises:
        ValueError: If there is one.
    """
    driven = Counter(int(j) for j in mj_model.actuator_trnid[:, 0])
    for a in range(mj_model.nu):
        name = label(mj_model.actuator(a).name, a)
        gain, bias = mj_model.actuator_gainprm[a], mj_model.actuator_biasprm[a]
        if mj_model.actuator_trntype[a] != mujoco.mjtTrn.mjTRN_JOINT or (
            mujoco.mjtJoint(int(mj_model.jnt_type[mj_model.actuator_trnid[a, 0]])) not in _HINGE_OR_SLIDE
        ):
            raise ValueError(f"actuator {name} must drive a hinge or slide joint")
        joint = int(mj_model.actuator_trnid[a, 0])
        if driven[joint] > 1:
            raise ValueError(f"actuator {name} shares joint {mj_model.joint(joint).name!r}: expected one per joint")
        if mj_model.actuator_dyntype[a] != mujoco.mjtDyn.mjDYN_NONE:
            raise ValueError(f"actuator {name} has a state of its own: expected one without dynamics")
        if mj_model.actuator_gear[a, 0] != 1.0 or not (
            mj_model.actuator_forcelimited[a] or mj_model.jnt_actfrclimited[joint]
        ):
            raise ValueError(f"actuator {name} must have gear 1 and a force range")
        low, high = effort_range(mj_model, a)
        if low != -high:
            raise ValueError(f"actuator {name} must have a force range symmetric about zero")
        if not mj_model.actuator_ctrllimited[a]:
            raise ValueError(f"actuator {name} must have a control range")
        if control == "position" and (bias[0] != 0.0 or bias[1] != -gain[0]):
            raise ValueError(f"actuator {name} is not a position servo (bias {bias[:3]})")
        if control == "effort" and (gain[0] != 1.0 or bias.any()):
            raise ValueError(f"actuator {name} is not a motor with gain 1 (gain {gain[0]})")


def effort_range(mj_model: mujoco.MjModel, actuator: int) -> tuple[float, float]:
    """Least and largest effort [N m or N] of an actuator of gear 1 that has its joint to itself.

    The tighter one of the actuator's force range and of the joint's range for the forces of all its actuators.
    """
    joint = int(mj_model.actuator_trnid[actuator, 0])
    ranges = []
    if mj_model.actuator_forcelimited[actuator]:
        ranges.append(mj_model.actuator_forcerange[actuator])
    if mj_model.jnt_actfrclimited[joint]:
        ranges.append(mj_model.jnt_actfrcrange[joint])
    low, high = np.array(ranges).T
    return float(low.max()), float(high.min())


def refuse_inertia(body: str, mass: float, inertia: np.ndarray) -> None:
    """Refuse what no distribution of mass has; zero mass and inertia, a bare frame, are left to the compiler.

    A rigid body's principal moments are positive (a point or a line of mass is no link), and none of them is larger
    than the sum of the other two.

    Args:
        body: Name of the link, for the message.
        mass: Mass [kg].
        inertia: Inertia about the centre of mass [kg m²]: shape (3, 3), any axes.

    Raises:
        ValueError: If there is such a value.
    """
    if not (np.isfinite(mass) and np.isfinite(inertia).all()):
        raise ValueError(f"body {body!r}: mass {mass:g} or inertia is not finite")
    if mass < 0.0:
        raise ValueError(f"body {body!r}: mass is {mass:g} kg, expected a positive mass")
    if mass == 0.0 and not inertia.any():
        return
    moments = np.linalg.eigvalsh(inertia)
    shown = ", ".join(f"{m:.3g}" for m in moments)
    if moments[0] <= 1e-9 * moments[2]:
        raise ValueError(f"body {body!r}: principal moments of inertia are {shown} kg m², expected positive ones")
    if moments[2] > (moments[0] + moments[1]) * (1.0 + _ROUNDING):
        raise ValueError(
            f"body {body!r}: principal moments of inertia are {shown} kg m², expected none larger than the sum of "
            "the other two (the triangle inequality)"
        )
