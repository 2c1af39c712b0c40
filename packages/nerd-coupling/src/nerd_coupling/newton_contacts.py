"""Contact rows from Newton's own collision pipeline.

Newton 1.8 lists pairs of shapes with a point on each, in the frames of their bodies, and a normal from the first shape
to the second; ``margin`` is the thickness round a point up to the surface, ``gap`` the distance at which pairs are
listed. Here they become rows: owner first, base frame, normal towards the robot, gap negative inside.
"""

from __future__ import annotations

import newton
import numpy as np
import torch
from torch import Tensor

from nerd_contact import ContactSet, Counterpart
from nerd_core.rotation import quat_to_matrix

from .engine_contacts import places, shallower
from .newton_identity import numbers
from .newton_robot import NewtonRobot, flat_view

__all__ = ["NewtonContacts", "newton_contacts"]

_X_Y_Z_W = [3, 0, 1, 2]


def newton_contacts(
    robot: NewtonRobot, contacts: newton.Contacts, state: newton.State, *, margin: float = 0.08, max_rows: int = 16
) -> ContactSet:
    """The robot's rows among Newton's rigid contacts.

    Args:
        robot: Where the robot is in the model.
        contacts: What ``CollisionPipeline.collide`` found for ``state``.
        state: Its bodies' poses and velocities are read.
        margin: Rows with a larger gap are left out [m].
        max_rows: Rows K that are kept, the deepest first.

    Returns:
        Rows of shape (B, K, ...), float32, as :class:`nerd_contact.PrimitiveCollider` gives them; ``count`` holds also
        what found no room in Newton's buffer, which all worlds share, in every world.

    Raises:
        ValueError: If the pipeline lists fewer than the margin asks for, or an array does not fit the model.
    """
    return NewtonContacts(robot, margin=margin, max_rows=max_rows)(contacts, state)


class NewtonContacts:
    """:func:`newton_contacts` with its tables made once: no copy to the host, no wait for it, static shapes.

    Args:
        robot: Where the robot is in the model.
        margin: Rows with a larger gap are left out [m].
        max_rows: Rows K that are kept, the deepest first.

    Raises:
        ValueError: If a number is out of range, or the shapes' gaps are so small that rows within the margin would not
            be listed; the message names the shape.
    """

    def __init__(self, robot: NewtonRobot, *, margin: float = 0.08, max_rows: int = 16) -> None:
        if not margin > 0:
            raise ValueError(f"margin is {margin}, expected a positive distance [m]")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}, expected at least 1")
        self.robot, self.margin, self.max_rows = robot, margin, max_rows
        model, links = robot.model, robot.placement.links
        link_of, world_of = np.full(model.body_count + 1, -1), np.full(model.body_count + 1, -1)
        link_of[links] = np.arange(links.shape[1])
        world_of[links] = np.arange(len(links))[:, None]
        shape_body = numbers(model, "shape_body")
        self._refuse_short_gaps(model, shape_body, link_of)

        def table(values: np.ndarray, kind: torch.dtype = torch.int64) -> Tensor:
            # One entry more, for the shape that stands in where there is no contact; it is nobody's.
            return torch.tensor(np.append(values, -1 if kind == torch.int64 else 0), dtype=kind, device=robot.device)

        self._body = table(shape_body)
        self._link = table(link_of[shape_body])
        self._world = table(world_of[shape_body])
        self._sphere = table(numbers(model, "shape_type") == newton.GeoType.SPHERE, torch.bool)
        self._com = torch.cat([flat_view(model, "body_com", (model.body_count, 3), robot.device), self._nothing(3)])
        pose = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]], device=robot.device)
        self._world_pose, self._still = pose, self._nothing(6)
        self._order = torch.tensor(_X_Y_Z_W, device=robot.device)
        self._base = robot.links[:, 0]

    def _nothing(self, width: int) -> Tensor:
        return torch.zeros(1, width, device=self.robot.device)

    def _refuse_short_gaps(self, model: newton.Model, body: np.ndarray, link_of: np.ndarray) -> None:
        """A pair is listed where its distance is less than the sum of both shapes' gaps."""
        collides = (numbers(model, "shape_flags") & newton.ShapeFlags.COLLIDE_SHAPES) != 0
        mine = collides & (link_of[body] >= 0)
        if not mine.any():
            raise ValueError(f"model has no shape that collides on {self.robot.spec.name}, expected some")
        gap, other = numbers(model, "shape_gap"), collides & (link_of[body] < 0)
        if not other.any():
            return
        short = np.flatnonzero(mine & (gap + gap[other].min() < self.margin - 1e-6))
        if len(short):
            name, least = model.shape_label[int(short[0])], float(gap[short[0]] + gap[other].min())
            raise ValueError(
                f"shape {name!r} has contacts listed up to {least:.3g} m, the sum of two gaps, expected at least the "
                f"margin, {self.margin} m: set ModelBuilder.rigid_gap or ShapeConfig.gap"
            )

    def __call__(self, contacts: newton.Contacts, state: newton.State) -> ContactSet:
        """Rows, shape (B, K, ...), of what the pipeline found for a state."""
        if contacts.rigid_contact_surface_velocity is not None:
            raise ValueError("contacts have surface velocities, expected none: a row has no room for a moving belt")
        robot, model = self.robot, self.robot.model
        device, size = robot.device, contacts.rigid_contact_max
        bodies = model.body_count
        pose = torch.cat([flat_view(state, "body_q", (bodies, 7), device), self._world_pose])
        twist = torch.cat([flat_view(state, "body_qd", (bodies, 6), device), self._still])

        def listed(name: str, width: int = 0) -> Tensor:
            return flat_view(contacts, f"rigid_contact_{name}", (size, width) if width else (size,), device)

        found = flat_view(contacts, "rigid_contact_count", (1,), device).long()
        there = torch.arange(size, device=device) < found
        # Behind the last contact the buffers hold anything: those read the stand-in, which is nobody's.
        shapes = torch.stack([listed("shape0"), listed("shape1")]).long()
        shapes = torch.where(there & (shapes >= 0).all(0), shapes, -1)
        position, matrix = pose[:, :3], quat_to_matrix(pose[:, 3:][:, self._order])
        normal = listed("normal", 3)
        centre = [_placed(position, matrix, self._body[s], listed(f"point{i}", 3)) for i, s in enumerate(shapes)]
        margins = [listed("margin0"), listed("margin1")]
        gap = (normal * (centre[1] - centre[0])).sum(-1) - margins[0] - margins[1]
        # Both sides of every pair: the second shape as the owner, then the first.
        own, other = shapes.flip(0).flatten(), shapes.flatten()
        normal, gap = torch.cat([normal, -normal]), gap.repeat(2)
        centre, thick = torch.cat([centre[1], centre[0]]), torch.cat([margins[1], margins[0]])
        point = centre - normal * thick[:, None]
        mine, yours = self._body[own], self._body[other]
        velocity = self._velocity(position, matrix, twist, mine, point)
        velocity = velocity - self._velocity(position, matrix, twist, yours, point)
        friction = flat_view(model, "shape_material_mu", (model.shape_count,), device)
        friction = torch.cat([friction, self._still[0, :1]])
        friction = torch.maximum(friction[own], friction[other])  # as Newton's SolverMuJoCo and MuJoCo combine them
        exists = (self._link[own] >= 0) & (gap < self.margin)
        world = torch.where(exists, self._world[own], 0)
        # A mesh or a height field may touch a sphere in many triangles: the deepest is the distance to its surface.
        exists = exists & ~(self._sphere[own] & shallower(gap, exists, own, other))
        if robot.spec.floating:
            base = self._base[world]
            back, start = matrix[base].transpose(-1, -2), position[base]
            normal, velocity = _turned(back, normal), _turned(back, velocity)
            point = _turned(back, point - start)
        else:
            point = point - robot.origin[world]
        kind = torch.where(yours >= 0, int(Counterpart.DYNAMIC), int(Counterpart.STATIC))
        kind = torch.where(self._link[other] >= 0, int(Counterpart.SELF), kind)
        return self._table(exists, world, found - size, (point, normal, gap, velocity, friction, self._link[own], kind))

    def _velocity(self, position: Tensor, matrix: Tensor, twist: Tensor, body: Tensor, point: Tensor) -> Tensor:
        """Velocity [m/s] of bodies at points, world frame; Newton's twists are at the centres of mass."""
        arm = point - position[body] - _turned(matrix[body], self._com[body])
        return twist[body, :3] + torch.linalg.cross(twist[body, 3:], arm)

    def _table(self, exists: Tensor, world: Tensor, missing: Tensor, values: tuple[Tensor, ...]) -> ContactSet:
        worlds, rows = self.robot.nworld, self.max_rows
        place = places(values[2], exists, world, worlds, rows)

        def kept(value: Tensor) -> Tensor:
            room = value.new_zeros(worlds * rows + 1, *value.shape[1:])  # the last place takes what has none
            return room.index_put_((place,), value)[:-1].unflatten(0, (worlds, rows))

        there = torch.zeros(worlds, dtype=torch.int64, device=place.device).index_add_(0, world, exists.long())
        mask = torch.arange(rows, device=place.device) < there[:, None]
        point, normal, gap, velocity, friction, link, kind = (kept(value) for value in values)
        return ContactSet(point, normal, gap, velocity, friction, link, kind, mask, there + missing.clamp_min(0))


def _placed(position: Tensor, matrix: Tensor, body: Tensor, local: Tensor) -> Tensor:
    """Points (E, 3) of bodies in the world frame."""
    return position[body] + _turned(matrix[body], local)


def _turned(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix * vector[:, None, :]).sum(-1)
