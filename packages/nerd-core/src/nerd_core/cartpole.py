"""CartPole: an analytical teacher in plain torch, with NeRD's masses and time step.

Convention: state = (x, θ, ẋ, θ̇). x is the cart's position along the rail [m]; θ is the pole's angle
[rad], 0 upright, positive about +y, so that the tip leans towards +x; θ is kept in [−π, π). The one
control F is a force on the cart along +x [N], held over the model step.

Equations of motion (both joints carry an armature J)::

    (m_c + m_p + J) ẍ + m_p l cosθ θ̈ = F + F_rail + m_p l sinθ θ̇²
    m_p l cosθ ẍ + (m_p l² + m_p L²/12 + J) θ̈ = m_p g l sinθ

with the pole a uniform rod of length L = 2 l, and beyond |x| = 4 m a rail spring and damper. Each
model step of 1/60 s is five semi-implicit Euler substeps: q̇ ← q̇ + h q̈, then q ← q + h q̇.

Source: NeRD's released Cartpole environment (masses follow from geometry at density 1000). Chosen
    here: the mass matrix is evaluated at every substep; the original holds it over a model step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .codec import wrap_angle
from .dataset import TrajectoryDataset, TrajectoryWriter
from .progress import RunProgress
from .robot import Body, Joint, RobotSpec
from .windows import seeded_generator

__all__ = ["CartPole", "collect_cartpole"]

SHARD_TRAJECTORIES = 1000
REACH = (1.0, math.pi, 1.0, 1.0)
"""Starts of NeRD's later recorders; its first release drew from ±(3.5, π, 10, 10)."""


@dataclass(frozen=True, kw_only=True)
class CartPole:
    """Constants of the cart and its pole, all SI.

    Attributes:
        cart_mass: m_c [kg].
        pole_mass: m_p [kg].
        pole_length: L [m]; the centre of mass is at L/2.
        armature: J, added to the inertia of each joint [kg and kg m²].
        rail: Half length of the rail [m].
        rail_stiffness: Spring beyond the rail's ends [N/m].
        rail_damping: Damper beyond the rail's ends [N s/m].
        gravity: g [m/s²].
        max_force: Bound on |F| [N].
        timestep: Physics step h [s].
        substeps: Physics steps per model step.
    """

    cart_mass: float = 50.0
    pole_mass: float = 2.5
    pole_length: float = 1.0
    armature: float = 0.01
    rail: float = 4.0
    rail_stiffness: float = 1e4
    rail_damping: float = 10.0
    gravity: float = 9.81
    max_force: float = 1500.0
    timestep: float = 1 / 300
    substeps: int = 5

    def robot(self) -> RobotSpec:
        """The robot that travels with data and models: a fixed base, a slide and a free hinge."""
        return RobotSpec(
            name="cartpole",
            floating=False,
            bodies=(Body(name="cart", parent=-1), Body(name="pole", parent=0)),
            joints=(
                Joint(name="rail", kind="slide", body=0, axis=(1.0, 0.0, 0.0)),
                Joint(name="hinge", kind="hinge", body=1, axis=(0.0, 1.0, 0.0)),
            ),
            control="effort",
            actuated=(0,),
            ctrl_range=((-self.max_force, self.max_force),),
            effort_limit=(self.max_force,),
            timestep=self.timestep,
            substeps=self.substeps,
        )

    def acceleration(self, state: Tensor, force: Tensor) -> tuple[Tensor, Tensor]:
        """Accelerations ẍ [m/s²] and θ̈ [rad/s²], each (B,), of states (B, 4) under forces (B,)."""
        x, angle, speed, rate = state.unbind(-1)
        half = self.pole_length / 2
        sine, cosine = angle.sin(), angle.cos()
        beyond = x - x.clamp(-self.rail, self.rail)
        stop = -self.rail_stiffness * beyond - self.rail_damping * speed * (beyond != 0)
        mass = self.cart_mass + self.pole_mass + self.armature
        coupling = self.pole_mass * half * cosine
        inertia = self.pole_mass * (half**2 + self.pole_length**2 / 12) + self.armature
        push = force + stop + self.pole_mass * half * sine * rate**2
        torque = self.pole_mass * self.gravity * half * sine
        determinant = mass * inertia - coupling**2
        return (
            (inertia * push - coupling * torque) / determinant,
            (mass * torque - coupling * push) / determinant,
        )

    def step(self, state: Tensor, control: Tensor) -> Tensor:
        """One model step.

        Args:
            state: States, shape (B, 4), float64 for recording.
            control: Forces on the cart, shape (B, 1) [N].

        Returns:
            States after the step, shape (B, 4).
        """
        x, angle, speed, rate = state.unbind(-1)
        for _ in range(self.substeps):
            now = torch.stack([x, angle, speed, rate], -1)
            linear, angular = self.acceleration(now, control[..., 0])
            speed = speed + self.timestep * linear
            rate = rate + self.timestep * angular
            x = x + self.timestep * speed
            angle = angle + self.timestep * rate
        return torch.stack([x, wrap_angle(angle), speed, rate], -1)

    def energy(self, state: Tensor) -> Tensor:
        """Kinetic and potential energy, rail spring and armature included [J], shape (B,)."""
        x, angle, speed, rate = state.unbind(-1)
        half = self.pole_length / 2
        mass = self.cart_mass + self.pole_mass + self.armature
        inertia = self.pole_mass * (half**2 + self.pole_length**2 / 12) + self.armature
        kinetic = 0.5 * mass * speed**2 + 0.5 * inertia * rate**2
        kinetic = kinetic + self.pole_mass * half * angle.cos() * speed * rate
        beyond = x - x.clamp(-self.rail, self.rail)
        height = self.pole_mass * self.gravity * half * angle.cos()
        return kinetic + height + 0.5 * self.rail_stiffness * beyond**2

    def record(
        self, count: int, horizon: int, generator: torch.Generator, reach: tuple[float, ...] = REACH
    ) -> tuple[Tensor, Tensor]:
        """Trajectories under uniform random forces, redrawn every model step.

        Args:
            count: Number of trajectories.
            horizon: Model steps of each.
            generator: Source of starts and forces.
            reach: States start uniformly within plus and minus this: x [m], θ [rad], ẋ [m/s], θ̇ [rad/s].

        Returns:
            States (count, horizon+1, 4) and controls (count, horizon, 1), float64.
        """
        start = torch.rand(count, 4, dtype=torch.float64, generator=generator)
        force = torch.rand(count, horizon, 1, dtype=torch.float64, generator=generator)
        states = [(2 * start - 1) * torch.tensor(reach, dtype=torch.float64)]
        force = (2 * force - 1) * self.max_force
        for t in range(horizon):
            states.append(self.step(states[-1], force[:, t]))
        return torch.stack(states, 1), force


def collect_cartpole(
    out: str | Path,
    *,
    trajectories: int = 10_000,
    horizon: int = 100,
    seed: int = 0,
    reach: tuple[float, float, float, float] = REACH,
    cartpole: CartPole | None = None,
    resume: bool = False,
    progress: bool = True,
) -> TrajectoryDataset:
    """Record a CartPole dataset; the numbers depend on the settings and the seed only.

    Args:
        out: Dataset folder to create.
        trajectories: Number of trajectories.
        horizon: Model steps T of each.
        seed: Seed of starts and forces.
        reach: States start uniformly within plus and minus this: x [m], θ [rad], ẋ [m/s], θ̇ [rad/s].
        cartpole: Constants; None for NeRD's.
        resume: Go on with an interrupted recording.
        progress: Show progress on standard error.

    Raises:
        ValueError: Settings out of range, or a folder that cannot be written.
    """
    for name, value in (("trajectories", trajectories), ("horizon", horizon)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    if not all(0 <= value < math.inf for value in reach) or len(reach) != 4 or reach[1] > math.pi:
        raise ValueError(f"reach: got {reach}, expected four numbers of at least 0, the angle's at most π")
    cartpole = cartpole or CartPole()
    writer = TrajectoryWriter(
        out,
        cartpole.robot(),
        engine={"name": "nerd_core.cartpole", "version": 1, **asdict(cartpole)},
        seed=seed,
        extra={"trajectories": trajectories, "horizon": horizon, "reach": list(reach)},
        resume=resume,
    )
    shards = math.ceil(trajectories / SHARD_TRAJECTORIES)
    first = writer.num_shards
    with (
        writer,
        RunProgress("collect", shards, unit="transitions", done=first, shown=progress) as bar,
    ):
        for shard in range(first, shards):
            count = min(SHARD_TRAJECTORIES, trajectories - shard * SHARD_TRAJECTORIES)
            draw = seeded_generator(seed, "shard", shard)
            writer.append(*cartpole.record(count, horizon, draw, reach))
            bar.advance(count * horizon)
    return TrajectoryDataset.open(out)
