"""What a verification runs through: starts, surroundings and controls, the same for every path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nerd_core import FlashNerd

__all__ = ["Scenario", "draw_scenario"]

_CLEARANCE = 0.005  # of the lowest probe at the start [m]
_DECK = {"center": (1.3, 0.0, -0.4), "half": (0.31, 0.46, 0.5)}  # its top is 0.1 m above the plane


class Scenario(NamedTuple):
    """Runs of B worlds over T model steps; float32 values, the same for every precision.

    Attributes:
        start: States, shape (B, nq + nv).
        controls: Shape (B, T, nu).
        scene: Static surroundings, leading size B; empty for models without a context encoder.
        reset_at: Step before which some histories are forgotten; the states go on.
        reset: Which worlds' histories, shape (B,).
    """

    start: Tensor
    controls: Tensor
    scene: dict[str, Tensor]
    reset_at: int
    reset: Tensor


def draw_scenario(
    model: FlashNerd,
    batch: int,
    steps: int,
    *,
    seed: int = 0,
    motion: float = 0.05,
    start: Tensor | None = None,
    scene: Mapping[str, Tensor] | None = None,
) -> Scenario:
    """A scenario for a model.

    Without ``start``, joints begin near the mean of the model's training data and the base stands level, its lowest
    probe just above the ground or, every other world, the deck. Controls are smooth and random: targets around the
    joint positions of the start, or efforts around the middle of their range. The histories of every other world are
    reset half-way.

    With the default a quadruped sways on its feet: contacts stay, rounding stays small, and an export can be held
    against the model over hundreds of steps. With six times the motion it stumbles, and contacts that come and go
    amplify rounding until any two float32 programs part, torch and torch included.

    Args:
        model: The network; its robot and its context encoder's collider are used.
        batch: Worlds B.
        steps: Model steps T.
        seed: Seed of all random numbers.
        motion: Half range of the controls: joint targets [rad], or efforts as a share of the largest one.
        start: States to draw from, shape (N, nq + nv); None for the ones above.
        scene: Surroundings of each of them, leading size N, or 1 for all; None for a plane and a
            deck.
    """
    draw = torch.Generator().manual_seed(seed)
    if start is None:
        chosen = torch.zeros(batch, dtype=torch.int64)
    else:
        chosen = torch.randint(len(start), (batch,), generator=draw)
    around = _surroundings(model, scene, chosen)
    home = start is None
    state = _near_home(model, batch, around, draw) if home else start[chosen].float()
    return Scenario(
        start=state,
        controls=_controls(model, state, steps, motion, draw),
        scene=around,
        reset_at=steps // 2,
        reset=torch.arange(batch) % 2 == 0,
    )


def _surroundings(model: FlashNerd, scene: Mapping[str, Tensor] | None, chosen: Tensor) -> dict[str, Tensor]:
    if model.context_encoder is None:
        return {}
    if scene is None:
        scene = {
            "box_center": torch.tensor([[_DECK["center"]]]),
            "box_half": torch.tensor([[_DECK["half"]]]),
            "box_yaw": torch.zeros(1, 1),
            "friction": torch.full((1, 2), 0.8),
        }
    return {name: value[chosen % len(value)].float() for name, value in scene.items()}


def _near_home(model: FlashNerd, batch: int, scene: dict[str, Tensor], draw: torch.Generator) -> Tensor:
    robot = model.robot
    joints = len(robot.joints)
    vel = 0.1 * _normal(draw, batch, joints)
    if not robot.floating:
        return torch.cat([_typical_pose(model) + 0.1 * _normal(draw, batch, joints), vel], -1)
    pos = _typical_pose(model) + 0.03 * _normal(draw, batch, joints)
    yaw = math.pi * (2 * torch.rand(batch, generator=draw) - 1)
    still = torch.zeros(batch)
    quat = torch.stack([(yaw / 2).cos(), still, still, (yaw / 2).sin()], -1)
    # All feet on the ground before the deck, or all of them on it.
    ground, deck = 0.5 * torch.rand(batch, generator=draw), _DECK["center"][0] + 0.02 * _normal(draw, batch)
    place = torch.stack([torch.where(torch.arange(batch) % 2 == 0, ground, deck), 0.02 * _normal(draw, batch)], -1)
    twist = 0.1 * _normal(draw, batch, 6)
    state = torch.cat([place, still[:, None] + 2, quat, pos, twist, vel], -1)
    return _put_down(model.context_encoder, state, scene)


def _typical_pose(model: FlashNerd) -> Tensor:
    """Mean joint positions [rad or m] of the training data inside the joints' ranges; 0 for continuous hinges."""
    mean = dict(zip(model.codec.token_names, model.token_stats.mean.tolist(), strict=True))
    pose = [mean.get(joint.name, 0.0) for joint in model.robot.joints]
    ranges = [joint.range or (-math.inf, math.inf) for joint in model.robot.joints]
    return torch.tensor([min(max(p, low), high) for p, (low, high) in zip(pose, ranges, strict=True)])


def _put_down(encoder: Any, state: Tensor, scene: dict[str, Tensor]) -> Tensor:
    """Lower the base until its lowest probe is just above what lies below."""
    if encoder is None:
        return state
    from nerd_contact import PrimitiveCollider

    far = PrimitiveCollider(encoder.collider.kinematics.robot, encoder.probes, margin=100.0)
    for _ in range(20):  # as in sphere tracing, a gap is never more than the way down
        gap = far(state, scene).gap.amin(-1)
        state = torch.cat([state[:, :2], state[:, 2:3] - (gap[:, None] - _CLEARANCE), state[:, 3:]], -1)
    return state


def _controls(model: FlashNerd, state: Tensor, steps: int, motion: float, draw: torch.Generator) -> Tensor:
    """Two sines per channel with random phases and periods of 0.5 to 2 s, shape (B, T, nu)."""
    robot = model.robot
    low, high = torch.tensor(robot.ctrl_range).unbind(-1)
    shape = (2, len(state), 1, robot.nu)
    phase = 2 * math.pi * torch.rand(shape, generator=draw)
    rate = 2 * math.pi * (0.5 + 1.5 * torch.rand(shape, generator=draw))  # [rad/s]
    time = robot.dt * torch.arange(steps)[:, None]
    wave = (rate * time + phase).sin().mean(0)
    if robot.control == "position":
        centre = model.codec.joint_pos(state)[:, None, list(robot.actuated)]
        return torch.maximum(torch.minimum(centre + motion * wave, high), low)
    return (low + high) / 2 + motion * (high - low) / 2 * wave


def _normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)
