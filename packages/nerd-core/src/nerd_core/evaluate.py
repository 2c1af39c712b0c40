"""Rollout error E_H: what a model is worth when it runs on its own predictions.

::

    E_H = sqrt( mean over trajectories and channels of ((ŝ_H − s_H) / σ)² )      at step H

and the same averaged over steps 1..H under its own name. σ is the standard deviation of each state
channel over the evaluation data; continuous angles are wrapped; an orientation counts as three
channels, its error a rotation vector [rad], its σ that of the orientation's own rotation vector.
Channels that never move are left out.

Source: NeRD and FlashNeRD report rollout errors, neither defines this number. Chosen here: the
definition that reproduces the published growth with H (reference facts, section 3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .codec import wrap_angle
from .dataset import Trajectories
from .model import FlashNerd, FlashNerdConfig
from .robot import RobotSpec
from .rollout import StreamingStep, prefill, rollout
from .rotation import quat_conjugate, quat_multiply, quat_to_rotvec
from .windows import seeded_generator

__all__ = [
    "IDLE",
    "Evaluation",
    "HorizonError",
    "SceneObserver",
    "ZeroIncrement",
    "affine_baseline",
    "channel_names",
    "channel_sigma",
    "evaluate",
    "fitting_horizons",
    "rollout_error",
    "squared_error",
    "state_channels",
    "state_error",
]

SceneObserver = Callable[[Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""States (B, ..., nq+nv) and the static scene of each row (B, ...) to context tensors (B, ...)."""

DIVERGED = 10.0
"""A row whose normalised error exceeds this, or is not finite, counts as diverged."""

IDLE = 1e-6
"""A channel whose standard deviation is not above this never moves: a rigid one still jitters by float32 rounding."""

RIDGE = 1e-6
"""Penalty of the closed-form affine fit, small enough to leave an affine robot exact to 1e-7."""


def channel_names(robot: RobotSpec) -> tuple[str, ...]:
    """Names of the 2·nv error channels, in the order of :func:`state_error`."""
    joints = [joint.name for joint in robot.joints]
    if not robot.floating:
        return (*joints, *(f"{name}_vel" for name in joints))
    pose = [f"{kind}_{axis}" for kind in ("position_world", "rotation") for axis in "xyz"]
    twist = [f"{kind}_{axis}" for kind in ("linvel_world", "angvel_base") for axis in "xyz"]
    return (*pose, *joints, *twist, *(f"{name}_vel" for name in joints))


def state_error(robot: RobotSpec, predicted: Tensor, true: Tensor) -> Tensor:
    """Difference of states (..., nq+nv) as (..., 2·nv) channels.

    Base position [m, world axes], rotation vector [rad] that turns the true into the predicted
    orientation, joint positions (continuous ones wrapped), then the velocities as in the state.
    """
    first = 7 if robot.floating else 0
    joints = predicted[..., first : robot.nq] - true[..., first : robot.nq]
    continuous = torch.tensor([joint.continuous for joint in robot.joints], dtype=torch.bool, device=true.device)
    joints = torch.where(continuous, wrap_angle(joints), joints)
    velocity = predicted[..., robot.nq :] - true[..., robot.nq :]
    if not robot.floating:
        return torch.cat([joints, velocity], -1)
    position = predicted[..., :3] - true[..., :3]
    turn = quat_multiply(quat_conjugate(true[..., 3:7]), predicted[..., 3:7])
    return torch.cat([position, quat_to_rotvec(turn), joints, velocity], -1)


def state_channels(robot: RobotSpec, states: Tensor) -> Tensor:
    """The states as (..., 2·nv) channels: orientation as a rotation vector, angles wrapped."""
    origin = torch.zeros(robot.state_size, dtype=states.dtype, device=states.device)
    if robot.floating:
        origin[3] = 1.0
    return state_error(robot, states, origin.expand_as(states))


def rollout_error(
    step: StreamingStep,
    trajectories: Trajectories,
    horizon: int,
    *,
    observe: SceneObserver | None = None,
    start: int = 0,
    history: int = 0,
    batch: int = 4096,
) -> Tensor:
    """Error of every predicted state, shape (N, horizon, 2·nv), not normalised.

    Args:
        step: The model.
        trajectories: What truly happened.
        horizon: Model steps to predict.
        observe: Gives the context of states in their scenes; None for models without one.
        start: Frame to start from.
        history: True frames before ``start`` that fill the cache, at most ``start``.
        batch: Rows at a time.
    """
    errors = []
    with torch.no_grad():
        for rows in torch.arange(len(trajectories.states)).split(batch):
            scene = {name: tensor[rows] for name, tensor in trajectories.scenes.items()}
            look = None if observe is None else (lambda state, s=scene: observe(state, s))
            states, controls = trajectories.states[rows], trajectories.controls[rows]
            cache = None
            if history:
                past = slice(start - history, start)
                cache = prefill(step, states[:, past], controls[:, past], observe=look)
            ahead = controls[:, start : start + horizon]
            predicted = rollout(step, states[:, start], ahead, observe=look, cache=cache)
            true = states[:, start : start + horizon + 1]
            errors.append(state_error(step.robot, predicted, true)[:, 1:])
    return torch.cat(errors)


def channel_sigma(robot: RobotSpec, states: Tensor) -> Tensor:
    """Standard deviation σ of each channel over states (N, T, nq+nv), shape (2·nv,), float64, SI units."""
    return state_channels(robot, states).flatten(0, 1).double().std(0)


def squared_error(
    step: StreamingStep,
    trajectories: Trajectories,
    horizon: int,
    sigma: Tensor,
    *,
    observe: SceneObserver | None = None,
    start: int = 0,
    history: int = 0,
) -> Tensor:
    """Mean over the moving channels of (error / σ)², per trajectory and step, shape (N, horizon), float64.

    The square root of its mean over trajectories at step H is E_H.

    Args:
        step: The model.
        trajectories: What truly happened.
        horizon: Model steps to predict.
        sigma: σ of every channel, see :func:`channel_sigma`; idle channels are left out.
        observe: Gives the context of states in their scenes; None for models without one.
        start: Frame to start from.
        history: True frames before ``start`` that fill the cache.
    """
    moving = sigma > IDLE
    error = rollout_error(step, trajectories, horizon, observe=observe, start=start, history=history)
    return (error.double()[..., moving] / sigma[moving]).square().mean(-1)


def fitting_horizons(
    trajectories: Trajectories, horizons: Sequence[int], *, start: int = 0, history: int = 0
) -> list[int]:
    """The horizons that trajectories from ``start`` on are long enough for, sorted.

    Raises:
        ValueError: None fits, or ``start`` and ``history`` do not.
    """
    steps = trajectories.controls.shape[1]
    if not 0 <= history <= start < steps:
        raise ValueError(f"start: got start {start} and history {history}, expected 0 <= history <= start < {steps}")
    chosen = sorted({horizon for horizon in horizons if 1 <= horizon <= steps - start})
    if not chosen:
        raise ValueError(f"horizons: got {tuple(horizons)}, expected one within 1..{steps - start}")
    return chosen


@dataclass(frozen=True, kw_only=True)
class HorizonError:
    """Error at one horizon; None stands for a number that is not finite.

    Attributes:
        horizon: Model steps H.
        at_step: E_H at step H.
        low: Lower end of its bootstrap 95 % interval over trajectories.
        high: Upper end.
        median: Median over trajectories of the per-trajectory error at step H.
        mean_to_step: The error averaged (mean square) over steps 1..H.
        diverged: Share of rows at step H that are not finite or beyond 10 σ.
        zero_increment: E_H of a model that predicts no motion.
        affine: E_H of the best affine model of the frame.
    """

    horizon: int
    at_step: float | None
    low: float | None
    high: float | None
    median: float | None
    mean_to_step: float | None
    diverged: float
    zero_increment: float | None
    affine: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What :func:`evaluate` found.

    Attributes:
        horizons: One entry per horizon.
        sigma: σ by channel name, in the channel's SI unit.
        idle_channels: Channels that never move in the evaluation data and are left out.
        num_trajectories: Trajectories evaluated.
        start: Frame that the rollouts start from.
    """

    horizons: tuple[HorizonError, ...]
    sigma: dict[str, float]
    idle_channels: tuple[str, ...]
    num_trajectories: int
    start: int


def evaluate(
    step: StreamingStep,
    trajectories: Trajectories,
    *,
    horizons: Sequence[int] = (1, 15, 100, 200),
    observe: SceneObserver | None = None,
    start: int = 0,
    history: int = 0,
    affine: StreamingStep | None = None,
    seed: int = 0,
    resamples: int = 1000,
) -> Evaluation:
    """Roll out from frame ``start`` of every trajectory and compare with what truly happened.

    Args:
        step: The model.
        trajectories: Evaluation data.
        horizons: Steps H to report; those beyond the end of the trajectories are left out.
        observe: Gives the context of states in their scenes; None for models without one.
        start: Frame to start from; 0 starts without history, as after a reset.
        history: True frames before ``start`` that fill the cache.
        affine: The affine baseline, see :func:`affine_baseline`; None leaves its column empty.
        seed: Seed of the bootstrap.
        resamples: Bootstrap resamples over trajectories.

    Raises:
        ValueError: No horizon fits, or ``start`` and ``history`` do not.
    """
    chosen = fitting_horizons(trajectories, horizons, start=start, history=history)
    robot = step.robot
    sigma = channel_sigma(robot, trajectories.states)
    names = channel_names(robot)

    def squared(model: StreamingStep, look: SceneObserver | None) -> Tensor:
        return squared_error(model, trajectories, chosen[-1], sigma, observe=look, start=start, history=history)

    ours, still = squared(step, observe), squared(ZeroIncrement(robot), None)
    linear = None if affine is None else squared(affine, None)
    return Evaluation(
        horizons=tuple(_summarise(h, ours, still, linear, seeded_generator(seed, h), resamples) for h in chosen),
        sigma={name: float(s) for name, s in zip(names, sigma, strict=True)},
        idle_channels=tuple(n for n, s in zip(names, sigma.tolist(), strict=True) if not s > IDLE),
        num_trajectories=len(trajectories.states),
        start=start,
    )


def affine_baseline(robot: RobotSpec, trajectories: Trajectories) -> FlashNerd:
    """The affine model of state and control with least squared one-step error, as a streaming step.

    It is a :class:`FlashNerd` right after its closed-form initialisation, blind to the
    surroundings.
    """
    tiny = FlashNerdConfig(width=1, heads=1, spans=(1,), hidden=1, readout_hidden=1)
    model = FlashNerd(tiny, robot).to(trajectories.states.dtype)
    states, controls = trajectories.states, trajectories.controls
    now, after = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
    model.fit(now, controls.flatten(0, 1), after, ridge=RIDGE)
    return model.eval()


class ZeroIncrement:
    """The baseline that predicts that nothing moves; the increment carries the state's width, nothing is cached."""

    def __init__(self, robot: RobotSpec) -> None:
        self.robot = robot

    def init_cache(self, n: int) -> Any:
        """Nothing to remember."""
        return n

    def step(self, state: Tensor, control: Tensor, context: Any, cache: Any) -> tuple[Tensor, Any]:
        """No increment, shape (B, 2·nv)."""
        return state.new_zeros(*state.shape[:-1], 2 * self.robot.nv), cache


def _summarise(
    horizon: int,
    ours: Tensor,
    still: Tensor,
    linear: Tensor | None,
    generator: torch.Generator,
    resamples: int,
) -> HorizonError:
    """One horizon from squared errors per trajectory and step, (N, at least horizon)."""
    at = ours[:, horizon - 1]
    # One column of resampled trajectories per bootstrap draw.
    draws = torch.randint(len(at), (resamples, len(at)), generator=generator)
    means = at[draws].mean(1).sqrt()
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    diverged = ~at.isfinite() | (at > DIVERGED**2)
    return HorizonError(
        horizon=horizon,
        at_step=_number(at.mean().sqrt()),
        low=_number(low),
        high=_number(high),
        median=_number(at.nan_to_num(nan=torch.inf).median().sqrt()),
        mean_to_step=_number(ours[:, :horizon].mean().sqrt()),
        diverged=float(diverged.double().mean()),
        zero_increment=_number(still[:, horizon - 1].mean().sqrt()),
        affine=None if linear is None else _number(linear[:, horizon - 1].mean().sqrt()),
    )


def _number(value: Tensor | float) -> float | None:
    value = float(value)
    return value if abs(value) < float("inf") else None
