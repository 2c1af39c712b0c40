"""Logged motions as states at the robot's model steps: differentiation, interpolation, frames.

Source: velocities by differences as in semi-implicit Euler (``backward``, x_k = x_{k-1} + h v_k) or in the middle of
two intervals (``central``); rotation rates in the body frame are the rotation vectors log(R_{k-1}ᵀ R_k) over h.
Chosen here: linear interpolation of positions, velocities and unwrapped joint angles, whose error is at most
h² |a| / 8 for rows h apart; spherical linear interpolation (slerp) of orientations; controls are held from their row
to the next. Rows that already lie at the model steps are taken as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .codec import wrap_angle
from .log_mapping import LogMapping
from .motion import Motion
from .robot import RobotSpec
from .rotation import quat_conjugate, quat_multiply, quat_to_rotvec, rotate, rotate_inverse, rotvec_to_quat

__all__ = ["METHODS", "states_of_run"]

METHODS = ("backward", "central")
ON_ROW = 1e-6
ON_GRID = 0.01
"""Rows within so many model steps of the grid count as lying on it."""


def states_of_run(
    motion: Motion, run: tuple[int, int], mapping: LogMapping, robot: RobotSpec, method: str
) -> tuple[Tensor, Tensor]:
    """States and controls at the model steps of a stretch without gaps.

    Args:
        motion: The logged trajectory.
        run: Its rows ``[begin, end)``.
        mapping: Frames of the logged velocities.
        robot: Gives the model step and the order of the state.
        method: ``backward`` or ``central``, for velocities that are not logged. Rows at which the difference does
            not exist (the first one; with central the last one, too) are left out.

    Returns:
        States (M, nq + nv), float64, and controls (M, nu); M may be 0.
    """
    rows = slice(*run)
    time = motion.time[rows]
    trim = _trim(mapping, method) if len(time) > 2 else (0, 0)
    if (trim != (0, 0) and len(time) <= sum(trim) + 1) or (_lacks(mapping) and len(time) < 3):
        return time.new_empty(0, robot.state_size), time.new_empty(0, robot.nu)
    kept = slice(trim[0], len(time) - trim[1])
    grid = _grid(time[kept], robot.dt)
    places = None if grid is None else _places(time[kept], grid)

    def sample(values: Tensor) -> Tensor:
        values = values[kept]
        if places is None:
            return values
        index, share = places
        return torch.lerp(values[index], values[index + 1], share[:, None])

    position, velocity = [], []
    if motion.position is not None and motion.orientation is not None:
        pos, quat = motion.position[rows], continuous(motion.orientation[rows])
        position += [sample(pos), _slerp(quat[kept], places)]
        velocity += [sample(v) for v in _twist(motion, rows, mapping, method, time, pos, quat)]
    joints, rates = _joints(motion, rows, robot, method, time)
    joints = sample(joints)
    turning = torch.tensor([joint.continuous for joint in robot.joints], dtype=torch.bool)
    position.append(torch.where(turning, wrap_angle(joints), joints))
    velocity.append(sample(rates))
    controls = motion.controls[rows][kept]
    # An instant that rounding puts just before its row belongs to that row.
    held = controls if places is None else controls[places[0] + (places[1] >= 1 - ON_ROW).long()]
    return torch.cat([*position, *velocity], 1), held


def continuous(quat: Tensor) -> Tensor:
    """Quaternions (F, 4) with the signs that make neighbours the closer ones."""
    turned = (quat[1:] * quat[:-1]).sum(1) < 0
    sign = torch.where(turned, -1.0, 1.0).to(quat).cumprod(0)
    return torch.cat([quat[:1], quat[1:] * sign[:, None]])


def differences(time: Tensor, step: Tensor, method: str) -> Tensor:
    """Velocities from the changes between neighbouring rows.

    Args:
        time: Time stamps [s], shape (F,).
        step: Change from row k to row k + 1, shape (F - 1, C).
        method: ``backward`` or ``central``.

    Returns:
        Velocities, shape (F, C); the first row, with central the last one too, has none and is NaN.
    """
    interval = time.diff()[:, None]
    nothing = step.new_full((1, step.shape[1]), math.nan)
    if method == "backward":
        return torch.cat([nothing, step / interval])
    middle = (step[1:] + step[:-1]) / (interval[1:] + interval[:-1])
    return torch.cat([nothing, middle, nothing])


def rotation_steps(quat: Tensor) -> Tensor:
    """Rotation vectors from row to row in the body frame [rad], shape (F - 1, 3)."""
    return quat_to_rotvec(quat_multiply(quat_conjugate(quat[:-1]), quat[1:]))


def _lacks(mapping: LogMapping) -> bool:
    """Whether some velocity is not logged."""
    base = mapping.position is not None and (mapping.linear_velocity is None or mapping.angular_velocity is None)
    return base or any(rate is None for rate in mapping.joint_velocities)


def _trim(mapping: LogMapping, method: str) -> tuple[int, int]:
    if not _lacks(mapping):
        return 0, 0
    return (1, 0) if method == "backward" else (1, 1)


def _twist(
    motion: Motion, rows: slice, mapping: LogMapping, method: str, time: Tensor, pos: Tensor, quat: Tensor
) -> tuple[Tensor, Tensor]:
    """Linear velocity in world axes, angular velocity in body axes, shapes (F, 3)."""
    if motion.linear is None or mapping.linear_velocity is None:
        linear = differences(time, pos.diff(dim=0), method)
    else:
        linear = motion.linear[rows]
        linear = rotate(quat, linear) if mapping.linear_velocity.choice == "body" else linear
    if motion.angular is None or mapping.angular_velocity is None:
        angular = differences(time, rotation_steps(quat), method)
    else:
        angular = motion.angular[rows]
        angular = rotate_inverse(quat, angular) if mapping.angular_velocity.choice == "world" else angular
    return linear, angular


def _joints(motion: Motion, rows: slice, robot: RobotSpec, method: str, time: Tensor) -> tuple[Tensor, Tensor]:
    """Unwrapped joint positions and joint velocities, shapes (F, joints)."""
    joints = motion.joints[rows].clone()
    rates = torch.empty_like(joints)
    for index, joint in enumerate(robot.joints):
        step = joints[:, index].diff()
        if joint.continuous:
            step = wrap_angle(step)
            joints[1:, index] = joints[0, index] + step.cumsum(0)
        logged = motion.rates[index]
        rates[:, index] = differences(time, step[:, None], method)[:, 0] if logged is None else logged[rows]
    return joints, rates


def _grid(time: Tensor, dt: float) -> Tensor | None:
    """Model steps from the first row on; None if the rows lie there already."""
    steps = torch.arange(len(time), dtype=time.dtype) * dt
    if float((time - time[0] - steps).abs().max()) <= ON_GRID * dt:
        return None
    count = math.floor(float(time[-1] - time[0]) / dt + 1e-6) + 1
    return time[0] + torch.arange(count, dtype=time.dtype) * dt


def _places(time: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Row before each instant, and the share of the interval that has passed."""
    index = (torch.searchsorted(time, grid, right=True) - 1).clamp(0, len(time) - 2)
    return index, ((grid - time[index]) / (time[index + 1] - time[index])).clamp(0, 1)


def _slerp(quat: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
    """Orientations on the shorter arc between rows."""
    if places is None:
        return quat
    index, share = places
    turn = rotation_steps(quat)[index] * share[:, None]
    turned = quat_multiply(quat[index], rotvec_to_quat(turn))
    return turned / turned.norm(dim=1, keepdim=True)
