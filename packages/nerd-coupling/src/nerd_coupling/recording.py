"""Recording: rollouts that somebody proposes, labelled by the engine, kept shard by shard.

A *proposal* says where to start and what to do; the recorder runs it in C MuJoCo, rejects what diverged, and
writes one shard per call. Everything drawn for shard k depends on (seed, k) alone, so a recording that was killed
goes on with the same bytes, and several hosts can record one dataset by taking different seeds.
"""

import hashlib
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mujoco
import torch
from torch import Tensor

from nerd_contact import ContactEncoderConfig, PrimitiveCollider
from nerd_core import TrajectoryWriter
from nerd_core.codec import wrap_angle
from nerd_core.progress import RunProgress
from nerd_core.rotation import quat_multiply, rotvec_to_quat
from nerd_core.windows import seeded_generator

from .robots import Robot
from .terrain import Terrain, scene
from .worlds import MujocoWorlds

__all__ = ["Batch", "Proposal", "RandomTargets", "engine_identity", "place_on_ground", "record"]


# Rollouts that are repeated at once to learn why they stopped.
_REPEATED = 64


class Batch(NamedTuple):
    """Rollouts to run.

    Attributes:
        terrain: What the robot stands on, one for all rows or one for each; None for a robot that touches nothing.
        state: First states, shape (N, nq + nv).
        control: Controls of each model step, shape (N, T, nu).
    """

    terrain: Terrain | Sequence[Terrain] | None
    state: Tensor
    control: Tensor


Proposal = Callable[[torch.Generator], Iterator[Batch]]
"""Gives the batches of one shard; every random number must come from the generator."""


def engine_identity(robot: Robot) -> dict[str, Any]:
    """What decides the motion besides the robot: engine, version, solver, step sizes. JSON values."""
    option = mujoco.MjModel.from_xml_string(robot.mjcf).opt
    return {
        "engine": "mujoco",
        "version": mujoco.__version__,
        "integrator": mujoco.mjtIntegrator(option.integrator).name,
        "solver": mujoco.mjtSolver(option.solver).name,
        "cone": mujoco.mjtCone(option.cone).name,
        "iterations": int(option.iterations),
        "ls_iterations": int(option.ls_iterations),
        "timestep": robot.spec.timestep,
        "substeps": robot.spec.substeps,
        "architecture": platform.machine(),
        "mjcf_sha256": hashlib.sha256(robot.mjcf.encode()).hexdigest(),
    }


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a recorded trajectory may reach; anything beyond is rejected and counted.

    Attributes:
        speed: Base speed [m/s].
        spin: Base angular speed [rad/s].
        joint_rate: Joint speed [rad/s].
        penetration: Depth of a first state inside the ground or a box [m].
        magnitude: Any entry of a state of a robot with a fixed base, which the first three do not concern; NeRD's.
        rows: Contact rows within the margin of the robot's context encoder that any state of a trajectory may have;
            give the encoder's ``max_rows`` and no row that the model should have seen is missing from the data. None
            for no limit: the encoder then keeps the deepest.
    """

    speed: float = 8.0
    spin: float = 40.0
    joint_rate: float = 60.0
    penetration: float = 0.02
    magnitude: float = 1e5
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows is {self.rows}, expected at least 1, or None for no limit")


def record(
    out: str | Path,
    robot: Robot,
    propose: Proposal,
    *,
    shards: int,
    seed: int,
    settings: dict[str, Any],
    limits: Limits | None = None,
    threads: int | None = None,
    num_boxes: int = 1,
    resume: bool = False,
    progress: bool = True,
) -> Path:
    """Record a dataset.

    Args:
        out: Dataset folder.
        robot: The robot.
        propose: Where to start and what to do.
        shards: Shards to write in all.
        seed: Seed; with the shard's number it decides everything that is drawn.
        settings: What identifies ``propose``; must agree on resume. JSON values.
        limits: What is rejected.
        threads: Threads of the engine.
        num_boxes: Boxes that every scene is padded to; with 0 every scene is a plane and says which.
        resume: Go on with an incomplete recording.
        progress: Show progress on standard error.

    Returns:
        ``out``.

    Raises:
        ValueError: ``out`` holds something else, or a recording with other settings.
    """
    limits = limits or Limits()
    if limits.rows is not None:
        settings = {**settings, "max_rows": limits.rows}
    writer = TrajectoryWriter(
        out,
        robot.spec,
        engine=engine_identity(robot),
        seed=seed,
        extra={**settings, "shards": shards, "context": _context(robot)},
        resume=resume,
    )
    with (
        writer,
        RunProgress("record", shards, unit="transitions", done=writer.num_shards, shown=progress) as bar,
    ):
        while writer.num_shards < shards:
            generator = seeded_generator(seed, "shard", writer.num_shards)
            states, controls, scenes = [], [], []
            for batch in propose(generator):
                where = _scene(batch, num_boxes)
                states_of, keep, reasons = _label(robot, batch, where, limits, threads)
                for reason, count in reasons.items():
                    writer.reject(reason, count)
                states.append(states_of[keep])
                controls.append(batch.control[keep])
                scenes.append({k: v[keep] for k, v in where.items()})
            control = torch.cat(controls)
            writer.append(
                torch.cat(states),
                control,
                {k: torch.cat([s[k] for s in scenes]) for k in scenes[0]},
            )
            rejected = sum(writer.rejected.values())
            bar.advance(control.shape[0] * control.shape[1], f"{rejected} rejected")
    return Path(out)


def _context(robot: Robot) -> dict[str, Any]:
    """Settings of context encoders for this robot, so that ``nerd-core train --context`` needs nothing else."""
    margin = {} if robot.margin is None else {"margin": robot.margin}
    listed = {"contact-set": robot.probes, "fixed-contact": robot.fixed_points}
    return {kind: {"probes": [p.to_json() for p in probes], **margin} for kind, probes in listed.items() if probes}


def _scene(batch: Batch, num_boxes: int) -> dict[str, Tensor]:
    """Scene of every row; nothing for a robot that touches nothing."""
    if batch.terrain is None:
        return {}
    rows = len(batch.state)
    return {k: v.expand(rows, *v.shape[1:]) for k, v in scene(batch.terrain, num_boxes=num_boxes).items()}


def _label(
    robot: Robot,
    batch: Batch,
    where: dict[str, Tensor],
    limits: Limits,
    threads: int | None,
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Run a batch in the engine; its states, which rows are kept, and how many were rejected and why."""
    spec = robot.spec
    terrain = Terrain() if batch.terrain is None else batch.terrain
    nworld = 1 if isinstance(terrain, Terrain) else len(terrain)
    with MujocoWorlds(robot, terrain, nworld, threads=threads) as worlds:
        states = worlds.rollout(batch.state, batch.control)
    stopped = ~torch.isfinite(states).all(-1).all(-1)
    checks = {"contact buffer full": _lost_contacts(robot, batch, stopped, threads), "non-finite": stopped}
    if robot.probes:
        margin = ContactEncoderConfig.margin if robot.margin is None else robot.margin
        collider = PrimitiveCollider(robot.spec, robot.probes, margin=margin)
        checks["starts inside"] = collider(batch.state, where).gap.min(-1).values < -limits.penetration
        if limits.rows is not None:
            most = torch.stack([collider(now, where).count for now in states.unbind(1)], 1).amax(1)
            checks["too many contact rows"] = most > limits.rows
    if spec.floating:
        rates = states[..., spec.nq :].abs().amax(1)
        checks["too fast"] = (
            (rates[:, :3].amax(-1) > limits.speed)
            | (rates[:, 3:6].amax(-1) > limits.spin)
            | (rates[:, 6:].amax(-1) > limits.joint_rate)
        )
    else:
        checks["too large"] = states.abs().amax((1, 2)) > limits.magnitude
    keep = torch.ones(len(states), dtype=torch.bool)
    reasons: dict[str, int] = {}
    for reason, bad in checks.items():
        reasons[reason] = int((bad & keep).sum())
        keep &= ~bad
    return _wrapped(robot, states), keep, reasons


def _lost_contacts(robot: Robot, batch: Batch, stopped: Tensor, threads: int | None) -> Tensor:
    """Which of the rollouts (N,) that stopped did so because the engine had no room for their contacts, shape (N,)."""
    lost = torch.zeros_like(stopped)
    for rows in stopped.nonzero().flatten().split(_REPEATED) if bool(stopped.any()) else ():
        terrain = Terrain() if batch.terrain is None else batch.terrain
        own = terrain if isinstance(terrain, Terrain) else [terrain[i] for i in rows.tolist()]
        # A rollout tells only that a row stopped; worlds that are stepped tell why.
        with MujocoWorlds(robot, own, len(rows), threads=threads) as worlds:
            worlds.set_state(batch.state[rows])
            for control in batch.control[rows].unbind(1):
                worlds.step(control)
            lost[rows] = worlds.overflow
    return lost


def _wrapped(robot: Robot, states: Tensor) -> Tensor:
    """The states with the angles of continuous joints in [-π, π): the engine counts turns."""
    first = 7 if robot.spec.floating else 0
    turning = [first + i for i, joint in enumerate(robot.spec.joints) if joint.continuous]
    if turning:
        states[..., turning] = wrap_angle(states[..., turning])
    return states


def place_on_ground(state: Tensor, where: dict[str, Tensor], collider: PrimitiveCollider, clearance: Tensor) -> Tensor:
    """Lift or lower states until the nearest probe is ``clearance`` above what lies below it.

    Args:
        state: States, shape (N, nq + nv).
        where: Scene tensors of leading size N.
        collider: Gives the gaps.
        clearance: Wanted smallest gap [m], shape (N,).
    """
    state = state.clone()
    for _ in range(6):  # a box's side turns into its top on the way up
        state[:, 2] += clearance - collider(state, where).gap.min(-1).values
    return state


class RandomTargets:
    """Task-agnostic proposal: random stances on random decks, smooth random joint targets.

    Args:
        robot: The robot.
        control_range: Lower and upper target [rad] that plans use, shape (nu, 2).
        rows: Rollouts per shard, at least one per deck.
        horizon: Model steps T per rollout.
        heights: Range of deck heights [m].
        terrains: Decks per shard.
    """

    def __init__(
        self,
        robot: Robot,
        control_range: Tensor,
        *,
        rows: int = 4096,
        horizon: int = 20,
        heights: tuple[float, float] = (0.03, 0.30),
        terrains: int = 16,
    ) -> None:
        if not robot.spec.floating:
            raise ValueError(f"robot {robot.name!r} has a fixed base, expected a floating one for random targets")
        for name, value, least in (("rows", rows, terrains), ("horizon", horizon, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        self.robot, self.control_range = robot, control_range
        self.rows, self.horizon, self.heights, self.terrains = rows, horizon, heights, terrains
        self._collider = PrimitiveCollider(robot.spec, robot.probes, margin=5.0)

    def settings(self) -> dict[str, Any]:
        """What identifies this proposal. JSON values."""
        return {
            "proposal": "random-targets",
            "rows": self.rows,
            "horizon": self.horizon,
            "heights": list(self.heights),
            "terrains": self.terrains,
        }

    def __call__(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of one shard, one per deck."""
        n = self.rows // self.terrains
        for _ in range(self.terrains):
            low, high = self.heights
            height = low + (high - low) * float(torch.rand((), generator=generator))
            terrain = Terrain.platform(height)
            state = self.stances(n, terrain, generator)
            yield Batch(terrain, state, self._targets(state, generator))

    def stances(self, n: int, terrain: Terrain, generator: torch.Generator) -> Tensor:
        """Random moving states on or just above the ground and the deck, shape (n, nq + nv)."""

        def uniform(size: int, scale: float) -> Tensor:
            return (2 * torch.rand(n, size, generator=generator) - 1) * scale

        spec = self.robot.spec
        state = torch.tensor(self.robot.home_state).repeat(n, 1)
        # From a body length before the deck to past its far edge.
        state[:, 0] = 0.1 + 1.7 * torch.rand(n, generator=generator)
        state[:, 1:2] = uniform(1, 0.35)
        heading = torch.cat([torch.zeros(n, 2), uniform(1, 0.5)], -1)
        tilt = torch.cat([uniform(1, 0.35), uniform(1, 0.6), torch.zeros(n, 1)], -1)
        state[:, 3:7] = quat_multiply(rotvec_to_quat(heading), rotvec_to_quat(tilt))
        low, high = torch.tensor([j.range or (-math.pi, math.pi) for j in spec.joints]).unbind(-1)
        joints = state[:, 7 : spec.nq] + uniform(spec.nu, 0.6)
        state[:, 7 : spec.nq] = joints.clamp(low, high)
        state[:, spec.nq : spec.nq + 3] = uniform(3, 0.8)
        state[:, spec.nq + 3 : spec.nq + 6] = uniform(3, 2.0)
        state[:, spec.nq + 6 :] = uniform(spec.nu, 5.0)
        where = {k: v.expand(n, *v.shape[1:]) for k, v in scene(terrain).items()}
        clearance = 0.06 * torch.rand(n, generator=generator).square()
        return place_on_ground(state, where, self._collider, clearance)

    def _targets(self, state: Tensor, generator: torch.Generator) -> Tensor:
        """Random walks between knots, interpolated linearly, of random roughness."""
        low, high = self.control_range.unbind(-1)
        n, knots = len(state), 6
        start = state[:, None, 7 : self.robot.spec.nq]
        reach = 0.1 + 0.9 * torch.rand(n, 1, 1, generator=generator)
        walk = reach * torch.randn(n, knots, self.robot.spec.nu, generator=generator)
        points = torch.cat([start, start + walk.cumsum(1) * 0.6], 1).clamp(low, high)
        place = torch.linspace(0, knots, self.horizon + 1)[1:]
        left = place.floor().long().clamp(max=knots - 1)
        share = (place - left)[:, None]
        return points[:, left] * (1 - share) + points[:, left + 1] * share
