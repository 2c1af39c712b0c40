"""Height fields: rough ground as a value, and the same surface in a MuJoCo model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco
import numpy as np

__all__ = ["HeightField", "add_field", "set_field"]

FIELD = "field"
"""Name of the body, the geom and the asset that hold a height field in a MuJoCo model."""

# Thickness of the ground under the lowest point [m]. Chosen here: more than any foot can sink in a step.
_BASE = 1.0
_ABSENT = -100.0


@dataclass(frozen=True, kw_only=True)
class HeightField:
    """A static grid of heights, triangulated as MuJoCo does: along the diagonal from (r, c) to (r + 1, c + 1).

    It stands beside the plane of its terrain; where it dips under the plane, move the plane down
    (``Terrain.floor_offset``).

    Attributes:
        heights: World z of the grid points [m], one tuple per row; rows along y, columns along x.
        origin: World x, y of the first point of the first row [m].
        spacing: Distance of neighbouring columns and of neighbouring rows [m].
        friction: Sliding friction coefficient; the larger one of a touching pair counts.
    """

    heights: tuple[tuple[float, ...], ...]
    origin: tuple[float, float]
    spacing: tuple[float, float]
    friction: float = 0.8

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.heights}
        if len(self.heights) < 2 or len(widths) != 1 or min(widths) < 2:
            raise ValueError(
                f"heights has {len(self.heights)} rows of {sorted(widths)} values, expected at least 2 rows of equally "
                "many values, at least 2"
            )
        if not all(math.isfinite(z) for row in self.heights for z in row):
            raise ValueError("heights holds a value that is not finite, expected lengths in metres")
        if len(self.origin) != 2 or not all(math.isfinite(v) for v in self.origin):
            raise ValueError(f"origin is {self.origin}, expected two finite lengths in metres")
        if len(self.spacing) != 2 or not all(math.isfinite(v) and v > 0.0 for v in self.spacing):
            raise ValueError(f"spacing is {self.spacing}, expected two positive lengths in metres")
        if not (math.isfinite(self.friction) and self.friction > 0.0):
            raise ValueError(f"friction must be a positive coefficient, got {self.friction}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of grid points."""
        return len(self.heights), len(self.heights[0])

    @classmethod
    def absent(cls, shape: tuple[int, int]) -> HeightField:
        """A field of that shape out of reach of every collider, for terrains without one."""
        return cls(heights=((_ABSENT,) * shape[1],) * shape[0], origin=(0.0, 0.0), spacing=(1.0, 1.0))


def add_field(spec: mujoco.MjSpec, shape: tuple[int, int], **ground: float) -> None:
    """Give an uncompiled model a height field out of reach; :func:`set_field` places it in the compiled model.

    Args:
        spec: The model.
        shape: Rows and columns of grid points.
        ground: Attributes of the geom (contype, conaffinity ...).
    """
    rows, cols = shape
    size = [0.5 * (cols - 1), 0.5 * (rows - 1), 1.0, _BASE]
    spec.add_hfield(name=FIELD, size=size, nrow=rows, ncol=cols, userdata=np.zeros(rows * cols, dtype=np.float32))
    # Explicit, massless inertia, as the boxes of a terrain have: the geom is moved later on.
    body = spec.worldbody.add_body(
        name=FIELD, explicitinertial=True, mass=0.0, ipos=[0.0, 0.0, 0.0], inertia=[0.0, 0.0, 0.0]
    )
    body.add_geom(name=FIELD, type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname=FIELD, mass=0.0, **ground)


def set_field(mj_model: mujoco.MjModel, field: HeightField | None) -> None:
    """Put a height field where a compiled model has room for one, in place; None puts it out of reach.

    MuJoCo keeps elevations as float32 fractions of the range of heights, and the grid's middle as the geom's place.

    Raises:
        ValueError: If the model has no room, or room of another shape.
    """
    identity = mujoco.mj_name2id(mj_model, mujoco.mjtObj.mjOBJ_HFIELD, FIELD)
    if identity < 0:
        if field is not None:
            raise ValueError(f"terrain has a height field of {field.shape} points, expected none: the model has none")
        return
    shape = int(mj_model.hfield_nrow[identity]), int(mj_model.hfield_ncol[identity])
    field = HeightField.absent(shape) if field is None else field
    if field.shape != shape:
        raise ValueError(f"terrain has a height field of {field.shape} points, expected {shape}, the model's")
    heights = np.array(field.heights)
    low, range_ = heights.min(), float(np.ptp(heights)) or 1.0
    half = [0.5 * step * (count - 1) for step, count in zip(field.spacing, shape[::-1], strict=True)]
    first = mj_model.hfield_adr[identity]
    mj_model.hfield_data[first : first + heights.size] = ((heights - low) / range_).ravel()
    mj_model.hfield_size[identity] = [*half, range_, _BASE]
    geom = mj_model.geom(FIELD).id
    body = int(mj_model.geom_bodyid[geom])
    mj_model.body_pos[body] = [field.origin[0] + half[0], field.origin[1] + half[1], low]
    mj_model.geom_friction[geom, 0] = field.friction
    # The bounding volumes of the broad phase, as the compiler of MuJoCo 3.17 writes them.
    middle, reach = [0.0, 0.0, 0.5 * (range_ - _BASE)], [*half, 0.5 * (range_ + _BASE)]
    mj_model.geom_size[geom] = [*half, 0.25 * range_ + 0.5 * _BASE]
    mj_model.geom_aabb[geom] = middle + reach
    mj_model.geom_rbound[geom] = math.hypot(*half, max(range_, _BASE))
    mj_model.bvh_aabb[mj_model.body_bvhadr[body]] = middle + reach
