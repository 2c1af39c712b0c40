"""NeRD's task-agnostic recorder: wide random starts, efforts drawn anew at every model step."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nerd_core.codec import wrap_angle

from .grounds import nerd_ground, random_grounds
from .recording import Batch
from .robots import Robot

__all__ = ["RandomEfforts"]

# Rows of one batch; each has a model of its own if each has a ground of its own.
_ROWS_PER_BATCH = 250


class Start(NamedTuple):
    """First states are uniform within plus and minus these values.

    Attributes:
        pos: Of each joint position [rad or m]; angles are wrapped afterwards.
        vel: Of each joint velocity [rad/s or m/s].
    """

    pos: tuple[float, ...]
    vel: tuple[float, ...]


_PI = math.pi
# Source: NeRD's data generation.
_STARTS = {
    "cartpole": Start((3.5, _PI), (10.0, 10.0)),
    "double-pendulum": Start((_PI, _PI), (2 * _PI, 4 * _PI)),
    "franka": Start((10.0,) * 7, (_PI,) * 7),
}
# Source: the resets of NeRD's released environments. Chosen here: Franka as recorded.
_RESETS = {
    "cartpole": Start((1.0, _PI), (1.0, 1.0)),
    "double-pendulum": Start((_PI, _PI), (2.0, 2.0)),
    "franka": _STARTS["franka"],
}


class RandomEfforts:
    """Proposal: starts uniform in a wide box, independent uniform efforts, redrawn at every model step.

    Passive trajectories, for evaluation, start as NeRD's environments reset and get no effort. A passive double
    pendulum then starts with its second link at or above the horizontal, so that low ground is free.

    Args:
        robot: A robot driven by efforts that has recorder settings.
        rows: Trajectories per shard.
        horizon: Model steps T per trajectory.
        passive: Whether efforts are zero.
        ground: One of NeRD's evaluation grounds, for a robot that touches the ground; None for a random plane
            per trajectory.

    Raises:
        ValueError: If a setting does not fit the robot or is out of range.
    """

    def __init__(
        self,
        robot: Robot,
        *,
        rows: int = 1000,
        horizon: int = 100,
        passive: bool = False,
        ground: str | None = None,
    ) -> None:
        if robot.name not in _STARTS:
            raise ValueError(f"robot {robot.name!r}: random efforts are for {', '.join(_STARTS)}")
        for name, value in (("rows", rows), ("horizon", horizon)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if ground is not None and not robot.probes:
            raise ValueError(f"ground is {ground!r}, but {robot.name} touches nothing")
        self.robot, self.rows, self.horizon, self.passive = robot, rows, horizon, passive
        self.ground = ground
        self._terrain = None if ground is None else nerd_ground(ground)
        self._start = (_RESETS if passive else _STARTS)[robot.name]

    def settings(self) -> dict[str, Any]:
        """What identifies this proposal. JSON values."""
        return {
            "proposal": "passive" if self.passive else "random-efforts",
            "rows": self.rows,
            "horizon": self.horizon,
            "start_pos": list(self._start.pos),
            "start_vel": list(self._start.vel),
            **({"ground": self.ground or "random"} if self.robot.probes else {}),
        }

    def __call__(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of one shard."""
        low, high = torch.tensor(self.robot.spec.ctrl_range).unbind(-1)
        for first in range(0, self.rows, _ROWS_PER_BATCH):
            count = min(_ROWS_PER_BATCH, self.rows - first)
            state = self._states(count, generator)
            share = torch.rand(count, self.horizon, self.robot.spec.nu, generator=generator)
            control = torch.zeros_like(share) if self.passive else low + (high - low) * share
            if self._terrain is not None:
                yield Batch(self._terrain, state, control)
            elif self.robot.probes:
                yield Batch(random_grounds(self.robot, state, generator), state, control)
            else:
                yield Batch(None, state, control)

    def _states(self, count: int, generator: torch.Generator) -> Tensor:
        reach = torch.tensor((*self._start.pos, *self._start.vel))
        state = (2 * torch.rand(count, len(reach), generator=generator) - 1) * reach
        if self.passive and self.robot.name == "double-pendulum":
            # θ1 + θ2 in [0, π]: from the horizontal over the top to the horizontal.
            state[:, 1] = (state[:, 1] + _PI) / 2 - state[:, 0]
        turning = [i for i, joint in enumerate(self.robot.spec.joints) if joint.continuous]
        state[:, turning] = wrap_angle(state[:, turning])
        return state
