"""CartPole swing-up: from hanging to upright and there to stay, with a force on the cart.

Reward, bounds and length are NeRD's (public code): 5 - θ² - 0.05 x² - 0.1 θ̇² - 0.1 ẋ² per step, θ 0 upright; the
episode ends beyond 4 m, 10 m/s or 10 rad/s and is cut off after 300 steps of 1/60 s. Chosen here: the start, sine and
cosine in place of the angle in the observation, and that the angle is wrapped before it is squared, since MuJoCo counts
turns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nerd_core.codec import wrap_angle
from nerd_coupling.robots import load_robot

from .ppo import PpoConfig
from .task import Moment, Task

__all__ = ["cartpole_swing_up"]

# Half widths of the start about x = 0, θ = π, at rest.
_SPREAD = (0.5, 0.2, 0.1, 0.1)
_MAX_POSITION, _MAX_SPEED = 4.0, 10.0


def cartpole_swing_up() -> Task:
    """The task."""
    robot = load_robot("cartpole")
    return Task(
        name="cartpole-swing-up",
        robot=robot,
        episode_steps=300,
        action_offset=(0.0,),
        action_scale=(robot.spec.ctrl_range[0][1],),
        observation_scales={"x [m]": 0.5, "sin θ": 1.0, "cos θ": 1.0, "ẋ [m/s]": 0.2, "θ̇ [rad/s]": 0.2},
        start_draws=4,
        start=_start,
        observe=_observe,
        reward=_reward,
        terminated=_terminated,
        # NeRD's network, horizon, discount and rate; its 8 passes in 8 mini-batches of 2048 × 32 steps.
        ppo=PpoConfig(
            steps=32,
            epochs=8,
            mini_batches=8,
            learning_rate=3e-4,
            desired_kl=0.008,
            hidden=(64, 64),
            activation="tanh",
        ),
    )


def _start(draws: Tensor) -> Tensor:
    hanging = draws.new_tensor([0.0, math.pi, 0.0, 0.0])
    return hanging + (2 * draws - 1) * draws.new_tensor(_SPREAD)


def _observe(now: Moment) -> Tensor:
    x, angle, speed, rate = now.state.unbind(-1)
    return torch.stack([x, angle.sin(), angle.cos(), speed, rate], -1)


def _reward(now: Moment) -> dict[str, Tensor]:
    x, angle, speed, rate = now.state.unbind(-1)
    return {
        "alive": torch.full_like(x, 5.0),
        "angle": -wrap_angle(angle).square(),
        "position": -0.05 * x.square(),
        "rate": -0.1 * rate.square(),
        "speed": -0.1 * speed.square(),
    }


def _terminated(now: Moment) -> Tensor:
    x, _, speed, rate = now.state.abs().unbind(-1)
    return (x > _MAX_POSITION) | (speed > _MAX_SPEED) | (rate > _MAX_SPEED)
