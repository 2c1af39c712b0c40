"""Still pictures of robots, traced on the CPU by MuJoCo C: no OpenGL, no display, no kernel to compile.

camera.py's ray tracer on MuJoCo Warp serves videos; it compiles kernels first, for seconds to minutes and anew for
other shapes. A picture or a sheet of them costs less than that: MuJoCo's own ray query returns distances and normals of
every kind of geom, and light and shadow are a few lines on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from nerd_coupling.robots import Robot, build_model
from nerd_coupling.terrain import Terrain

__all__ = ["contact_sheet", "picture"]

# Chosen here: all that follows, to look at and nothing else. From the robot towards the camera: its front left, above.
_VIEW = np.array((0.75, 0.58, 0.36)) / math.hypot(0.75, 0.58, 0.36)
_SLOPE = math.tan(math.radians(11.0))  # of half the picture's height: a long lens
_BORDER = 0.88  # the robot fills this part of the picture
_LIGHT = np.array((0.35, 0.75, 1.6))  # direction to the light, in sizes of the robot
_AMBIENT, _DIFFUSE = 0.45, 0.6
_SHADOW = 0.55
_SKY = np.array(((0.90, 0.93, 0.96), (0.98, 0.99, 1.0)))  # top, bottom
_TILES = np.array(((0.80, 0.82, 0.85), (0.87, 0.89, 0.91)))


def picture(robot: Robot, *, width: int = 360, height: int = 300, samples: int = 2) -> np.ndarray:
    """The robot at its home pose, with its objects, on level ground.

    Args:
        robot: The robot.
        width: Width [pixels].
        height: Height [pixels].
        samples: Rays per pixel and axis, averaged: 2 smooths edges and makes four rays per pixel.

    Returns:
        RGB, shape (height, width, 3) uint8.

    Raises:
        ValueError: If a size is not positive.
    """
    for name, value in (("width", width), ("height", height), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    mj_model = build_model(robot, Terrain(), num_boxes=0, with_objects=bool(robot.objects))
    data = mujoco.MjData(mj_model)
    data.qpos[: robot.spec.nq] = robot.home_qpos
    mujoco.mj_kinematics(mj_model, data)
    corners = _corners(mj_model, data)
    size = float(np.ptp(corners, axis=0).max())
    eye, rays = _camera(corners, width * samples, height * samples)
    colour = _shaded(mj_model, data, eye, rays, light=corners.mean(axis=0) + 6.0 * size * _LIGHT, tile=_tile(size))
    pixels = colour.reshape(height, samples, width, samples, 3).mean(axis=(1, 3))
    return (255.0 * pixels.clip(0.0, 1.0)).round().astype(np.uint8)


def contact_sheet(robots: Sequence[Robot], *, columns: int = 5) -> Any:
    """A matplotlib figure with one picture per robot; matplotlib comes with the extra ``nerd-coupling[plot]``.

    Args:
        robots: The robots, drawn row by row.
        columns: Pictures in a row.

    Raises:
        ValueError: If there is no robot, or no column.
    """
    if not robots:
        raise ValueError("robots is empty, expected at least one")
    if columns < 1:
        raise ValueError(f"columns is {columns}, expected at least 1")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(robots))
    rows = math.ceil(len(robots) / columns)
    figure = Figure(figsize=(2.6 * columns, 2.75 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, robot in zip(figure.subplots(rows, columns, squeeze=False).flat, robots, strict=False):
        axes.imshow(picture(robot), interpolation="lanczos")
        mass = mujoco.MjModel.from_xml_string(robot.mjcf).body_mass.sum()
        axes.set_title(robot.name, fontsize=11)
        axes.set_xlabel(f"{len(robot.spec.joints)} joints, {mass:.4g} kg", fontsize=8, color="#6f7680")
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_visible(bool(axes.images))
    return figure


def _tile(size: float) -> float:
    """Width of a ground tile [m]: 1, 2 or 5 times a power of ten, near a fifth of the robot's size."""
    power = 10.0 ** math.floor(math.log10(size / 5.0))
    return power * max(step for step in (1.0, 2.0, 5.0) if step * power <= size / 5.0)


def _corners(mj_model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    """Corners (n, 3) of the boxes around all moving geoms that are seen [m], world frame."""
    units = np.array(np.meshgrid((-1, 1), (-1, 1), (-1, 1))).reshape(3, -1).T
    found = []
    for g in range(mj_model.ngeom):
        if mj_model.geom_rgba[g, 3] > 0.0 and mj_model.geom_bodyid[g] > 0:
            centre, half = mj_model.geom_aabb[g, :3], mj_model.geom_aabb[g, 3:]
            found.append(data.geom_xpos[g] + (centre + units * half) @ data.geom_xmat[g].reshape(3, 3).T)
    return np.concatenate(found)


def _camera(corners: np.ndarray, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the camera stands so that the corners just fit, and its rays.

    Returns:
        Position (3) [m] and unit directions (height · width, 3), rows from top to bottom, world frame.
    """
    right = np.cross((0.0, 0.0, 1.0), _VIEW)
    right /= np.linalg.norm(right)
    axes = np.stack((right, np.cross(_VIEW, right), _VIEW))
    local = corners @ axes.T
    focus = (local.min(axis=0) + local.max(axis=0)) / 2.0
    across, up, near = (local - focus).T
    slope = np.array((_SLOPE * width / height, _SLOPE))
    reach = np.maximum(abs(across) / slope[0], abs(up) / slope[1]) / _BORDER
    eye = (focus + np.array((0.0, 0.0, (near + reach).max()))) @ axes
    u = ((np.arange(width) + 0.5) / width * 2.0 - 1.0) * slope[0]
    v = (1.0 - (np.arange(height) + 0.5) / height * 2.0) * slope[1]
    rays = np.stack((*np.meshgrid(u, v), np.full((height, width), -1.0)), -1).reshape(-1, 3) @ axes
    return eye, rays / np.linalg.norm(rays, axis=1, keepdims=True)


def _cast(
    mj_model: mujoco.MjModel, data: mujoco.MjData, origin: np.ndarray, rays: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First hits of rays from one point: geom (n) or -1, distance in lengths of the ray (n), normal (n, 3)."""
    count = len(rays)
    geom, distance = np.full(count, -1, np.int32), np.full(count, -1.0)
    normal = np.zeros(3 * count)
    mujoco.mj_multiRay(
        mj_model, data, origin, rays.ravel(), None, True, -1, geom, distance, normal, count, mujoco.mjMAXVAL
    )
    return geom, distance, normal.reshape(count, 3)


def _shaded(
    mj_model: mujoco.MjModel, data: mujoco.MjData, eye: np.ndarray, rays: np.ndarray, *, light: np.ndarray, tile: float
) -> np.ndarray:
    """Colours (n, 3) along the rays: a matt surface under one point light that casts shadows."""
    geom, distance, normal = _cast(mj_model, data, eye, rays)
    share = np.linspace(0.0, 1.0, len(rays))[:, None]
    colour = (1.0 - share) * _SKY[0] + share * _SKY[1]
    hit = np.flatnonzero(geom >= 0)
    point = eye + distance[hit, None] * rays[hit]
    paint = mj_model.geom_rgba[geom[hit], :3].astype(float)
    ground = mj_model.geom_type[geom[hit]] == mujoco.mjtGeom.mjGEOM_PLANE
    paint[ground] = _TILES[np.floor(point[ground, :2] / tile).sum(axis=1).astype(int) % 2]
    to_light = light - point
    towards = to_light / np.linalg.norm(to_light, axis=1, keepdims=True)
    facing = (normal[hit] * towards).sum(axis=1).clip(0.0)
    # From the light to the point: whatever is met before the point's own surface casts a shadow.
    _, met, _ = _cast(mj_model, data, light, -to_light)
    lit = np.where(met > 1.0 - 1e-4, 1.0, _SHADOW)
    colour[hit] = paint * (_AMBIENT + _DIFFUSE * facing * lit)[:, None]
    return colour
