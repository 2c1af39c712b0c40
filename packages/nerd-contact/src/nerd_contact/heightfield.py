"""Height fields: the signed distance of points to a triangulated grid of heights, in torch.

Grid point (r, c) stands at x = origin_x + c · spacing_x, y = origin_y + r · spacing_y and z = height[r, c]. Each cell
is cut along the diagonal from (r, c) to (r + 1, c + 1) into two triangles, as MuJoCo 3.17 cuts it for contacts and
rays. Static shapes, no branch on a value.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TILE", "HeightGrid", "cells_needed", "tile_maxima"]

TILE = 8
"""Cells on a side of a tile. Chosen here: a window of the default four cells lies on at most two by two tiles."""


def tile_maxima(height: Tensor) -> Tensor:
    """Largest height of each tile of ``TILE`` by ``TILE`` cells, border points included.

    Args:
        height: Heights [m], shape (..., R, C).

    Returns:
        Shape (..., ceil((R - 1) / TILE), ceil((C - 1) / TILE)); the last row and column of tiles may be cut short.
    """
    rows, cols = height.shape[-2:]
    wanted = [TILE * math.ceil((n - 1) / TILE) + 1 for n in (rows, cols)]
    flat = height.reshape(-1, 1, rows, cols)
    grown = torch.nn.functional.pad(flat, (0, wanted[1] - cols, 0, wanted[0] - rows), value=-torch.inf)
    tiles = torch.nn.functional.max_pool2d(grown, TILE + 1, TILE)
    return tiles.reshape(*height.shape[:-2], *tiles.shape[-2:])


def cells_needed(spacing: float, reach: float) -> int:
    """Cells on a side of the window that holds everything within ``reach`` [m] of a point, at a grid ``spacing`` [m].

    Args:
        spacing: The smaller of the two spacings [m].
        reach: A probe's radius and the margin together [m].
    """
    for name, value in (("spacing", spacing), ("reach", reach)):
        if not value > 0:
            raise ValueError(f"{name} is {value}, expected a positive length [m]")
    return max(1, math.ceil(2 * reach / spacing - 1e-6) + 1)


class HeightGrid(NamedTuple):
    """A grid of heights with axes for the points that are asked about.

    Attributes:
        height: Heights, world z [m], shape (..., R, C); rows along y, columns along x; at least two of each.
        origin: World x, y of the grid point (0, 0) [m], shape (..., 2).
        spacing: Distance of neighbouring columns, of neighbouring rows [m], shape (..., 2).
        tiles: :func:`tile_maxima` of the heights.
    """

    height: Tensor
    origin: Tensor
    spacing: Tensor
    tiles: Tensor

    @classmethod
    def read(cls, scene: Mapping[str, Tensor], like: Tensor) -> "HeightGrid":
        """The ``hfield_*`` entries of a scene of leading size B, for states ``like`` of shape (B, ..., nq + nv).

        ``hfield_tile`` may be missing; it is then found from the heights.

        Raises:
            ValueError: Where an entry is missing or the grid has fewer than two rows or columns.
        """
        missing = [k for k in ("hfield_height", "hfield_origin", "hfield_spacing") if k not in scene]
        if missing:
            raise ValueError(f"scene lacks {', '.join(missing)}, expected every hfield_ entry or none")
        height = scene["hfield_height"]
        if min(height.shape[-2:]) < 2:
            raise ValueError(f"hfield_height has shape {tuple(height.shape)}, expected at least 2 rows and 2 columns")
        tiles = scene["hfield_tile"] if "hfield_tile" in scene else tile_maxima(height)
        extra = [1] * (like.dim() - 2)
        values = (height, scene["hfield_origin"], scene["hfield_spacing"], tiles)
        return cls(*(v.reshape(v.shape[0], *extra, *v.shape[1:]).to(like.dtype) for v in values))

    def above(self, point: Tensor) -> Tensor:
        """Height [m] of points (..., P, 3) over the triangle below or above them, shape (..., P).

        Negative inside the ground, and infinite beyond the grid's border.
        """
        place = (point[..., :2] - self.origin[..., None, :]) / self.spacing[..., None, :]  # columns, rows
        low = _whole(place, self.height.shape, 1)
        u, v = (place - low).unbind(-1)
        z = _gather(self.height, _corners(low, 1, 1, self.height.shape[-1]))  # (..., P, 2, 2)
        z00, z01, z10, z11 = z.flatten(-2).unbind(-1)
        # Over the triangle (0,0) (0,1) (1,1) the column comes first, over (0,0) (1,0) (1,1) the row.
        ground = z00 + torch.where(u >= v, u * (z01 - z00) + v * (z11 - z01), v * (z10 - z00) + u * (z11 - z10))
        beyond = (torch.minimum(u, v) < 0) | (torch.maximum(u, v) > 1)
        return torch.where(beyond, torch.inf, point[..., 2] - ground)

    def clearance(self, point: Tensor, cells: int) -> Tensor:
        """Height [m] of points (..., P, 3) over the highest tile that their window touches, shape (..., P).

        No part of the surface inside the window is nearer than that.
        """
        rows, cols = self.height.shape[-2:]
        place = (point[..., :2] - self.origin[..., None, :]) / self.spacing[..., None, :]
        low = _whole(place, self.height.shape, cells).div(TILE, rounding_mode="floor")
        down, right = self.tiles.shape[-2:]
        tall, wide = ((min(cells, n - 1) + TILE - 2) // TILE + 1 for n in (rows, cols))
        tall, wide = min(tall, down), min(wide, right)
        first = torch.stack([low[..., 0].clamp(max=right - wide), low[..., 1].clamp(max=down - tall)], -1)
        index = _corners(first, tall - 1, wide - 1, right)
        return point[..., 2] - _gather(self.tiles, index).flatten(-2).amax(-1)

    def distance(self, point: Tensor, cells: int) -> tuple[Tensor, Tensor]:
        """Signed distance [m] of points (..., P, 3) to the surface, shape (..., P), and its gradient, (..., P, 3).

        Negative below the surface. Searched is a window of ``cells`` by ``cells`` cells round each point: distances
        up to (cells - 1) / 2 spacings are exact, larger ones may come out too large, never too small. The surface
        ends with the grid: neither walls nor a bottom.

        Source: closest points of triangles by their Voronoi regions, Ericson, Real-Time Collision Detection, 2005,
        Sec. 5.1. Chosen here: the search for the nearest triangle has no gradient; its distance is found anew with
        one, for one triangle a point.
        """
        shape = self.height.shape
        rows, cols = min(cells, shape[-2] - 1), min(cells, shape[-1] - 1)
        place = (point[..., :2] - self.origin[..., None, :]) / self.spacing[..., None, :]
        low = _whole(place, shape, cells)
        # Heights and places relative to the point: distances to the origin from here on.
        z = _gather(self.height, _corners(low, rows, cols, shape[-1])) - point[..., 2, None, None]
        lead = self.origin[..., None, :] + low * self.spacing[..., None, :] - point[..., :2]
        step = self.spacing[..., None, :].expand(lead.shape)
        nearest = _nearest(z.detach(), lead.detach(), step.detach())  # (..., P) of 2 · rows · cols triangles
        half, cell = nearest % 2, nearest.div(2, rounding_mode="floor")
        row, col = cell.div(cols, rounding_mode="floor"), cell % cols
        corner = row * (cols + 1) + col
        flat = z.flatten(-2)

        def vertex(down: Tensor | int, right: Tensor | int) -> Tensor:
            at = corner + down * (cols + 1) + right
            x = lead[..., 0] + (col + right) * step[..., 0]
            y = lead[..., 1] + (row + down) * step[..., 1]
            return torch.stack([x, y, flat.gather(-1, at[..., None])[..., 0]], -1)

        # Half 0 is (0,0) (0,1) (1,1), half 1 is (0,0) (1,1) (1,0): anticlockwise from above.
        a, far, side = vertex(0, 0), vertex(1, 1), vertex(half, 1 - half)
        lower = (half == 0)[..., None]
        b, c = torch.where(lower, side, far), torch.where(lower, far, side)
        return _from_triangle(a, b, c, self.above(point).detach() < 0)


def _whole(place: Tensor, shape: torch.Size, cells: int) -> Tensor:
    """Column and row, int64, of the first cell of a window round each place, shifted into the grid."""
    rows, cols = min(cells, shape[-2] - 1), min(cells, shape[-1] - 1)
    # A place that is no number or out of all bounds still has to give an index.
    col = (place[..., 0] - (cols - 1) / 2).floor().nan_to_num(0.0).clamp(0, shape[-1] - 1 - cols)
    row = (place[..., 1] - (rows - 1) / 2).floor().nan_to_num(0.0).clamp(0, shape[-2] - 1 - rows)
    return torch.stack([col, row], -1).long()


def _corners(low: Tensor, rows: int, cols: int, width: int) -> Tensor:
    """Flat indices (..., P, rows + 1, cols + 1) of the grid points of windows that begin at (column, row) ``low``."""
    down = torch.arange(rows + 1, device=low.device)
    right = torch.arange(cols + 1, device=low.device)
    return (low[..., 1, None] + down)[..., :, None] * width + (low[..., 0, None] + right)[..., None, :]


def _gather(grid: Tensor, index: Tensor) -> Tensor:
    """Entries of grids (..., R, C) at flat indices (..., P, r, c)."""
    lead = index.shape[:-3]
    flat = grid.flatten(-2)
    return flat.expand(*lead, flat.shape[-1]).gather(-1, index.flatten(-3)).view(index.shape)


def _nearest(z: Tensor, lead: Tensor, step: Tensor) -> Tensor:
    """Index, row-major with the two halves of a cell in turn, of the triangle nearest to the origin, shape (..., P).

    Args:
        z: Heights of the window's points less the point's, shape (..., P, rows + 1, cols + 1).
        lead: x, y of the window's first corner less the point's, shape (..., P, 2).
        step: Spacings, shape (..., P, 2).
    """
    rows, cols = z.shape[-2] - 1, z.shape[-1] - 1
    right = torch.arange(cols + 1, device=z.device)
    down = torch.arange(rows + 1, device=z.device)
    dx, dy = step[..., 0, None, None], step[..., 1, None, None]
    x = lead[..., 0, None, None] + right * dx  # (..., P, 1, cols + 1)
    y = lead[..., 1, None, None] + down[:, None] * dy  # (..., P, rows + 1, 1)
    along = _segment(x[..., :-1], y, z[..., :-1], dx, None, z[..., 1:] - z[..., :-1])  # edges of constant y
    across = _segment(x, y[..., :-1, :], z[..., :-1, :], None, dy, z[..., 1:, :] - z[..., :-1, :])
    z00, z01, z10, z11 = z[..., :-1, :-1], z[..., :-1, 1:], z[..., 1:, :-1], z[..., 1:, 1:]
    x0, y0 = x[..., :-1], y[..., :-1, :]
    between = _segment(x0, y0, z00, dx, dy, z11 - z00)  # diagonals
    lower = _face(x0, y0, z00, (z01 - z00) / dx, (z11 - z01) / dy, dx, dy, lower=True)
    upper = _face(x0, y0, z00, (z11 - z10) / dx, (z10 - z00) / dy, dx, dy, lower=False)
    lower = torch.minimum(torch.minimum(lower, between), torch.minimum(along[..., :-1, :], across[..., 1:]))
    upper = torch.minimum(torch.minimum(upper, between), torch.minimum(along[..., 1:, :], across[..., :-1]))
    return torch.stack([lower, upper], -1).flatten(-3).argmin(-1)


def _segment(x: Tensor, y: Tensor, z: Tensor, dx: Tensor | None, dy: Tensor | None, dz: Tensor) -> Tensor:
    """Squared distance of the origin to segments from (x, y, z) by (dx, dy, dz); None for a step of 0."""
    dot, length = z * dz, dz * dz
    if dx is not None:
        dot, length = dot + x * dx, length + dx * dx
    if dy is not None:
        dot, length = dot + y * dy, length + dy * dy
    t = (-dot / length).clamp(0, 1)
    qx = x if dx is None else x + t * dx
    qy = y if dy is None else y + t * dy
    qz = z + t * dz
    return qx * qx + qy * qy + qz * qz


def _face(x: Tensor, y: Tensor, z: Tensor, sx: Tensor, sy: Tensor, dx: Tensor, dy: Tensor, *, lower: bool) -> Tensor:
    """Squared distance of the origin to planes through (x, y, z) of slopes sx, sy; infinite beside the triangle."""
    squared = 1 + sx * sx + sy * sy
    height = (sx * x + sy * y - z) / squared  # of the origin over the plane, and once more over the root
    u, v = (height * sx - x) / dx, (height * sy - y) / dy  # the foot, in cells
    inside = (v >= 0) & (u >= v) & (u <= 1) if lower else (u >= 0) & (v >= u) & (v <= 1)
    return torch.where(inside, height * height * squared, torch.inf)


def _from_triangle(a: Tensor, b: Tensor, c: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """Signed distance of the origin to triangles, anticlockwise from above, (..., 3) each, and its gradient."""
    cross = torch.linalg.cross(b - a, c - a)
    normal = cross / cross.norm(dim=-1, keepdim=True)
    plane = -(a * normal).sum(-1)  # over the face
    foot = -plane[..., None] * normal
    edges = ((a, b), (b, c), (c, a))
    left = [(torch.linalg.cross(q - p, foot - p) * normal).sum(-1) for p, q in edges]
    inside = torch.minimum(torch.minimum(left[0], left[1]), left[2]) >= 0
    closest, best = a, (a * a).sum(-1, keepdim=True)
    for p, q in edges:
        side = q - p
        t = (-(p * side).sum(-1, keepdim=True) / (side * side).sum(-1, keepdim=True)).clamp(0, 1)
        on = p + t * side
        squared = (on * on).sum(-1, keepdim=True)
        nearer = squared < best
        closest, best = torch.where(nearer, on, closest), torch.where(nearer, squared, best)
    # On an edge itself the direction is the face's; the guarded root keeps the gradient of either branch finite.
    face = (inside | (best[..., 0] < 1e-20))[..., None]
    length = torch.where(face, torch.ones_like(best), best).sqrt()
    sign = torch.where(below, -1.0, 1.0).to(best.dtype)[..., None]
    distance = torch.where(face, plane[..., None], sign * length)[..., 0]
    return distance, torch.where(face, normal, -sign * closest / length)
