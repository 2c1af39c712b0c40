"""What a robot stands on: a plane (z = 0 by default), static boxes and a height field, as a value for every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nerd_contact.heightfield import tile_maxima
from nerd_coupling.heightfield import HeightField


def _check_friction(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be a positive coefficient, got {value}")


@dataclass(frozen=True, kw_only=True)
class Box:
    """A static box, turned about the vertical only.

    Attributes:
        center: Centre in the world frame [m].
        half_size: Half extents along the box's own axes [m].
        yaw: Rotation about world z [rad].
        friction: Sliding friction coefficient. A contact uses the larger one of the touching pair
            (MuJoCo's rule), so a slippery box under a grippy foot still grips.
    """

    center: tuple[float, float, float]
    half_size: tuple[float, float, float]
    yaw: float = 0.0
    friction: float = 0.8

    def __post_init__(self) -> None:
        for name, values in (("center", self.center), ("half_size", self.half_size)):
            if len(values) != 3 or not all(math.isfinite(v) for v in values):
                raise ValueError(f"{name} must be three finite lengths in metres, got {values}")
        if min(self.half_size) <= 0.0:
            raise ValueError(f"half_size must be positive along every axis, got {self.half_size}")
        if not math.isfinite(self.yaw):
            raise ValueError(f"yaw must be a finite angle in radians, got {self.yaw}")
        _check_friction("friction", self.friction)

    @property
    def top(self) -> float:
        """Height of the upper face in the world frame [m]."""
        return self.center[2] + self.half_size[2]

    @property
    def quaternion(self) -> tuple[float, float, float, float]:
        """Orientation in the world frame (w, x, y, z)."""
        return (math.cos(0.5 * self.yaw), 0.0, 0.0, math.sin(0.5 * self.yaw))


# Unused slots of a model with a fixed number of boxes: out of reach of every collider.
ABSENT = Box(center=(0.0, 0.0, -100.0), half_size=(0.5, 0.5, 0.5))


@dataclass(frozen=True, kw_only=True)
class Terrain:
    """A plane, static boxes and a height field; ``Terrain()`` is the level ground z = 0.

    Attributes:
        boxes: Static boxes, world frame.
        floor_friction: Sliding friction coefficient of the plane.
        floor_normal: Unit normal of the plane towards the free side, world frame.
        floor_offset: Distance of the plane from the world's origin along the normal [m]: its points
            p have normal · p = offset.
        field: Rough ground beside the plane, or None.
    """

    boxes: tuple[Box, ...] = ()
    floor_friction: float = 0.8
    floor_normal: tuple[float, float, float] = (0.0, 0.0, 1.0)
    floor_offset: float = 0.0
    field: HeightField | None = None

    def __post_init__(self) -> None:
        _check_friction("floor_friction", self.floor_friction)
        if len(self.floor_normal) != 3 or not abs(math.hypot(*self.floor_normal) - 1.0) < 1e-5:
            raise ValueError(f"floor_normal must be three numbers of length 1, got {self.floor_normal}")
        if not math.isfinite(self.floor_offset):
            raise ValueError(f"floor_offset must be a finite distance in metres, got {self.floor_offset}")

    @property
    def is_level(self) -> bool:
        """Whether the plane is z = 0."""
        return self.floor_normal == (0.0, 0.0, 1.0) and self.floor_offset == 0.0

    @property
    def floor_quaternion(self) -> tuple[float, float, float, float]:
        """The shortest turn of z onto the plane's normal (w, x, y, z)."""
        x, y, z = self.floor_normal
        if z < -1.0 + 1e-12:
            return (0.0, 1.0, 0.0, 0.0)
        length = math.sqrt((1.0 + z) ** 2 + x * x + y * y)
        return ((1.0 + z) / length, -y / length, x / length, 0.0)

    @classmethod
    def platform(
        cls,
        height: float,
        *,
        front: float = 0.99,
        length: float = 0.62,
        width: float = 0.92,
        yaw: float = 0.0,
        friction: float = 0.8,
    ) -> Terrain:
        """A deck ahead of the robot.

        The box is 1 m tall whatever the height, most of it below ground, so that only its centre
        moves from one height to the next.

        Args:
            height: Top of the deck above the ground [m], between 0 and 1.
            front: World x of the front face's middle before turning [m].
            length: Extent along x [m].
            width: Extent along y, centred on y = 0 [m].
            yaw: Turn about the deck's own centre [rad].
            friction: Sliding friction coefficient of the deck.

        Raises:
            ValueError: If a length is not positive or the height is not in (0, 1).
        """
        if not 0.0 < height < 1.0:
            raise ValueError(f"height must be between 0 and 1 m (exclusive), got {height}")
        for name, value in (("length", length), ("width", width)):
            if not value > 0.0:
                raise ValueError(f"{name} must be a positive length in metres, got {value}")
        box = Box(
            center=(front + 0.5 * length, 0.0, height - 0.5),
            half_size=(0.5 * length, 0.5 * width, 0.5),
            yaw=yaw,
            friction=friction,
        )
        return cls(boxes=(box,))

    def padded(self, num_boxes: int) -> tuple[Box, ...]:
        """The boxes, followed by out-of-reach ones up to ``num_boxes``.

        Raises:
            ValueError: If the terrain has more boxes than that.
        """
        if len(self.boxes) > num_boxes:
            raise ValueError(f"terrain has {len(self.boxes)} boxes, expected at most {num_boxes}")
        return self.boxes + (ABSENT,) * (num_boxes - len(self.boxes))


def scene(terrains: Terrain | Sequence[Terrain], *, num_boxes: int | None = None) -> dict[str, Tensor]:
    """Terrains as tensors, for torch colliders and for the ``scene.*`` fields of a dataset.

    Args:
        terrains: N terrains (one terrain counts as N = 1).
        num_boxes: Boxes per terrain; by default the largest count among them, at least one.

    Returns:
        Float32 tensors: ``box_center`` (N, nb, 3) [m] world frame, ``box_half`` (N, nb, 3) [m],
        ``box_yaw`` (N, nb) [rad], ``friction`` (N, 1 + nb), floor first. Missing boxes lie at
        z = -100 m. Where a plane is not z = 0, or there are no boxes (``num_boxes`` 0) and so no
        tensors of them, also ``plane_normal`` (N, 3), world frame, and ``plane_offset`` (N,) [m].
        Where any terrain has a height field of R by C points, also ``hfield_height`` (N, R, C) [m],
        ``hfield_origin`` (N, 2) [m], ``hfield_spacing`` (N, 2) [m], ``hfield_friction`` (N,) and
        ``hfield_tile``, the maxima of its tiles; terrains without one have it at z = -100 m.

    Raises:
        ValueError: If there is no terrain, one has more than ``num_boxes`` boxes, or two have height
            fields of different shapes.
    """
    group = [terrains] if isinstance(terrains, Terrain) else list(terrains)
    if not group:
        raise ValueError("terrains must hold at least one Terrain, got none")
    count = max(1, *(len(t.boxes) for t in group)) if num_boxes is None else num_boxes
    boxes = [terrain.padded(count) for terrain in group]
    tensors = {
        "friction": torch.tensor(
            [[terrain.floor_friction, *(b.friction for b in row)] for terrain, row in zip(group, boxes, strict=True)]
        ).float()
    }
    if count:
        tensors["box_center"] = torch.tensor([[b.center for b in row] for row in boxes]).float()
        tensors["box_half"] = torch.tensor([[b.half_size for b in row] for row in boxes]).float()
        tensors["box_yaw"] = torch.tensor([[b.yaw for b in row] for row in boxes]).float()
    if not count or not all(terrain.is_level for terrain in group):
        tensors["plane_normal"] = torch.tensor([terrain.floor_normal for terrain in group]).float()
        tensors["plane_offset"] = torch.tensor([terrain.floor_offset for terrain in group]).float()
    shape = field_shape(group)
    if shape is not None:
        fields = [terrain.field or HeightField.absent(shape) for terrain in group]
        tensors["hfield_height"] = torch.tensor([field.heights for field in fields]).float()
        tensors["hfield_origin"] = torch.tensor([field.origin for field in fields]).float()
        tensors["hfield_spacing"] = torch.tensor([field.spacing for field in fields]).float()
        tensors["hfield_friction"] = torch.tensor([field.friction for field in fields]).float()
        tensors["hfield_tile"] = tile_maxima(tensors["hfield_height"])
    return tensors


def field_shape(terrains: Sequence[Terrain]) -> tuple[int, int] | None:
    """Rows and columns of the terrains' height fields; None where there is none.

    Raises:
        ValueError: If two have different shapes: tensors and compiled models hold one.
    """
    shapes = sorted({terrain.field.shape for terrain in terrains if terrain.field is not None})
    if len(shapes) > 1:
        raise ValueError(f"height fields have {shapes[0]} and {shapes[1]} points, expected one shape for all terrains")
    return shapes[0] if shapes else None
