"""Ant run: as fast as it can along +x, by efforts at its eight joints.

Reward, observation, length and end are NeRD's (public code): v_x + 0.1 up + heading per step, with up the vertical part
of the torso's z axis and heading the +x part of its x axis; the episode ends below 0.3 m and is cut off after 500 steps
of 1/60 s. Chosen here: the start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nerd_core.codec import StateCodec
from nerd_core.rotation import rotate
from nerd_coupling.robots import load_robot

from .ppo import PpoConfig
from .task import Moment, Task

__all__ = ["ant_run"]

_MIN_HEIGHT = 0.3  # [m]
_DROP, _START_JOINT, _START_RATE = 0.05, 0.1, 0.1  # [m], [rad], [rad/s]


def ant_run() -> Task:
    """The task."""
    robot = load_robot("ant")
    spec, codec = robot.spec, StateCodec(robot.spec)
    joints = [joint.name for joint in spec.joints]

    def start(draws: Tensor) -> Tensor:
        wide = 2 * draws - 1
        state = draws.new_tensor(robot.home_state).repeat(len(draws), 1)
        state[:, 2] += _DROP
        state[:, 7 : spec.nq] += _START_JOINT * wide[:, : len(joints)]
        state[:, spec.nq + 6 :] = _START_RATE * wide[:, len(joints) :]
        return state

    def observe(now: Moment) -> Tensor:
        linear, angular = codec.base_twist(now.state)
        up, heading = _attitude(now.state)
        parts = [now.state[:, 2:7], linear, angular, codec.joint_pos(now.state), codec.joint_vel(now.state)]
        return torch.cat([*parts, up[:, None], heading[:, None]], -1)

    def reward(now: Moment) -> dict[str, Tensor]:
        up, heading = _attitude(now.state)
        return {"speed": now.state[:, spec.nq], "up": 0.1 * up, "heading": heading}

    scales = {"height [m]": 1.0} | {f"quaternion {part}": 1.0 for part in "wxyz"}
    scales |= {f"base velocity {axis} [m/s]": 1.0 for axis in "xyz"}
    scales |= {f"base angular velocity {axis} [rad/s]": 0.25 for axis in "xyz"}
    scales |= {f"{name} [rad]": 1.0 for name in joints}
    scales |= {f"{name} velocity [rad/s]": 0.1 for name in joints}
    return Task(
        name="ant-run",
        robot=robot,
        episode_steps=500,
        action_offset=(0.0,) * spec.nu,
        action_scale=tuple(high for _, high in spec.ctrl_range),
        observation_scales=scales | {"up": 1.0, "heading": 1.0},
        start_draws=2 * len(joints),
        start=start,
        observe=observe,
        reward=reward,
        terminated=lambda now: now.state[:, 2] < _MIN_HEIGHT,
        # NeRD's network, horizon, rate; its 5 passes in 4 mini-batches of 2048 × 32 steps.
        ppo=PpoConfig(
            steps=32,
            epochs=5,
            mini_batches=4,
            learning_rate=3e-4,
            desired_kl=0.008,
            hidden=(128, 64, 32),
            activation="relu",
        ),
    )


def _attitude(state: Tensor) -> tuple[Tensor, Tensor]:
    """Vertical part of the torso's z axis, and +x part of its x axis, shapes (N,)."""
    quat = state[:, 3:7]
    axis_x, axis_z = (state.new_tensor(axis).expand(len(state), 3) for axis in ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]))
    return rotate(quat, axis_z)[:, 2], rotate(quat, axis_x)[:, 0]
