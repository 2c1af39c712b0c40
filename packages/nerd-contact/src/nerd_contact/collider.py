"""Primitive collider: the robot's spheres and capsule samples against a plane, boxes and a height field, in torch.

Batched, differentiable, compilable; used inside rollouts, where a simulator's contact buffers do not exist.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nerd_core import RobotSpec
from nerd_core.rotation import quat_to_matrix

from .contacts import ContactSet, Counterpart, deepest
from .heightfield import HeightGrid, cells_needed
from .kinematics import Kinematics

__all__ = ["PrimitiveCollider", "Probe", "box_distance"]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A sphere fixed to a link.

    Attributes:
        name: Name.
        body: Index of the link in the RobotSpec.
        pos: Centre in the link's frame [m].
        radius: Radius [m].
        friction: Sliding friction of the robot's surface there.
    """

    name: str
    body: int
    pos: tuple[float, float, float]
    radius: float
    friction: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "pos": list(self.pos)}


class PrimitiveCollider:
    """Contact rows of one robot in a scene of a plane, static boxes and a height field.

    A scene is a dict of tensors: ``box_center`` (B, N, 3) [m], ``box_half`` (B, N, 3) half sizes [m], ``box_yaw``
    (B, N) [rad], all in the world frame and left out where there are no boxes, and ``friction`` (B, 1 + N), the
    plane first. The plane is z = 0, or ``plane_normal`` (B, 3), unit, world frame, and ``plane_offset`` (B,) [m]:
    its points p have normal · p = offset. A height field, beside the plane, is ``hfield_height`` (B, R, C) world
    heights [m], rows along y and columns along x, ``hfield_origin`` (B, 2) x, y of the first [m], ``hfield_spacing``
    (B, 2) along x and y [m], ``hfield_friction`` (B,) and, where it is known, ``hfield_tile``
    (:func:`nerd_contact.heightfield.tile_maxima`); all left out where there is none. As in MuJoCo the friction of a
    pair is the larger of the two. Each probe gives one row against the plane, one against each box and one, of the
    nearest place, against the field. The base frame of a fixed base is the world frame.

    Args:
        robot: The robot.
        probes: Its spheres.
        margin: Rows with a larger gap are masked [m].
        ground_only: See the plane, tilted or not, and nothing else (the fixed-point baseline of NeRD).
        merge: Keep only the deepest surface of each probe: one row per probe.
        max_rows: Rows kept, the deepest first; None for all.
        field_cells: Cells of a height field that are searched round each probe, across. Rows are exact while
            radius + gap is at most (field_cells - 1) / 2 spacings; :meth:`check_scene` says whether that covers the
            margin.
        field_probes: Probes per world that are held against the triangles of a height field: those lowest over the
            highest tile below them. The others are taken to be far; those that may not be are added to ``count``,
            so that they show as overflow. None for all.
    """

    def __init__(
        self,
        robot: RobotSpec,
        probes: tuple[Probe, ...],
        *,
        margin: float = 0.08,
        ground_only: bool = False,
        merge: bool = False,
        max_rows: int | None = None,
        field_cells: int = 4,
        field_probes: int | None = None,
    ) -> None:
        if not probes:
            raise ValueError("probes is empty, expected at least one sphere")
        if not margin > 0:
            raise ValueError(f"margin is {margin}, expected a positive distance [m]")
        for name, value in (("max_rows", max_rows), ("field_cells", field_cells), ("field_probes", field_probes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        self.kinematics = Kinematics(robot)
        self.probes, self.margin = probes, margin
        self.ground_only, self.merge, self.max_rows = ground_only, merge, max_rows
        self.field_cells, self.field_probes = field_cells, field_probes
        self._body = [p.body for p in probes]

    def check_scene(self, scene: Mapping[str, Tensor]) -> None:
        """Refuse a scene whose height field is too fine for ``field_cells``. Reads values: not for compiled code.

        Raises:
            ValueError: If a row within the margin could be missed.
        """
        if "hfield_spacing" not in scene:
            return
        spacing, reach = float(scene["hfield_spacing"].min()), max(p.radius for p in self.probes) + self.margin
        needed = cells_needed(spacing, reach)
        if self.field_cells < min(needed, max(scene["hfield_height"].shape[-2:]) - 1):
            raise ValueError(
                f"field_cells is {self.field_cells}, expected at least {needed}: radius and margin reach {reach:.3g} m "
                f"and the grid's spacing is {spacing:.3g} m"
            )

    def __call__(self, state: Tensor, scene: Mapping[str, Tensor]) -> ContactSet:
        """Contact rows of states (B, ..., nq + nv) in scenes whose tensors have the leading size B."""
        local = state.new_tensor([p.pos for p in self.probes])
        radius = state.new_tensor([p.radius for p in self.probes])
        grip = state.new_tensor([p.friction for p in self.probes])
        motion = self.kinematics(state)
        centre, linvel = motion.points(self._body, local)  # (..., P, 3), base frame
        angvel = motion.angvel[..., self._body, :]
        base = quat_to_matrix(state[..., 3:7]) if self.kinematics.robot.floating else None  # (..., 3, 3)
        if base is None:
            world = centre
        else:
            world = state[..., None, :3] + (base[..., None, :, :] * centre[..., None, :]).sum(-1)
        extra = state.dim() - 2

        def over(
            value: Tensor,
        ) -> Tensor:  # scene tensors broadcast over the axes between B and the probes
            return value.reshape(value.shape[0], *([1] * extra), *value.shape[1:]).to(state.dtype)

        friction = over(scene["friction"])
        if "plane_normal" in scene:
            up = over(scene["plane_normal"])[..., None, :].expand_as(world)
            height = (up * world).sum(-1) - over(scene["plane_offset"])[..., None]
        else:
            up = torch.zeros_like(world)
            up[..., 2] = 1
            height = world[..., 2]
        gaps, normals, grips = (
            [height - radius],
            [up],
            [torch.maximum(grip, friction[..., :1])],
        )
        if not self.ground_only and "box_center" in scene:
            boxes = [over(scene[k]) for k in ("box_center", "box_half", "box_yaw")]
            for n in range(boxes[0].shape[-2]):
                distance, normal = box_distance(
                    world - boxes[0][..., n, None, :],
                    boxes[1][..., n, None, :],
                    boxes[2][..., n, None],
                )
                gaps.append(distance - radius)
                normals.append(normal)
                grips.append(torch.maximum(grip, friction[..., n + 1, None]))
        unseen = 0
        if not self.ground_only and "hfield_height" in scene:
            gap, normal, unseen = self._against_field(world, radius, HeightGrid.read(scene, state))
            gaps.append(gap)
            normals.append(normal)
            grips.append(torch.maximum(grip, over(scene["hfield_friction"])[..., None]))
        gap, normal = torch.stack(gaps, -2), torch.stack(normals, -3)
        mu = torch.stack([g.expand_as(world[..., 2]) for g in grips], -2)
        if self.merge:
            deepest = gap.argmin(-2, keepdim=True)
            gap, mu = gap.gather(-2, deepest), mu.gather(-2, deepest)
            normal = normal.gather(-3, deepest[..., None].expand(*deepest.shape, 3))
        gap, mu, normal = gap.flatten(-2), mu.flatten(-2), normal.flatten(-3, -2)  # (..., N), all pairs
        mask = gap < self.margin
        keep, count = self._kept(gap, mask), mask.sum(-1) + unseen
        probe = keep % len(self.probes)
        # Only the rows that stay are worth their vectors: most pairs are far apart.
        gap, mu, mask, normal = gap.gather(-1, keep), mu.gather(-1, keep), mask.gather(-1, keep), _pick(normal, keep)
        if base is not None:
            normal = (base.transpose(-1, -2)[..., None, :, :] * normal[..., None, :]).sum(-1)
        arm = -normal * radius[probe][..., None]  # from the sphere's centre to its surface
        link = torch.tensor(self._body, device=gap.device)[probe]
        return ContactSet(
            point=_pick(centre, probe) + arm,
            normal=normal,
            gap=gap,
            velocity=_pick(linvel, probe) + torch.linalg.cross(_pick(angvel, probe), arm),
            friction=mu,
            link=link,
            kind=torch.full_like(link, Counterpart.STATIC),
            mask=mask,
            count=count,
        )

    def _against_field(self, world: Tensor, radius: Tensor, grid: HeightGrid) -> tuple[Tensor, Tensor, Tensor | int]:
        """Gaps (..., P), normals (..., P, 3), and how many probes, shape (...,), went unseen that may be near."""
        if self.field_probes is None or self.field_probes >= world.shape[-2]:
            distance, normal = grid.distance(world, self.field_cells)
            return distance - radius, normal, 0
        least = grid.clearance(world, self.field_cells) - radius
        chosen = least.topk(self.field_probes, -1, largest=False).indices
        distance, direction = grid.distance(_pick(world, chosen), self.field_cells)
        # No gap that was not looked at may pass for a row.
        gap = least.clamp_min(self.margin).scatter(-1, chosen, distance - radius[chosen])
        up = torch.zeros_like(world)
        up[..., 2] = 1
        normal = up.scatter(-2, chosen[..., None].expand(*chosen.shape, 3), direction)
        near = least < self.margin
        return gap, normal, near.sum(-1) - near.gather(-1, chosen).sum(-1)

    def _kept(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Indices of the rows that are kept, the deepest first; of all rows in order where there are few."""
        if self.max_rows is None or gap.shape[-1] <= self.max_rows:
            return torch.arange(gap.shape[-1], device=gap.device).expand(gap.shape)
        return deepest(gap, mask, self.max_rows)


def _pick(vectors: Tensor, rows: Tensor) -> Tensor:
    """Rows (..., R) of vectors (..., N, 3)."""
    return vectors.gather(-2, rows[..., None].expand(*rows.shape, 3))


def box_distance(offset: Tensor, half: Tensor, yaw: Tensor) -> tuple[Tensor, Tensor]:
    """Signed distance [m] of points to a yawed box and the outward normal, both in the world frame.

    Outside, the distance to the nearest point of the box; inside, minus the distance to the nearest face.

    Args:
        offset: Points less the box's centre, world axes [m], shape (..., 3).
        half: Half sizes [m], shape (..., 3).
        yaw: Turn of the box about the vertical [rad], shape (...,).
    """
    c, s = yaw.cos()[..., None], yaw.sin()[..., None]
    x, y, z = offset[..., :1], offset[..., 1:2], offset[..., 2:]
    local = torch.cat([c * x + s * y, c * y - s * x, z], -1)
    out = local - torch.maximum(torch.minimum(local, half), -half)
    squared = (out * out).sum(-1, keepdim=True)
    outside = squared > 1e-14
    length = torch.where(outside, squared, torch.ones_like(squared)).sqrt()
    depth = half - local.abs()
    least = depth.min(-1, keepdim=True).values
    # Inside, the face that is least deep; a tie at an edge picks one face, as MuJoCo does.
    first = torch.nn.functional.one_hot(depth.argmin(-1), 3).to(local.dtype)
    inward = torch.where(local < 0, -first, first)
    normal = torch.where(outside, out / length, inward)
    distance = torch.where(outside, length, -least)[..., 0]
    nx, ny, nz = normal[..., :1], normal[..., 1:2], normal[..., 2:]
    return distance, torch.cat([c * nx - s * ny, s * nx + c * ny, nz], -1)
