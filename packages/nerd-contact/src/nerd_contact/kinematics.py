"""Batched, differentiable forward kinematics in torch, from the tree of a RobotSpec.

Everything is expressed in the base frame: poses and point positions relative to the base, velocities relative to
the world but along the base's axes. A fixed base is at the world origin.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nerd_core import RobotSpec, StateCodec
from nerd_core.rotation import quat_to_matrix

__all__ = ["BodyMotion", "Kinematics", "PointJacobian"]


class BodyMotion(NamedTuple):
    """Pose and velocity of every link, in the base frame.

    Attributes:
        pos: Origins [m], shape (..., bodies, 3).
        mat: Orientations, shape (..., bodies, 3, 3); columns are the link's axes.
        linvel: Velocity of the origins relative to the world [m/s], shape (..., bodies, 3).
        angvel: Angular velocity relative to the world [rad/s], shape (..., bodies, 3).
    """

    pos: Tensor
    mat: Tensor
    linvel: Tensor
    angvel: Tensor

    def points(self, body: Sequence[int], local: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [m] and velocities [m/s] of points fixed to links, shapes (..., P, 3).

        Args:
            body: Link of each point, P entries.
            local: Points in their link's frame [m], shape (P, 3).
        """
        index = list(body)
        arm = _turn(self.mat[..., index, :, :], local)
        pos = self.pos[..., index, :] + arm
        return pos, self.linvel[..., index, :] + _cross(self.angvel[..., index, :], arm)


class PointJacobian(NamedTuple):
    """What each velocity coordinate does to points fixed to links, along the base's axes.

    ``linear @ qvel`` is the points' velocity relative to the world. MuJoCo's ``mj_jac`` gives the same along the
    world's axes: these are its jacp and jacr, each column turned into the base frame.

    Attributes:
        linear: Velocity of each point per unit of each coordinate [m/s per rad/s or m/s], shape (..., P, 3, nv).
        angular: Angular velocity of each point's link, likewise [rad/s per rad/s or m/s], shape (..., P, 3, nv).
    """

    linear: Tensor
    angular: Tensor


def _turn(mat: Tensor, vector: Tensor) -> Tensor:
    # An elementwise product and sum: compilers fuse it, a batched 3 x 3 matrix product they do not.
    return (mat * vector[..., None, :]).sum(-1)


def _compose(left: Tensor, right: Tensor) -> Tensor:
    return (left[..., :, :, None] * right[..., None, :, :]).sum(-2)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.cross(*torch.broadcast_tensors(a, b))


class Kinematics:
    """Forward kinematics of one robot; one traversal, level by level of the tree, serves every query.

    ``kinematics(state)`` is that traversal. Its result answers for points (``motion.points``) and for Jacobians
    (:meth:`jacobian`) without walking the tree again. All shapes are static and nothing branches on a value, so it
    may stand in compiled and exported code.

    Rodrigues' formula for a unit axis with cross-product matrix K: R(q) = I + sin q K + (1 - cos q) K².
    """

    def __init__(self, robot: RobotSpec) -> None:
        self.robot, self.codec = robot, StateCodec(robot)
        joint_of = {}
        for index, joint in enumerate(robot.joints):
            if joint.body in joint_of:
                raise ValueError(f"body {robot.bodies[joint.body].name} has two joints, expected at most one per link")
            joint_of[joint.body] = index
        depth: list[int] = []
        for body in robot.bodies:
            depth.append(0 if body.parent < 0 else depth[body.parent] + 1)
        self._levels = [[b for b in range(len(depth)) if depth[b] == level] for level in range(max(depth) + 1)]
        order = [b for level in self._levels for b in level]
        self._place = {b: i for i, b in enumerate(order)}
        self._reorder = [self._place[b] for b in range(len(order))]
        self._joint_of = joint_of
        # Joints between the root and each link, its own among them.
        self._moving: list[frozenset[int]] = []
        for index, body in enumerate(robot.bodies):
            above = self._moving[body.parent] if body.parent >= 0 else frozenset[int]()
            self._moving.append(above | {joint_of[index]} if index in joint_of else above)

    def _constants(self, bodies: list[int], like: Tensor) -> dict[str, Tensor]:
        spec = self.robot
        joints = [spec.joints[self._joint_of[b]] if b in self._joint_of else None for b in bodies]
        axis = like.new_tensor([j.axis if j else (0.0, 0.0, 0.0) for j in joints])
        zero = torch.zeros_like(axis[:, 0])
        x, y, z = axis.unbind(-1)
        cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
        hinge = like.new_tensor([1.0 if j and j.kind == "hinge" else 0.0 for j in joints])
        return {
            "pos": like.new_tensor([spec.bodies[b].pos for b in bodies]),
            "mat": quat_to_matrix(like.new_tensor([spec.bodies[b].quat for b in bodies])),
            "axis": axis,
            "cross": cross * hinge[:, None, None],
            "cross2": (cross @ cross) * hinge[:, None, None],
            "eye": torch.eye(3, dtype=like.dtype, device=like.device),
            "anchor": like.new_tensor([j.pos if j else (0.0, 0.0, 0.0) for j in joints]),
            "hinge": hinge[:, None],
        }

    def __call__(self, state: Tensor) -> BodyMotion:
        """Motion of every link, for states of shape (..., nq + nv)."""
        joint_pos, joint_vel = self.codec.joint_pos(state), self.codec.joint_vel(state)
        lead = state.shape[:-1]
        pos: Tensor | None = None
        mat = lin = ang = torch.empty(0)
        for level in self._levels:
            if pos is None and self.robot.floating:
                pos, mat, lin, ang = self._root(state, len(level), lead)
                continue
            const = self._constants(level, state)
            if pos is None:
                p, m, v, w = self._root(state, len(level), lead)
            else:
                parents = [self._place[self.robot.bodies[b].parent] for b in level]
                p, m, v, w = (
                    pos[..., parents, :],
                    mat[..., parents, :, :],
                    lin[..., parents, :],
                    ang[..., parents, :],
                )
            q, qd = self._coordinates(level, joint_pos), self._coordinates(level, joint_vel)
            moved = self._descend(const, (p, m, v, w), q, qd)
            if pos is None:
                pos, mat, lin, ang = moved
            else:
                pos, mat = torch.cat([pos, moved[0]], -2), torch.cat([mat, moved[1]], -3)
                lin, ang = torch.cat([lin, moved[2]], -2), torch.cat([ang, moved[3]], -2)
        assert pos is not None
        if self._reorder == list(range(len(self._reorder))):
            return BodyMotion(pos, mat, lin, ang)
        r = self._reorder
        return BodyMotion(pos[..., r, :], mat[..., r, :, :], lin[..., r, :], ang[..., r, :])

    def jacobian(self, state: Tensor, motion: BodyMotion, body: Sequence[int], local: Tensor) -> PointJacobian:
        """Jacobians of points fixed to links with respect to the velocities of a state.

        Column of a hinge with axis a and anchor c, for a point p on a link that it moves: a × (p - c), and a for the
        link's turning; of a slide: a, and 0. A floating base has its world-axes linear velocity in the first three
        columns, Rᵀ, and its body-axes angular velocity in the next three, e_i × p. Source: the geometric Jacobian,
        e.g. Featherstone, Rigid Body Dynamics Algorithms, 2008, Sec. 2.7 and 4.

        Args:
            state: States, shape (..., nq + nv).
            motion: This object's answer to ``state``.
            body: Link of each point, P entries.
            local: Points in their link's frame [m], shape (P, 3).
        """
        spec, index = self.robot, list(body)
        point = motion.pos[..., index, :] + _turn(motion.mat[..., index, :, :], local)  # (..., P, 3)
        moved = [joint.body for joint in spec.joints]
        mat = motion.mat[..., moved, :, :]  # (..., J, 3, 3)
        axis = _turn(mat, state.new_tensor([joint.axis for joint in spec.joints]))
        anchor = motion.pos[..., moved, :] + _turn(mat, state.new_tensor([joint.pos for joint in spec.joints]))
        hinge = state.new_tensor([float(joint.kind == "hinge") for joint in spec.joints])[:, None]
        moves = [[float(j in self._moving[b]) for j in range(len(spec.joints))] for b in index]
        reach = state.new_tensor(moves)[..., None]  # (P, J, 1)
        turning = (axis * hinge)[..., None, :, :]  # (..., 1, J, 3)
        lever = point[..., :, None, :] - anchor[..., None, :, :]  # (..., P, J, 3)
        linear = (_cross(turning, lever) + (axis * (1 - hinge))[..., None, :, :]) * reach
        columns = (linear.transpose(-1, -2), (turning * reach).transpose(-1, -2))
        if not spec.floating:
            return PointJacobian(*columns)
        eye = torch.eye(3, dtype=state.dtype, device=state.device)
        wide = (*point.shape, 3)
        back = quat_to_matrix(state[..., 3:7]).transpose(-1, -2)[..., None, :, :].expand(wide)
        spin = _cross(eye, point[..., None, :]).transpose(-1, -2)
        return PointJacobian(
            torch.cat([back, spin, columns[0]], -1),
            torch.cat([torch.zeros_like(back), eye.expand(wide), columns[1]], -1),
        )

    def _root(self, state: Tensor, count: int, lead: torch.Size) -> tuple[Tensor, ...]:
        zero = state.new_zeros(*lead, count, 3)
        eye = torch.eye(3, dtype=state.dtype, device=state.device).expand(*lead, count, 3, 3)
        if not self.robot.floating:
            return zero, eye, zero, zero
        linear, angular = self.codec.base_twist(state)
        return zero, eye, linear[..., None, :] + zero, angular[..., None, :] + zero

    def _coordinates(self, level: list[int], values: Tensor) -> Tensor:
        index = [self._joint_of.get(b, -1) for b in level]
        if all(i < 0 for i in index):
            return values.new_zeros(*values.shape[:-1], len(level), 1)
        present = values.new_tensor([float(i >= 0) for i in index])
        return (values[..., [max(i, 0) for i in index]] * present)[..., None]

    def _descend(
        self, const: dict[str, Tensor], parent: tuple[Tensor, ...], q: Tensor, qd: Tensor
    ) -> tuple[Tensor, ...]:
        p, m, v, w = parent
        turn = const["eye"] + q.sin()[..., None] * const["cross"] + (1 - q.cos())[..., None] * const["cross2"]
        rest = _compose(m, const["mat"])
        mat = _compose(rest, turn)
        axis = _turn(mat, const["axis"])
        held = const["pos"] + _turn(const["mat"], const["anchor"])
        anchor = p + _turn(m, held)
        pos = anchor - _turn(mat, const["anchor"]) + axis * q * (1 - const["hinge"])
        spin = axis * qd * const["hinge"]
        slide = axis * qd * (1 - const["hinge"])
        lin = v + _cross(w, pos - p) + _cross(spin, pos - anchor) + slide
        return pos, mat, lin, w + spin
