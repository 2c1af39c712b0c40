"""The two training losses: teacher forcing on windows, and recursion through codec and cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .artifact import Model
from .distributed import Group
from .evaluate import SceneObserver
from .windows import WindowSampler, seeded_generator

__all__ = [
    "RecursiveLoss",
    "TeacherLoss",
    "advance",
    "channel_weights",
    "recursive_loss",
    "teacher_loss",
]

SCALE_WINDOWS = 4096


def channel_weights(model: Model) -> Tensor:
    """Weight of each channel's squared normalised error, shape (2·nv,).

    ::

        velocities: 1        positions: min(1, (σ_position / (dt σ_velocity))²)

    with σ the target's standard deviations. A position error then weighs as much as the position
    error that the velocity error of this step causes in the next one, and no more. Idle channels
    weigh nothing.

    Chosen here: without it, a kinematic model spends half of its loss on position residuals a
    thousand times smaller than what its velocity errors add; on CartPole every E_H is twice as
    large after the same updates.
    """
    std, active = model.target_stats.std, model.target_stats.active
    position, velocity = std.chunk(2)
    if model.robot.floating:  # base pose, base twist, joint positions, joint velocities
        joints = len(model.robot.joints)
        pose, twist, position, velocity = std.split([6, 6, joints, joints])
        position, velocity = torch.cat([pose, position]), torch.cat([twist, velocity])
    ratio = (position / (model.robot.dt * velocity)).square().clamp(max=1.0)
    ones = torch.ones_like(ratio)
    weights = torch.cat([ratio, ones])
    if model.robot.floating:
        weights = torch.cat([ratio[:6], ones[:6], ratio[6:], ones[6:]])
    return weights * active


def teacher_loss(model: Model, states: Tensor, controls: Tensor, context: Mapping[str, Tensor] | None) -> Tensor:
    """Mean squared normalised increment over all positions, channels weighted.

    Args:
        model: The network.
        states: True states, shape (B, W+1, nq+nv).
        controls: Controls, shape (B, W, nu); control t acts from state t to state t+1.
        context: Surroundings at the first W states, leading shape (B, W).
    """
    prediction = model(states[:, :-1], controls, context).float()
    error = prediction - model.target(states[:, :-1], states[:, 1:])
    weights = channel_weights(model)
    return (error.square() * weights).mean() * (weights.numel() / weights.sum())


def advance(
    model: Model,
    state: Tensor,
    control: Tensor,
    cache: Any,
    observe: SceneObserver | None,
    scene: Mapping[str, Tensor],
) -> tuple[Tensor, Any]:
    """State (B, nq+nv) and cache, one model step on."""
    context = None if observe is None else observe(state, scene)
    delta, cache = model.step(state, control, context, cache)
    return model.codec.integrate(state, delta), cache


def recursive_loss(
    model: Model,
    states: Tensor,
    controls: Tensor,
    scale: Tensor,
    horizon: int,
    observe: SceneObserver | None,
    scene: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Huber loss of the state error while the model runs on its own predictions.

    The error is ``codec.differentiate(predicted, true) / scale``, averaged over the rollout's steps
    and the channels that move. Gradients flow through the whole rollout, through the history and
    through the surroundings as seen from predicted states; nothing is truncated.

    Chosen here: Huber's loss with its bend at one scale, so that a row that runs away pulls with a
    bounded force and cannot dominate the batch.

    Args:
        model: The network.
        states: True states, shape (B, P + horizon + 1, nq+nv); the first P are history.
        controls: Controls, shape (B, P + horizon, nu).
        scale: Scale of each channel, shape (2·nv,).
        horizon: Model steps to roll out.
        observe: Gives the surroundings of states (B, nq+nv) in their scenes; None for models
            without context.
        scene: Static surroundings of the rows, name to (B, ...).
    """
    past, scene = controls.shape[1] - horizon, scene or {}
    cache = model.init_cache(len(states))
    for t in range(past):
        _, cache = advance(model, states[:, t], controls[:, t], cache, observe, scene)
    state, predicted = states[:, past], []
    for t in range(past, past + horizon):
        state, cache = advance(model, state, controls[:, t], cache, observe, scene)
        predicted.append(state)
    active = model.target_stats.active
    truth = states[:, past + 1 :]
    error = model.codec.differentiate(torch.stack(predicted, 1), truth) / scale * active
    # Twice Huber's loss is the squared error where it is small.
    loss = 2 * nn.functional.huber_loss(error, torch.zeros_like(error))
    return loss * (active.numel() / active.sum())


class TeacherLoss:
    """Draws windows and gives the teacher-forced loss of this process's share of them.

    Args:
        sampler: Windows of the training trajectories.
        observe: Gives the context of states in their scenes, or None.
        bfloat16: Run the network under bfloat16 autocast.
        compiled: Compile the loss with torch.compile.
        group: The processes that share each batch.
    """

    def __init__(
        self,
        sampler: WindowSampler,
        observe: SceneObserver | None,
        *,
        bfloat16: bool,
        compiled: bool,
        group: Group,
    ) -> None:
        self._sampler, self._observe, self._bfloat16, self._group = sampler, observe, bfloat16, group
        self._loss = torch.compile(teacher_loss, dynamic=False) if compiled else teacher_loss

    def __call__(self, model: Model, batch: int, draw: torch.Generator) -> tuple[Tensor, int]:
        """Loss of this process's share of ``batch`` windows, and the number of frames in all of them."""
        pool = self._sampler.pool
        rows, offsets = map(self._group.share, self._sampler.draw(batch, draw))
        states, controls = pool.windows(rows, offsets, self._sampler.length)
        context = None
        if self._observe is not None:
            with torch.no_grad():
                context = self._observe(states[:, :-1], pool.scene(rows))
        with torch.autocast(pool.device.type, torch.bfloat16, enabled=self._bfloat16):
            loss = self._loss(model, states, controls, context)
        return loss, batch * self._sampler.length


class RecursiveLoss:
    """Draws start frames with their history and gives the recursive loss from this process's share of them.

    The history's length is drawn anew for each batch, from none to the receptive field less one, so
    that the model meets every filling of its cache. The scale of a channel is the root mean square,
    over k = 1..horizon, of the standard deviation of its true k-step increments.

    Chosen here: that scale; all channels count alike, and the later steps of a rollout more than
    the early ones, as in the rollout error that picks the best model. Float32 throughout.

    Args:
        sampler: Windows of receptive_field - 1 + horizon steps of the training trajectories.
        observe: Gives the context of states in their scenes, or None.
        model: Gives codec and receptive field.
        horizon: Model steps to roll out.
        seed: Seed of the sample that the scale is measured on.
        group: The processes that share each batch.
    """

    def __init__(
        self,
        sampler: WindowSampler,
        observe: SceneObserver | None,
        *,
        model: Model,
        horizon: int,
        seed: int,
        group: Group | None = None,
    ) -> None:
        self._sampler, self._observe, self._horizon = sampler, observe, horizon
        self._group = group or Group()
        rows, offsets = sampler.draw(SCALE_WINDOWS, seeded_generator(seed, "scale"))
        states, _ = sampler.pool.windows(rows, offsets, horizon)
        moves = model.codec.differentiate(states[:, 1:], states[:, :1].expand_as(states[:, 1:]))
        scale = moves.double().var(0).mean(0).sqrt().float()
        self.scale = torch.where(scale > 1e-9, scale, torch.ones_like(scale))

    def __call__(self, model: Model, batch: int, draw: torch.Generator) -> tuple[Tensor, int]:
        """Loss of this process's share of ``batch`` rollouts, and the number of frames in all of them."""
        pool = self._sampler.pool
        rows, offsets = map(self._group.share, self._sampler.draw(batch, draw))
        states, controls = pool.windows(rows, offsets, self._sampler.length)
        first = int(torch.randint(model.config.receptive_field, (), generator=draw))
        states, controls = states[:, first:], controls[:, first:]
        loss = recursive_loss(
            model,
            states,
            controls,
            self.scale,
            self._horizon,
            self._observe,
            pool.scene(rows),
        )
        return loss, batch * controls.shape[1]
