"""State codec: what the network reads of a state, and the increment it predicts.

Tokens of a floating base are expressed in the base's own frame at that very time sample, so a cached token never
has to be expressed anew when the robot moves: this is what makes caching exact.
"""

import torch
from torch import Tensor

from .robot import RobotSpec
from .rotation import (
    canonical,
    quat_conjugate,
    quat_multiply,
    quat_to_rotvec,
    rotate,
    rotate_inverse,
    rotvec_to_quat,
)

__all__ = ["StateCodec", "wrap_angle"]

_PI = 3.141592653589793


def wrap_angle(angle: Tensor) -> Tensor:
    """Angles [rad] wrapped to [-π, π)."""
    return torch.remainder(angle + _PI, 2 * _PI) - _PI


class StateCodec:
    """Maps states to tokens and pairs of states to increments, for one robot.

    Token of time sample t (floating base; B_t is the base frame at t)::

        [R_tᵀ ĝ | R_tᵀ v_t | ω_t | q_t (continuous: sin, cos) | q̇_t | control_t | effort_t]

    with the unit gravity direction ĝ, base velocity v (world axes in the state), ω (body axes). The last group is
    the PD law's clipped effort over its limit at the start of the step, present with position control only.
    A fixed base drops the first three groups.

    Increment::

        [R_tᵀ (x' - x) | log(R_tᵀ R') | R_tᵀ (v' - v) | ω' - ω | q' - q (wrapped) | q̇' - q̇]

    Source: NeRD Sec. 3 (relative, robot-centric prediction). Chosen here: the rotation vector with canonical
    sign in place of a quaternion; constant base entries dropped; the clipped effort as a feature, since the
    saturation is known and need not be learned.

    Attributes:
        robot: The robot.
        token_names: Name and unit of each token entry.
        delta_names: Name and unit of each increment entry.
        token_size: Width of a token.
        delta_size: Width of an increment, 2·nv.
    """

    def __init__(self, robot: RobotSpec) -> None:
        self.robot = robot
        continuous = [j.continuous for j in robot.joints]
        self._any_continuous = any(continuous)
        self._continuous = torch.tensor(continuous)
        self._plain = [i for i, c in enumerate(continuous) if not c]
        self._wrapped = [i for i, c in enumerate(continuous) if c]
        axes = ("x", "y", "z")
        base = [f"{n}_{a}" for n in ("gravity", "linvel_base", "angvel_base") for a in axes]
        joints = [j.name for j in robot.joints]
        angle = [joints[i] for i in self._plain]
        angle += [f"{f}({joints[i]})" for f in ("sin", "cos") for i in self._wrapped]
        driven = [joints[i] for i in robot.actuated]
        self.token_names = tuple(
            (base if robot.floating else [])
            + angle
            + [f"{n}_vel" for n in joints]
            + [f"{n}_ctrl" for n in driven]
            + ([f"{n}_effort" for n in driven] if robot.control == "position" else [])
        )
        moves = [f"{n}_{a}" for n in ("translation", "rotation") for a in axes]
        kicks = [f"{n}_change_{a}" for n in ("linvel", "angvel") for a in axes]
        self.delta_names = tuple(
            (moves + kicks if robot.floating else [])
            + [f"{n}_change" for n in joints]
            + [f"{n}_vel_change" for n in joints]
        )
        self.token_size = len(self.token_names)
        self.delta_size = len(self.delta_names)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Name of each entry of the state."""
        joints = [j.name for j in self.robot.joints]
        base = [*"xyz", "quat_w", "quat_x", "quat_y", "quat_z"] if self.robot.floating else []
        rate = [f"{n}_{a}" for n in ("linvel_world", "angvel_base") for a in "xyz"]
        return tuple(base + joints + (rate if base else []) + [f"{n}_vel" for n in joints])

    def joint_pos(self, state: Tensor) -> Tensor:
        """Joint positions [rad or m], shape (..., joints)."""
        return state[..., 7 if self.robot.floating else 0 : self.robot.nq]

    def joint_vel(self, state: Tensor) -> Tensor:
        """Joint velocities [rad/s or m/s], shape (..., joints)."""
        return state[..., self.robot.nq + (6 if self.robot.floating else 0) :]

    def base_twist(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Linear [m/s] and angular [rad/s] velocity of the base, both in the base frame, shapes (..., 3)."""
        nq = self.robot.nq
        return rotate_inverse(state[..., 3:7], state[..., nq : nq + 3]), state[..., nq + 3 : nq + 6]

    def encode(self, state: Tensor, control: Tensor) -> Tensor:
        """Tokens, shape (..., token_size), of states (..., nq + nv) and controls (..., nu)."""
        joint_pos, joint_vel = self.joint_pos(state), self.joint_vel(state)
        parts: list[Tensor] = []
        if self.robot.floating:
            w, x, y, z = state[..., 3:7].unbind(-1)
            # minus the third row of the rotation matrix: the gravity direction in the base frame
            gravity = torch.stack([-2 * (x * z - w * y), -2 * (y * z + w * x), -1 + 2 * (x * x + y * y)], -1)
            parts += [gravity, *self.base_twist(state)]
        if self._any_continuous:
            turning = joint_pos[..., self._wrapped]
            parts += [joint_pos[..., self._plain], turning.sin(), turning.cos()]
        else:
            parts.append(joint_pos)
        parts += [joint_vel, control]
        if self.robot.control == "position":
            parts.append(self._effort_fraction(joint_pos, joint_vel, control))
        return torch.cat(parts, -1)

    def _effort_fraction(self, joint_pos: Tensor, joint_vel: Tensor, control: Tensor) -> Tensor:
        actuated = self.robot.actuated
        if actuated != tuple(range(len(self.robot.joints))):
            joint_pos, joint_vel = joint_pos[..., list(actuated)], joint_vel[..., list(actuated)]
        limit = control.new_tensor(self.robot.effort_limit)
        kp, kd = control.new_tensor(self.robot.kp), control.new_tensor(self.robot.kd)
        effort = kp * (control - joint_pos) - kd * joint_vel
        return (effort / limit).clamp(-1, 1)

    def differentiate(self, after: Tensor, now: Tensor) -> Tensor:
        """Increment, shape (..., 2·nv), that leads from ``now`` to ``after``, both (..., nq + nv)."""
        change = self.joint_pos(after) - self.joint_pos(now)
        if self._any_continuous:
            change = torch.where(self._continuous.to(change.device), wrap_angle(change), change)
        rate = self.joint_vel(after) - self.joint_vel(now)
        if not self.robot.floating:
            return torch.cat([change, rate], -1)
        nq, quat = self.robot.nq, now[..., 3:7]
        move = rotate_inverse(quat, after[..., :3] - now[..., :3])
        turn = quat_to_rotvec(quat_multiply(quat_conjugate(quat), after[..., 3:7]))
        kick = rotate_inverse(quat, after[..., nq : nq + 3] - now[..., nq : nq + 3])
        spin = after[..., nq + 3 : nq + 6] - now[..., nq + 3 : nq + 6]
        return torch.cat([move, turn, kick, spin, change, rate], -1)

    def integrate(self, now: Tensor, delta: Tensor) -> Tensor:
        """State, shape (..., nq + nv), after an increment (..., 2·nv); inverts :meth:`differentiate`."""
        joint_pos_change, joint_vel_change = self._joints(delta)
        joint_pos = self.joint_pos(now) + joint_pos_change
        if self._any_continuous:
            joint_pos = torch.where(self._continuous.to(joint_pos.device), wrap_angle(joint_pos), joint_pos)
        joint_vel = self.joint_vel(now) + joint_vel_change
        if not self.robot.floating:
            return torch.cat([joint_pos, joint_vel], -1)
        nq, quat = self.robot.nq, now[..., 3:7]
        pos = now[..., :3] + rotate(quat, delta[..., :3])
        turned = quat_multiply(quat, rotvec_to_quat(delta[..., 3:6]))
        turned = canonical(turned / turned.norm(dim=-1, keepdim=True))
        linvel = now[..., nq : nq + 3] + rotate(quat, delta[..., 6:9])
        angvel = now[..., nq + 3 : nq + 6] + delta[..., 9:12]
        return torch.cat([pos, turned, joint_pos, linvel, angvel, joint_vel], -1)

    def _joints(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Joint position and velocity entries of an increment, shapes (..., joints)."""
        first, count = (12 if self.robot.floating else 0), len(self.robot.joints)
        return delta[..., first : first + count], delta[..., first + count :]

    def drift(self, state: Tensor, delta: Tensor) -> Tensor:
        """Position part of an increment that its velocity part alone explains, shape (..., 2·nv).

        For n equal semi-implicit Euler substeps under constant acceleration, Δx = dt (v + α Δv) with
        α = (n + 1) / (2 n). Velocity entries are zero.
        """
        n = self.robot.substeps
        alpha, dt = (n + 1) / (2 * n), self.robot.dt
        joints = dt * (self.joint_vel(state) + alpha * self._joints(delta)[1])
        if not self.robot.floating:
            return torch.cat([joints, torch.zeros_like(joints)], -1)
        linear, angular = self.base_twist(state)
        move = dt * (linear + alpha * delta[..., 6:9])
        turn = dt * (angular + alpha * delta[..., 9:12])
        still = torch.zeros_like(delta[..., 6:12])
        return torch.cat([move, turn, still, joints, torch.zeros_like(joints)], -1)
