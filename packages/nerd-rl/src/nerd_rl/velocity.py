"""Velocity tracking on level ground: a legged robot goes where it is told, pushed now and then.

Weights, ranges, periods and scales are those of public tasks of the field: Isaac Lab's flat velocity tasks for Go2 and
ANYmal C (rewards, commands of ±1 m/s and ±1 rad/s redrawn every 10 s, pushes of ±0.5 m/s every 10 to 15 s, 20 s
episodes, the end when the base touches the ground, PPO settings) and legged_gym (scales of the observation). Rewards
know no gait. Chosen here: what needs a contact force is left out (air time of the feet, undesired contacts), because a
learned model gives states only; base contact is read from the state, as a base collider within 1 cm of the ground;
pushes come every 12.5 s of an episode; the yaw rate is commanded directly; the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nerd_core.codec import StateCodec
from nerd_core.rotation import rotate, rotate_inverse
from nerd_coupling.robots import Robot, load_robot

from .ppo import PpoConfig
from .task import Moment, Task

__all__ = ["VelocityWeights", "anymal_velocity", "go2_velocity", "velocity_tracking"]

_EPISODE, _COMMAND_PERIOD, _PUSH_PERIOD = 20.0, 10.0, 12.5  # [s]
_MAX_COMMAND = (1.0, 1.0, 1.0)  # forward [m/s], left [m/s], yaw [rad/s]
_STANDING = 0.02  # share of commands to stand still
_MAX_PUSH = 0.5  # [m/s] along each horizontal axis
_TOLERANCE = 0.25  # [m²/s² and rad²/s²] of the tracking terms
_TOUCHING = 0.01  # [m]
# Half widths of the start: base velocity [m/s], angular velocity [rad/s], joints [rad]; drop height [m].
_START_LINEAR, _START_ANGULAR, _START_JOINT, _DROP = 0.5, 0.5, 0.1, 0.03


@dataclass(frozen=True, kw_only=True)
class VelocityWeights:
    """Weights of the reward's terms, per second.

    Attributes:
        linear: exp(-|v_xy - command|² / 0.25), base frame.
        yaw: exp(-(ω_z - command)² / 0.25), base frame.
        vertical: v_z² [m²/s²].
        roll_pitch: ω_x² + ω_y² [rad²/s²].
        effort: Σ τ² [N² m²], the servos' clipped effort at the state reached.
        acceleration: Σ q̈² [rad²/s⁴], change of the joint velocities over the model step.
        action_rate: |a - a before|².
        tilt: Horizontal part of the gravity direction in the base frame, squared.
    """

    linear: float = 1.0
    yaw: float = 0.5
    vertical: float = -2.0
    roll_pitch: float = -0.05
    effort: float = -2.5e-5
    acceleration: float = -2.5e-7
    action_rate: float = -0.01
    tilt: float = -5.0


def go2_velocity() -> Task:
    """Velocity tracking of the Go2."""
    weights = VelocityWeights(linear=1.5, yaw=0.75, effort=-2e-4, tilt=-2.5)
    ppo = PpoConfig(entropy_coefficient=0.01)
    return velocity_tracking(load_robot("go2"), weights=weights, action_scale=0.25, ppo=ppo)


def anymal_velocity() -> Task:
    """Velocity tracking of ANYmal C."""
    ppo = PpoConfig(entropy_coefficient=0.005)
    return velocity_tracking(load_robot("anymal-c"), weights=VelocityWeights(), action_scale=0.5, ppo=ppo)


def velocity_tracking(robot: Robot, *, weights: VelocityWeights, action_scale: float, ppo: PpoConfig) -> Task:
    """Velocity tracking of a legged robot whose controls are joint position targets.

    Args:
        robot: The robot; it stands at home.
        weights: Weights of the reward.
        action_scale: Change of a target from home per unit of action [rad]; at most 1 rad in all.
        ppo: Settings of PPO.

    Raises:
        ValueError: A robot that is not floating, has no servos, or has a joint without one.
    """
    spec = robot.spec
    if not spec.floating or spec.control != "position" or spec.actuated != tuple(range(len(spec.joints))):
        raise ValueError(f"robot is {robot.name}, expected a floating base with a position servo on every joint")
    gait = _Velocity(robot, weights)
    joints = [joint.name for joint in spec.joints]
    axes = "xyz"
    scales = {f"base velocity {axis} [m/s]": 2.0 for axis in axes}
    scales |= {f"base angular velocity {axis} [rad/s]": 0.25 for axis in axes}
    scales |= {f"gravity {axis}": 1.0 for axis in axes}
    scales |= {"command forward [m/s]": 2.0, "command left [m/s]": 2.0, "command yaw [rad/s]": 0.25}
    scales |= {f"{name} from home [rad]": 1.0 for name in joints}
    scales |= {f"{name} velocity [rad/s]": 0.05 for name in joints}
    scales |= {f"{name} last action": 1.0 for name in joints}
    return Task(
        name=f"{robot.name}-velocity",
        robot=robot,
        episode_steps=round(_EPISODE / spec.dt),
        action_offset=robot.home_ctrl,
        action_scale=(action_scale,) * spec.nu,
        action_limit=1.0 / action_scale,
        observation_scales=scales,
        start_draws=7 + len(joints),
        start=gait.start,
        observe=gait.observe,
        reward=gait.reward,
        terminated=gait.terminated,
        command_names=("forward [m/s]", "left [m/s]", "yaw [rad/s]"),
        command_draws=4,
        command=_command,
        command_steps=round(_COMMAND_PERIOD / spec.dt),
        push_draws=2,
        push=gait.push,
        push_steps=round(_PUSH_PERIOD / spec.dt),
        ppo=ppo,
    )


def _command(draws: Tensor) -> Tensor:
    """Forward and left velocity [m/s] and yaw rate [rad/s], base frame, shape (N, 3)."""
    asked = (2 * draws[:, :3] - 1) * draws.new_tensor(_MAX_COMMAND)
    return asked * (draws[:, 3:] >= _STANDING)


class _Velocity:
    """The task's functions, which need the robot's numbers."""

    def __init__(self, robot: Robot, weights: VelocityWeights) -> None:
        self._spec, self._weights, self._codec = robot.spec, weights, StateCodec(robot.spec)
        self._home = robot.home_state
        base = [probe for probe in robot.probes if probe.body == 0]
        if not base:
            raise ValueError(f"robot is {robot.name}, expected one whose base has a collider")
        self._centres = [probe.pos for probe in base]
        self._radii = [probe.radius for probe in base]

    def start(self, draws: Tensor) -> Tensor:
        """Near home, a little above the ground, facing anywhere, moving a little; shape (N, nq + nv)."""
        spec, wide = self._spec, 2 * draws - 1
        state = draws.new_tensor(self._home).repeat(len(draws), 1)
        yaw = math.pi * wide[:, 0]
        state[:, 2] += _DROP
        state[:, 3], state[:, 6] = (yaw / 2).cos(), (yaw / 2).sin()
        state[:, 7 : spec.nq] += _START_JOINT * wide[:, 7:]
        state[:, spec.nq : spec.nq + 3] = _START_LINEAR * wide[:, 1:4]
        state[:, spec.nq + 3 : spec.nq + 6] = _START_ANGULAR * wide[:, 4:7]
        # Not downwards, into the ground.
        state[:, spec.nq + 2] = 0.0
        return state

    def push(self, state: Tensor, draws: Tensor) -> Tensor:
        """Kick the base horizontally."""
        pushed, nq = state.clone(), self._spec.nq
        pushed[:, nq : nq + 2] += _MAX_PUSH * (2 * draws - 1)
        return pushed

    def _gravity(self, state: Tensor) -> Tensor:
        """Direction of gravity in the base frame, shape (N, 3)."""
        down = state.new_tensor([0.0, 0.0, -1.0]).expand(len(state), 3)
        return rotate_inverse(state[:, 3:7], down)

    def observe(self, now: Moment) -> Tensor:
        """Twist, gravity, command, joints from home, joint velocities, last action; shape (N, 12 + 3 nu)."""
        linear, angular = self._codec.base_twist(now.state)
        joints = self._codec.joint_pos(now.state)
        home = joints.new_tensor(self._home[7 : self._spec.nq])
        rates = self._codec.joint_vel(now.state)
        return torch.cat([linear, angular, self._gravity(now.state), now.command, joints - home, rates, now.action], -1)

    def reward(self, now: Moment) -> dict[str, Tensor]:
        """Terms of a model step."""
        spec, weights, dt = self._spec, self._weights, self._spec.dt
        linear, angular = self._codec.base_twist(now.state)
        rates = self._codec.joint_vel(now.state)
        kp, kd, limit = (rates.new_tensor(values) for values in (spec.kp, spec.kd, spec.effort_limit))
        effort = kp * (now.control - self._codec.joint_pos(now.state)) - kd * rates
        effort = torch.minimum(torch.maximum(effort, -limit), limit)
        off = (linear[:, :2] - now.command[:, :2]).square().sum(-1)
        turn = (angular[:, 2] - now.command[:, 2]).square()
        terms = {
            "linear": (-off / _TOLERANCE).exp(),
            "yaw": (-turn / _TOLERANCE).exp(),
            "vertical": linear[:, 2].square(),
            "roll_pitch": angular[:, :2].square().sum(-1),
            "effort": effort.square().sum(-1),
            "acceleration": ((rates - self._codec.joint_vel(now.before)) / dt).square().sum(-1),
            "action_rate": (now.action - now.last_action).square().sum(-1),
            "tilt": self._gravity(now.state)[:, :2].square().sum(-1),
        }
        return {name: getattr(weights, name) * dt * term for name, term in terms.items()}

    def terminated(self, now: Moment) -> Tensor:
        """Whether a collider of the base touches the ground, shape (N,) bool."""
        centres = now.state.new_tensor(self._centres)  # (P, 3)
        quat = now.state[:, None, 3:7].expand(-1, len(centres), 4)
        heights = now.state[:, None, 2] + rotate(quat, centres.expand(len(now.state), -1, 3))[..., 2]
        return (heights - now.state.new_tensor(self._radii) < _TOUCHING).any(-1)
