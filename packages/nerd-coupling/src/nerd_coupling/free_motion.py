"""Labels for free motion: the robot's unconstrained acceleration, and the convention that makes it reusable.

Without contacts, limits and dry friction a robot obeys

    M(q) a_free = τ(q, v, u) + passive(q, v) − bias(q, v)

with its inertia M, actuator forces τ, springs and dampers, and gravity, Coriolis and centrifugal forces in the bias.
A model of a_free is coupled to the rest of a scene by the constraint solver (``CoupledWorlds``). The same numbers
mean another motion under another integrator: one that treats damping implicitly does not step along a_free. What was
labelled, and for which integrator, therefore travels with the labels as a :class:`FreeMotionConvention`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from .robot_block import RobotBlock, robot_block

__all__ = ["FreeMotionConvention", "free_accelerations", "free_motion_convention"]

_LABEL = "qacc_smooth"
# Two compilations of one robot may differ in the last digits of an inertia.
_RELATIVE = 1e-9

# What a_free depends on. Limits, dry friction and contact parameters are left out: they are constraints, which the
# scene's own solver resolves.
_BODY = ("body_pos", "body_quat", "body_ipos", "body_iquat", "body_mass", "body_inertia", "body_gravcomp")
_JOINT = (
    "jnt_type",
    "jnt_pos",
    "jnt_axis",
    "jnt_stiffness",
    "jnt_stiffnesspoly",
    "jnt_actfrclimited",
    "jnt_actfrcrange",
    "jnt_actgravcomp",
)
# Of hinges and slides; a free or ball joint's say only where it starts.
_QPOS = ("qpos0", "qpos_spring")
_SCALAR = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
_DOF = ("dof_armature", "dof_damping", "dof_dampingpoly")
_ACTUATOR = (
    "actuator_trntype",
    "actuator_gear",
    "actuator_gaintype",
    "actuator_gainprm",
    "actuator_biastype",
    "actuator_biasprm",
    "actuator_ctrllimited",
    "actuator_ctrlrange",
    "actuator_forcelimited",
    "actuator_forcerange",
    "actuator_damping",
    "actuator_dampingpoly",
    "actuator_armature",
)
_TENDON = ("tendon_stiffness", "tendon_damping", "tendon_armature", "tendon_lengthspring", "tendon_actfrcrange")
_OPTION = ("gravity", "wind", "density", "viscosity", "disableactuator")
# Flags that leave a force out of the label.
_FORCE_FLAGS = ("SPRING", "DAMPER", "GRAVITY", "CLAMPCTRL", "ACTUATION")


@dataclass(frozen=True, kw_only=True)
class FreeMotionConvention:
    """What acceleration labels mean; JSON values, to be stored with a dataset and a model.

    Attributes:
        label: ``qacc_smooth``: the acceleration without constraints at the state from which a physics step starts,
            with actuator, passive and bias forces, without external forces.
        joints: The robot's joints in the order of the label.
        timestep: Physics time step [s].
        integrator: The engine's integrator.
        implicit: Terms that this integrator treats implicitly; empty if it steps along the acceleration itself.
        disabled: Forces that the engine leaves out.
        options: Gravity [m/s²] and other surroundings that act without contact.
        dynamics: Masses, inertias, joints, actuators: everything about the robot that the label depends on.
    """

    label: str = _LABEL
    joints: tuple[str, ...]
    timestep: float
    integrator: str
    implicit: tuple[str, ...]
    disabled: tuple[str, ...]
    options: dict[str, Any]
    dynamics: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The convention as plain JSON values."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    @staticmethod
    def from_json(data: dict[str, Any]) -> FreeMotionConvention:
        """Rebuild a convention from :meth:`to_json`.

        Raises:
            ValueError: If a field is missing or unknown.
        """
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        try:
            return FreeMotionConvention(**fields)
        except TypeError as error:
            raise ValueError(f"free-motion convention is not readable: {error}") from None

    def differences(self, other: FreeMotionConvention) -> list[str]:
        """Every entry in which ``other`` differs, as readable lines; empty when the labels mean the same."""
        return _differences("", self.to_json(), other.to_json())

    def check(self, other: FreeMotionConvention) -> None:
        """Refuse labels of another convention.

        Raises:
            ValueError: If anything differs; the message lists every difference.
        """
        lines = self.differences(other)
        if lines:
            raise ValueError("free-motion convention differs: " + "; ".join(lines))


def free_motion_convention(mj_model: mujoco.MjModel, robot: str | Sequence[str]) -> FreeMotionConvention:
    """What the unconstrained acceleration of a robot means in this scene.

    Objects, their number and their masses are no part of it.

    Args:
        mj_model: The scene.
        robot: Name of the robot's root body, or several names.

    Raises:
        ValueError: If the robot's motion cannot be separated from the rest, see ``robot_block``.
    """
    block = robot_block(mj_model, robot)
    option = mj_model.opt
    return FreeMotionConvention(
        joints=tuple(mj_model.joint(j).name for j in block.joints),
        timestep=float(option.timestep),
        integrator=mujoco.mjtIntegrator(option.integrator).name.removeprefix("mjINT_"),
        implicit=implicit_terms(mj_model, block),
        disabled=tuple(name for name in _FORCE_FLAGS if _disabled(mj_model, name)),
        options={name: np.asarray(getattr(option, name)).tolist() for name in _OPTION},
        dynamics=_dynamics(mj_model, block),
    )


def free_accelerations(mj_model: mujoco.MjModel, robot: str | Sequence[str], state: Tensor, control: Tensor) -> Tensor:
    """Unconstrained accelerations of the robot from C MuJoCo, in float64.

    Args:
        mj_model: The scene; objects in it make no difference.
        robot: Name of the robot's root body, or several names.
        state: The robot's qpos and qvel, shape (N, nq + nv) of the robot [m, rad, m/s, rad/s], world frame.
        control: Controls of the whole scene, shape (N, nu), clipped to their range by MuJoCo.

    Returns:
        qacc_smooth of the robot's coordinates, shape (N, nv) float64 on the CPU [m/s², rad/s²].

    Raises:
        ValueError: If a shape does not fit, or the robot cannot be separated from the rest, see ``robot_block``.
    """
    block = robot_block(mj_model, robot)
    for name, value, width in (("state", state, block.state_size), ("control", control, mj_model.nu)):
        expected = (state.shape[0], width)
        if tuple(value.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {expected}")
    alone = copy.copy(mj_model)
    # Constraints come after this acceleration and do not change it.
    alone.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONSTRAINT | mujoco.mjtDisableBit.mjDSBL_CONTACT
    data = mujoco.MjData(alone)
    rows = state.detach().to("cpu", torch.float64).numpy()
    controls = control.detach().to("cpu", torch.float64).numpy()
    qpos, dofs = list(block.qpos), list(block.dofs)
    label = np.empty((len(rows), len(dofs)))
    for i, row in enumerate(rows):
        data.qpos[qpos], data.qvel[dofs] = row[: len(qpos)], row[len(qpos) :]
        data.ctrl[:] = controls[i]
        mujoco.mj_forward(alone, data)
        label[i] = data.qacc_smooth[dofs]
    return torch.from_numpy(label)


def implicit_terms(mj_model: mujoco.MjModel, block: RobotBlock | None = None) -> tuple[str, ...]:
    """Forces that the scene's integrator treats implicitly, of the robot or of the whole scene.

    Source: MuJoCo's documentation of its integrators. Euler treats joint damping implicitly unless the flag
    ``eulerdamp`` or ``damper`` disables it; ``implicitfast`` damping and actuators; ``implicit`` Coriolis and
    centrifugal forces too.
    """
    dofs = list(range(mj_model.nv)) if block is None else list(block.dofs)
    actuators = list(range(mj_model.nu)) if block is None else list(block.actuators)
    damped = any(
        np.any(getattr(mj_model, field)[rows])
        for field, rows in (
            ("dof_damping", dofs),
            ("dof_dampingpoly", dofs),
            ("actuator_damping", actuators),
            ("actuator_dampingpoly", actuators),
        )
    )
    damped = damped and not _disabled(mj_model, "DAMPER")
    integrator, kind = mujoco.mjtIntegrator(mj_model.opt.integrator), mujoco.mjtIntegrator
    if integrator == kind.mjINT_RK4:
        return ()
    if integrator == kind.mjINT_EULER:
        return ("joint damping",) if damped and not _disabled(mj_model, "EULERDAMP") else ()
    terms = ("joint damping",) if damped else ()
    terms += ("actuators",) if actuators and not _disabled(mj_model, "ACTUATION") else ()
    return (*terms, "bias") if integrator == kind.mjINT_IMPLICIT else terms


def _disabled(mj_model: mujoco.MjModel, flag: str) -> bool:
    return bool(mj_model.opt.disableflags & getattr(mujoco.mjtDisableBit, f"mjDSBL_{flag}"))


def _dynamics(mj_model: mujoco.MjModel, block: RobotBlock) -> dict[str, Any]:
    """The robot's rows of every array that a_free depends on."""
    rows = (
        (_BODY, block.bodies),
        (_JOINT, block.joints),
        (_QPOS, [int(mj_model.jnt_qposadr[j]) for j in block.joints if mj_model.jnt_type[j] in _SCALAR]),
        (_DOF, block.dofs),
        (_ACTUATOR, block.actuators),
        (_TENDON, range(mj_model.ntendon)),
    )
    found = {
        field: getattr(mj_model, field)[list(index)].tolist() for fields, index in rows for field in fields if index
    }
    index = {body: i for i, body in enumerate(block.bodies)}
    found["parents"] = [index.get(int(mj_model.body_parentid[body]), -1) for body in block.bodies]
    for i, body in enumerate(block.bodies):
        first = int(mj_model.body_jntadr[body])
        if found["parents"][i] < 0:
            # Gravity is the same everywhere: where a base stands makes no difference.
            found["body_pos"][i] = [0.0, 0.0, 0.0]
        if first >= 0 and mj_model.jnt_type[first] == mujoco.mjtJoint.mjJNT_FREE:
            found["body_quat"][i] = [1.0, 0.0, 0.0, 0.0]
    return found


def _differences(path: str, here: Any, there: Any) -> list[str]:
    if isinstance(here, dict) and isinstance(there, dict):
        keys = dict.fromkeys((*here, *there))
        nested = [_differences(f"{path}.{k}".lstrip("."), here.get(k), there.get(k)) for k in keys]
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        nested = [_differences(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(here, there, strict=True))]
    else:
        return [] if _same(here, there) else [f"{path}: {here} here, {there} there"]
    return [line for lines in nested for line in lines]


def _same(here: Any, there: Any) -> bool:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (here, there))
    return math.isclose(here, there, rel_tol=_RELATIVE, abs_tol=1e-15) if numbers else here == there
