"""Grounds of the double pendulum: a random plane per trajectory to record on, and NeRD's seven to be judged on.

NeRD's world is y-up; ours is z-up with x, y, z = its x, -z, y.
"""

import math

import torch
from torch import Tensor

from nerd_contact import Kinematics

from .robots import Robot
from .terrain import Terrain

__all__ = ["PENDULUM_FRICTION", "nerd_ground", "nerd_grounds", "random_grounds"]

PENDULUM_FRICTION = 0.5
"""Sliding friction of link and ground, the default of NeRD's engine."""

# Height of the plane on NeRD's vertical axis [m] and its turns about NeRD's x, y, z [rad], in this order about fixed
# axes. Source: NeRD's released environment of the double pendulum.
_NERD_GROUNDS = {
    "none": (-15.5, (0.0, 0.0, 0.0)),
    "c1": (0.0, (0.0, 0.0, 0.0)),
    "c2": (0.2, (math.pi / 8, math.pi / 16, math.pi / 16)),
    "c3": (0.5, (0.0, 0.0, 0.0)),
    "c4": (-0.5, (0.0, 0.0, 0.0)),
    "c5": (-0.3, (0.0, 0.0, 0.0)),
    "c6": (0.0, (math.pi / 8, 0.0, 0.0)),
}
# NeRD draws planes up to this far from the pivot [m]; the pendulum reaches 3.1 m.
_FARTHEST = 3.5


def nerd_grounds() -> tuple[str, ...]:
    """Names of NeRD's seven evaluation grounds: ``none``, out of reach, and ``c1`` to ``c6``."""
    return tuple(_NERD_GROUNDS)


def nerd_ground(name: str) -> Terrain:
    """One of NeRD's seven evaluation grounds.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in _NERD_GROUNDS:
        raise ValueError(f"ground {name!r}: expected one of {', '.join(_NERD_GROUNDS)}")
    height, (a, b, c) = _NERD_GROUNDS[name]
    # NeRD's vertical (0, 1, 0), turned about x, then y, then z.
    x, y, z = math.sin(a) * math.sin(b), math.cos(a), math.sin(a) * math.cos(b)
    x, y = x * math.cos(c) - y * math.sin(c), x * math.sin(c) + y * math.cos(c)
    return Terrain(floor_friction=PENDULUM_FRICTION, floor_normal=(x, -z, y), floor_offset=y * height)


def random_grounds(robot: Robot, state: Tensor, generator: torch.Generator) -> tuple[Terrain, ...]:
    """A random plane for each state, which the robot does not touch there.

    The normal is uniform in a cube, then normalised; the offset is uniform between 3.5 m beyond the pivot and the
    surface of the nearest of the fixed points. Source: NeRD's data generation.

    Args:
        robot: A robot with a fixed base and fixed points of one radius.
        state: States, shape (N, nq + nv).
        generator: Gives the random numbers.
    """
    count, points = len(state), robot.fixed_points
    local = torch.tensor([point.pos for point in points], dtype=torch.float64)
    motion = Kinematics(robot.spec)(state.double())
    places, _ = motion.points([point.body for point in points], local)  # (N, P, 3)
    normal = 2 * torch.rand(count, 3, dtype=torch.float64, generator=generator) - 1
    normal = normal / normal.norm(dim=-1, keepdim=True)
    pivot = torch.tensor(robot.spec.bodies[0].pos, dtype=torch.float64)
    low = normal @ pivot - _FARTHEST
    high = (places * normal[:, None]).sum(-1).amin(-1) - points[0].radius
    offset = low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator)
    # Rounded to float32, so that the engine and the stored scene hold the same planes.
    planes = torch.cat([normal, offset[:, None]], -1).float().tolist()
    return tuple(
        Terrain(floor_friction=PENDULUM_FRICTION, floor_normal=(x, y, z), floor_offset=d) for x, y, z, d in planes
    )
