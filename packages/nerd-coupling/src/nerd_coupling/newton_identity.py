"""Is the robot in a Newton model the one that a network was made for? Every difference, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mujoco
import newton
import numpy as np
import torch
import warp as wp
from torch import Tensor

from nerd_core import RobotSpec
from nerd_core.rotation import quat_conjugate, quat_multiply, quat_to_matrix, rotate

from .robots import Robot

__all__ = ["Placement", "differences", "last_name", "refuse_differences", "rest_poses"]

# Newton holds float32, and importers go through degrees and Euler angles.
_TOLERANCE = 1e-4
_SHOWN = 4


def numbers(holder: Any, name: str) -> np.ndarray:
    """The values of one of Newton's arrays, on the host."""
    return getattr(holder, name).numpy()


def last_name(label: str) -> str:
    """The last part of a Newton label, which importers write as a path."""
    return label.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Which bodies and joints of a Newton model are a robot's.

    Attributes:
        links: Body of each link in each world, shape (B, links).
        joints: Joint that moves, or holds, each link, shape (B, links).
        articulations: Which articulations are the robot's, a Warp array of bool on the model's device.
    """

    links: np.ndarray
    joints: np.ndarray
    articulations: wp.array

    @classmethod
    def find(cls, model: newton.Model, spec: RobotSpec) -> Placement:
        """By the last part of the bodies' labels.

        Raises:
            ValueError: If a link is not there exactly once in each world, is not held by exactly one joint, or a body
                that is not the robot's would have to move.
        """
        if model.particle_count:
            raise ValueError(f"model has {model.particle_count} particles, expected none: the network moves a robot")
        worlds = max(1, model.world_count)
        world = np.maximum(numbers(model, "body_world"), 0) if worlds == 1 else numbers(model, "body_world")
        names = np.array([last_name(label) for label in model.body_label])
        links = np.stack([_one_per_world(names, world, worlds, body.name, spec.name) for body in spec.bodies], 1)
        child = numbers(model, "joint_child")
        joints = np.empty_like(links)
        for at in np.ndindex(*links.shape):
            holds = np.flatnonzero(child == links[at])
            if len(holds) != 1:
                raise ValueError(f"model has {len(holds)} joints that hold body {_body(model, links[at])}, expected 1")
            joints[at] = holds[0]
        others = np.setdiff1d(np.arange(model.body_count), links)
        moving = others[(numbers(model, "body_flags")[others] & newton.BodyFlags.KINEMATIC) == 0]
        if len(moving):
            raise ValueError(
                f"model has body {_body(model, moving[0])}, which is not {spec.name}'s and is not kinematic, expected "
                "none: this solver moves the robot alone (nerd_coupling.CoupledWorlds moves objects too)"
            )
        owned = np.zeros(model.articulation_count, dtype=bool)
        articulation = numbers(model, "joint_articulation")[joints]
        if (articulation < 0).any():
            raise ValueError(f"model has {spec.name}'s joints in no articulation, expected them in one per world")
        owned[articulation] = True
        strangers = np.setdiff1d(np.flatnonzero(owned[np.maximum(numbers(model, "joint_articulation"), 0)]), joints)
        if len(strangers):
            label = model.joint_label[int(strangers[0])]
            raise ValueError(f"model has joint {label!r} in {spec.name}'s articulation, expected the robot's alone")
        return cls(links=links, joints=joints, articulations=wp.array(owned, dtype=wp.bool, device=model.device))


def _one_per_world(names: np.ndarray, world: np.ndarray, worlds: int, name: str, robot: str) -> np.ndarray:
    found = np.flatnonzero(names == name)
    counts = np.bincount(world[found][world[found] >= 0], minlength=worlds)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        raise ValueError(
            f"model has {counts[wrong[0]]} bodies named {name!r} in world {wrong[0]}, expected 1: links of {robot} are "
            "found by name, and importers drop them with collapse_fixed_joints"
        )
    return found[np.argsort(world[found], kind="stable")]


def _body(model: newton.Model, index: Any) -> str:
    return repr(model.body_label[int(index)])


def rest_poses(model: newton.Model, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """Pose of each link in its parent's frame where all joints are zero.

    Returns:
        Positions [m], shape (B, links, 3), and quaternions w x y z, shape (B, links, 4). A free joint's is what its
        coordinates are relative to.
    """
    parent, child = (_transforms(numbers(model, name)[placement.joints]) for name in ("joint_X_p", "joint_X_c"))
    quat = quat_multiply(parent[1], quat_conjugate(child[1]))
    return (parent[0] - rotate(quat, child[0])).numpy(), quat.numpy()


def _transforms(values: np.ndarray) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(values.astype(np.float64))
    return rows[..., :3], rows[..., [6, 3, 4, 5]]


def refuse_differences(lines: list[str], robot: str) -> None:
    """One ValueError with the first few lines, if there are any."""
    if lines:
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise ValueError(
            f"model holds another {robot} than the network was made for: {'; '.join(lines[:_SHOWN])}{more}"
        )


def differences(model: newton.Model, robot: Robot, placement: Placement) -> list[str]:
    """Every way in which the robot in a Newton model differs from its description; empty where it is the same.

    Compared are the tree, joint axes, anchors and limits, masses, centres of mass, inertias, armature, damping and dry
    friction of the joints, gains and effort limits of its actuators, mimic joints, and gravity.
    """
    mj_model = mujoco.MjModel.from_xml_string(robot.mjcf)
    return [
        *_gravity(model, mj_model, placement),
        *_masses(model, mj_model, robot.spec, placement),
        *_tree(model, robot.spec, placement),
        *_joints(model, mj_model, robot.spec, placement),
        *_actuators(model, robot.spec, placement),
    ]


def _compare(names: list[str], what: str, unit: str, found: np.ndarray, expected: np.ndarray) -> Iterator[str]:
    """A line for each name whose values, found (B, N, ...), differ from the expected (N, ...) in any world."""
    scale = np.maximum(1e-3, np.abs(expected).reshape(len(names), -1).max(-1, initial=0.0))
    off = np.abs(found - expected).reshape(*found.shape[:2], -1).max(-1) > _TOLERANCE * scale
    for n in np.flatnonzero(off.any(0)):
        world = int(np.flatnonzero(off[:, n])[0])
        got, wanted = _words(found[world, n]), _words(expected[n])
        yield f"{names[n]}: {what} is {got} in world {world}, expected {wanted}{unit}"


def _words(value: np.ndarray) -> str:
    return np.array2string(np.asarray(value), precision=5, separator=" ", suppress_small=True).replace("\n", "")


def _gravity(model: newton.Model, mj_model: mujoco.MjModel, placement: Placement) -> Iterator[str]:
    found = numbers(model, "gravity")[: len(placement.links), None]
    yield from _compare(["world"], "gravity", " [m/s²]", found, mj_model.opt.gravity[None])


def _masses(model: newton.Model, mj_model: mujoco.MjModel, spec: RobotSpec, placement: Placement) -> Iterator[str]:
    names = [body.name for body in spec.bodies]
    ids = [mj_model.body(name).id for name in names]
    turn = quat_to_matrix(torch.from_numpy(mj_model.body_iquat[ids]))
    inertia = turn @ torch.diag_embed(torch.from_numpy(mj_model.body_inertia[ids])) @ turn.transpose(-1, -2)
    expected = (
        ("mass", " [kg]", "body_mass", mj_model.body_mass[ids]),
        ("centre of mass", " [m]", "body_com", mj_model.body_ipos[ids]),
        ("inertia", " [kg m²]", "body_inertia", inertia.numpy()),
    )
    for what, unit, array, values in expected:
        yield from _compare(names, what, unit, numbers(model, array)[placement.links], values)


def _tree(model: newton.Model, spec: RobotSpec, placement: Placement) -> Iterator[str]:
    names = [body.name for body in spec.bodies]
    parent = numbers(model, "joint_parent")[placement.joints]
    for n, body in enumerate(spec.bodies):
        expected = placement.links[:, body.parent] if body.parent >= 0 else np.full(len(parent), -1)
        if (parent[:, n] != expected).any():
            wanted = spec.bodies[body.parent].name if body.parent >= 0 else "the world"
            yield f"{body.name}: its joint's parent is another body, expected {wanted}"
    pos, quat = rest_poses(model, placement)
    wanted_pos, wanted_quat = (np.array([getattr(body, name) for body in spec.bodies]) for name in ("pos", "quat"))
    # Where the robot stands is its world's affair.
    wanted_pos[0], pos[:, 0] = 0.0, 0.0
    if spec.floating:
        wanted_quat[0] = (1.0, 0.0, 0.0, 0.0)
    quat = quat * np.sign((quat * wanted_quat).sum(-1, keepdims=True))
    yield from _compare(names, "position at rest", " [m]", pos, wanted_pos)
    yield from _compare(names, "orientation at rest (w x y z)", "", quat, wanted_quat)
    if spec.floating:
        anchor = numbers(model, "joint_X_c")[placement.joints[:, :1], :3]
        yield from _compare(names[:1], "anchor of the free joint", " [m]", anchor, np.zeros((1, 3)))


def _joints(model: newton.Model, mj_model: mujoco.MjModel, spec: RobotSpec, placement: Placement) -> Iterator[str]:
    kinds = {"hinge": newton.JointType.REVOLUTE, "slide": newton.JointType.PRISMATIC}
    expected = [newton.JointType.FIXED] * len(spec.bodies)
    if spec.floating:
        expected[0] = newton.JointType.FREE
    for joint in spec.joints:
        expected[joint.body] = kinds[joint.kind]
    found = numbers(model, "joint_type")[placement.joints]
    wrong = found != np.array([int(kind) for kind in expected])
    for n in np.flatnonzero(wrong.any(0)):
        kind = newton.JointType(int(found[np.flatnonzero(wrong[:, n])[0], n])).name
        yield f"{spec.bodies[n].name}: its joint is {kind}, expected {newton.JointType(expected[n]).name}"
    if wrong.any() or not spec.joints:
        return
    names = [joint.name for joint in spec.joints]
    joints = placement.joints[:, [joint.body for joint in spec.joints]]
    dofs = numbers(model, "joint_qd_start")[joints]
    anchor, turn = _transforms(numbers(model, "joint_X_c")[joints])
    axis = rotate(turn, torch.from_numpy(numbers(model, "joint_axis")[dofs].astype(np.float64))).numpy()
    yield from _compare(names, "axis", "", axis, np.array([joint.axis for joint in spec.joints]))
    hinge = [n for n, joint in enumerate(spec.joints) if joint.kind == "hinge"]
    if hinge:
        wanted = np.array([spec.joints[n].pos for n in hinge])
        yield from _compare([names[n] for n in hinge], "anchor", " [m]", anchor.numpy()[:, hinge], wanted)
    limited = [n for n, joint in enumerate(spec.joints) if joint.range is not None]
    if limited:
        span = np.stack([numbers(model, "joint_limit_lower")[dofs], numbers(model, "joint_limit_upper")[dofs]], -1)
        wanted = np.array([spec.joints[n].range for n in limited])
        yield from _compare([names[n] for n in limited], "range", " [rad or m]", span[:, limited], wanted)
    address = [int(mj_model.joint(name).dofadr[0]) for name in names]
    for what, array, values in (
        ("armature", "joint_armature", mj_model.dof_armature),
        ("damping", "joint_damping", mj_model.dof_damping),
        ("dry friction", "joint_friction", mj_model.dof_frictionloss),
    ):
        yield from _compare(names, what, "", numbers(model, array)[dofs], values[address])
    mimics = (numbers(model, "joint_mimic_joint")[joints] >= 0).any(0) if model.joint_mimic_joint is not None else []
    yield from (f"{names[n]}: it mimics another joint, expected a free one" for n in np.flatnonzero(mimics))


def _actuators(model: newton.Model, spec: RobotSpec, placement: Placement) -> Iterator[str]:
    if not spec.actuated:
        return
    driven = [spec.joints[j] for j in spec.actuated]
    names = [joint.name for joint in driven]
    joints = placement.joints[:, [joint.body for joint in driven]]
    if any(numbers(model, "joint_type")[joints].ravel() == newton.JointType.FIXED):
        return  # said already
    dofs = numbers(model, "joint_qd_start")[joints]
    limit = np.minimum(numbers(model, "joint_effort_limit")[dofs], _engine_limits(model)[dofs])
    yield from _compare(names, "effort limit", " [N m or N]", limit, np.array(spec.effort_limit))
    gains = (numbers(model, "joint_target_ke")[dofs], numbers(model, "joint_target_kd")[dofs])
    mode = numbers(model, "joint_target_mode")[dofs]
    servo = (mode == newton.JointTargetMode.POSITION) | (mode == newton.JointTargetMode.POSITION_VELOCITY)
    wanted = "a position target" if spec.control == "position" else "none: it is driven by joint_f"
    for n in np.flatnonzero((servo != (spec.control == "position")).any(0)):
        found = newton.JointTargetMode(int(mode[0, n])).name
        yield f"{names[n]}: its target mode is {found}, expected {wanted}"
    if spec.control == "position":
        yield from _compare(names, "joint_target_ke", " [N m/rad]", gains[0], np.array(spec.kp))
        yield from _compare(names, "joint_target_kd", " [N m s/rad]", gains[1], np.array(spec.kd))


def _engine_limits(model: newton.Model) -> np.ndarray:
    """Effort limit of each velocity coordinate from the MuJoCo actuators that importers keep; infinite without one."""
    limit = np.full(model.joint_dof_count, np.inf)
    attributes: Any = getattr(model, "mujoco", None)
    if getattr(attributes, "actuator_forcerange", None) is None:
        return limit
    dof, span = numbers(attributes, "actuator_trnid")[:, 0], numbers(attributes, "actuator_forcerange")
    there = (numbers(attributes, "actuator_trntype") == 0) & (span[:, 1] > span[:, 0]) & (dof >= 0)
    limit[dof[there]] = span[there, 1]
    return limit
