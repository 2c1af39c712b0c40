"""Which coordinates of a scene belong to the robot: whole kinematic trees, the rest are objects.

The inertia matrix has one block per kinematic tree, so the robot's unconstrained acceleration depends on the robot
alone as long as no force element reaches from the robot to an object. :func:`robot_block` refuses scenes with such
an element by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

__all__ = ["RobotBlock", "robot_block"]


@dataclass(frozen=True, kw_only=True)
class RobotBlock:
    """The robot's part of a scene, everything in MuJoCo's order.

    Attributes:
        roots: Names of the robot's root bodies.
        bodies: Bodies.
        joints: Joints.
        qpos: Indices into qpos.
        dofs: Indices into qvel.
        actuators: Actuators that act on the robot.
    """

    roots: tuple[str, ...]
    bodies: tuple[int, ...]
    joints: tuple[int, ...]
    qpos: tuple[int, ...]
    dofs: tuple[int, ...]
    actuators: tuple[int, ...]

    @property
    def state_size(self) -> int:
        """Width of the robot's state, its qpos followed by its qvel."""
        return len(self.qpos) + len(self.dofs)


def robot_block(mj_model: mujoco.MjModel, robot: str | Sequence[str]) -> RobotBlock:
    """The coordinates of everything at and below the named bodies.

    Args:
        mj_model: The scene.
        robot: Name of the robot's root body, or several names.

    Raises:
        ValueError: If a name is unknown, hangs on a body that moves, or has nothing to move; if a tendon or an
            actuator connects robot and objects; if the scene has activations, actuator delays or flexes.
    """
    roots = (robot,) if isinstance(robot, str) else tuple(robot)
    bodies = _subtrees(mj_model, roots)
    dofs = np.flatnonzero(np.isin(mj_model.dof_bodyid, bodies))
    joints = np.flatnonzero(np.isin(mj_model.jnt_bodyid, bodies))
    if not len(dofs):
        raise ValueError(f"robot {', '.join(roots)}: expected at least one joint")
    _refuse_hidden_state(mj_model)
    inside = set(bodies)
    _refuse_shared_tendons(mj_model, inside)
    sizes = {0: 7, 1: 4, 2: 1, 3: 1}  # of qpos, by mjtJoint: free, ball, slide, hinge
    qpos = [int(mj_model.jnt_qposadr[j]) + k for j in joints.tolist() for k in range(sizes[int(mj_model.jnt_type[j])])]
    return RobotBlock(
        roots=roots,
        bodies=tuple(bodies),
        joints=tuple(joints.tolist()),
        qpos=tuple(qpos),
        dofs=tuple(dofs.tolist()),
        actuators=tuple(u for u in range(mj_model.nu) if _acts_on(mj_model, u, inside)),
    )


def _subtrees(mj_model: mujoco.MjModel, roots: Sequence[str]) -> list[int]:
    """Bodies at and below the roots, ascending."""
    chosen: set[int] = set()
    for name in roots:
        index = mujoco.mj_name2id(mj_model, mujoco.mjtObj.mjOBJ_BODY, name)
        if index < 1:
            known = [mj_model.body(i).name for i in range(1, mj_model.nbody) if mj_model.body_parentid[i] == 0]
            raise ValueError(f"robot is {name!r}, expected the name of a body; at the root: {', '.join(known)}")
        parent = int(mj_model.body_parentid[index])
        if mj_model.body_weldid[parent] != 0:
            raise ValueError(f"robot {name!r} hangs on {mj_model.body(parent).name!r}, which moves: name the root body")
        chosen.add(index)
    for i in range(1, mj_model.nbody):  # parents come before their children
        if int(mj_model.body_parentid[i]) in chosen:
            chosen.add(i)
    return sorted(chosen)


def _refuse_hidden_state(mj_model: mujoco.MjModel) -> None:
    """State beyond qpos and qvel would be missing from the label's input."""
    for field, what in (("na", "actuator activations"), ("nhistory", "delays"), ("nflex", "flexes")):
        count = int(getattr(mj_model, field, 0))
        if count:
            raise ValueError(f"{field} is {count}, expected 0: {what} are not part of the state")


def _refuse_shared_tendons(mj_model: mujoco.MjModel, inside: set[int]) -> None:
    for t in range(mj_model.ntendon):
        touched = _tendon_bodies(mj_model, t)
        if touched & inside and touched - inside - {0}:
            raise ValueError(f"tendon {mj_model.tendon(t).name!r} connects the robot with an object")


def _tendon_bodies(mj_model: mujoco.MjModel, tendon: int) -> set[int]:
    start = int(mj_model.tendon_adr[tendon])
    bodies: set[int] = set()
    for k in range(start, start + int(mj_model.tendon_num[tendon])):
        kind, index = int(mj_model.wrap_type[k]), int(mj_model.wrap_objid[k])
        wrap = mujoco.mjtWrap
        if kind == wrap.mjWRAP_JOINT:
            bodies.add(int(mj_model.jnt_bodyid[index]))
        elif kind == wrap.mjWRAP_SITE:
            bodies.add(int(mj_model.site_bodyid[index]))
        elif kind in (wrap.mjWRAP_SPHERE, wrap.mjWRAP_CYLINDER):
            bodies.add(int(mj_model.geom_bodyid[index]))
    return bodies


def _acts_on(mj_model: mujoco.MjModel, actuator: int, inside: set[int]) -> bool:
    """Whether an actuator acts on the robot; refuses one that acts on an object too."""
    kind = mujoco.mjtTrn(mj_model.actuator_trntype[actuator])
    first, second = (int(i) for i in mj_model.actuator_trnid[actuator])
    trn = mujoco.mjtTrn
    if kind in (trn.mjTRN_JOINT, trn.mjTRN_JOINTINPARENT):
        touched = {int(mj_model.jnt_bodyid[first])}
    elif kind == trn.mjTRN_TENDON:
        touched = _tendon_bodies(mj_model, first)
    elif kind == trn.mjTRN_SITE:
        touched = {int(mj_model.site_bodyid[i]) for i in (first, second) if i >= 0}
    else:
        name = mj_model.actuator(actuator).name
        raise ValueError(f"actuator {name!r} has transmission {kind.name}, expected joint, tendon or site")
    touched -= {0}
    if touched & inside and touched - inside:
        raise ValueError(f"actuator {mj_model.actuator(actuator).name!r} connects the robot with an object")
    return bool(touched & inside)
