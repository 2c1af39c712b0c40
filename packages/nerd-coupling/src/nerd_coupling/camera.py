"""Pictures of a robot on a terrain by MuJoCo Warp's ray tracer: no OpenGL, no display.

A picture shows given states; nothing is simulated. The robot is compiled once more with lights,
textures, a camera and cosmetic shapes, so that the models that simulate stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from torch import Tensor

from nerd_coupling.robots import Robot, build_model, num_boxes
from nerd_coupling.terrain import Terrain
from nerd_coupling.warp_worlds import _quiet
from nerd_coupling.worlds import check_state

# From what the camera looks at towards it: the robot's right, a little ahead, from above.
_VIEW = (0.42, -0.84, 0.40)
_FOVY = 22.0  # [degrees] a long lens keeps the deck's edges nearly parallel
_BORDER = 0.94  # the framed points fill this part of the picture
# Corners of what a standing robot at the origin fills, tail to nose [m].
_START = ((-0.48, -0.2, 0.0), (0.4, 0.25, 0.42))
_HEADROOM = 0.40  # [m] above a box: a robot standing on it
_CAMERA = "picture"

# Drawn and never simulated: body, shape, centre and half size in the body's frame [m], colour. The
# Go2's colliders are two spheres for a head, floating in front of a bare trunk.
_BOX, _ELLIPSOID = mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_ELLIPSOID
_LIGHT, _DARK = (0.86, 0.88, 0.90, 1.0), (0.16, 0.18, 0.21, 1.0)
_COSMETICS = {
    "go2": (
        ("base", _BOX, (-0.01, 0.0, 0.004), (0.16, 0.066, 0.046), _LIGHT),
        ("base", _BOX, (0.225, 0.0, -0.008), (0.05, 0.036, 0.034), _DARK),
        ("base", _ELLIPSOID, (0.285, 0.0, -0.022), (0.056, 0.06, 0.09), _DARK),
    )
}

# MuJoCo's default colour of a geom, which lets the material's colour through.
_BY_MATERIAL = (0.5, 0.5, 0.5, 1.0)
# Geoms get their materials after compiling, by these names.
_FLOOR, _DECK = "tiles", "deck"
# The extent is fixed: it enters the kernel as a constant, and every deck would compile its own.
_SCENE = f"""
<statistic extent="1"/>
<visual>
  <headlight ambient="0.36 0.36 0.38" diffuse="0.2 0.2 0.2" specular="0 0 0"/>
  <map znear="0.01" zfar="60"/>
</visual>
<asset>
  <texture name="sky" type="skybox" builtin="gradient" rgb1="0.93 0.95 0.98" rgb2="0.7 0.78 0.86"
    width="64" height="384"/>
  <texture name="{_FLOOR}" type="2d" builtin="checker" rgb1="0.86 0.87 0.89" rgb2="0.74 0.76 0.80"
    width="128" height="128"/>
  <material name="{_FLOOR}" texture="{_FLOOR}" texrepeat="4 4" specular="0" shininess="0"/>
  <material name="{_DECK}" rgba="0.20 0.56 0.68 1" specular="0.1" shininess="0.3"/>
</asset>
<worldbody>
  <light type="directional" dir="-0.3 0.5 -1" castshadow="true" diffuse="0.62 0.61 0.58"
    specular="0.3 0.3 0.3"/>
</worldbody>
"""


class RayCamera:
    """A fixed camera ahead and to the left of the robot's start that sees the start and all boxes.

    On one CPU core a picture of the default size takes about 0.2 s. The first one takes 10 s more
    where the kernels are not in Warp's cache yet.

    Args:
        robot: The robot.
        terrain: What it stands on.
        width: Width of a picture [pixels].
        height: Height of a picture [pixels].
        batch: States traced in one launch; memory grows with it.
        samples: Rays per pixel and axis, averaged: 2 smooths edges and makes four rays per pixel.
        device: ``cpu`` or a CUDA device such as ``cuda:0``.

    Attributes:
        width: Width of a picture [pixels].
        height: Height of a picture [pixels].

    Raises:
        ValueError: If a size is not positive or the device is not available.
    """

    def __init__(
        self,
        robot: Robot,
        terrain: Terrain,
        *,
        width: int = 512,
        height: int = 288,
        batch: int = 4,
        samples: int = 2,
        device: str = "cpu",
    ) -> None:
        sizes = {"width": width, "height": height, "batch": batch, "samples": samples}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.width, self.height = width, height
        self._nq, self._state_size = robot.spec.nq, robot.spec.state_size
        self._device = torch.device(device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but no CUDA device is available")
        self._batch = batch
        mj_model = _dressed(robot, terrain, width / height)
        with self._on_device():
            self._model = mjw.put_model(mj_model)
            self._data = mjw.put_data(mj_model, mujoco.MjData(mj_model), nworld=batch)
            self._context = mjw.create_render_context(
                mj_model,
                nworld=batch,
                cam_res=(width, height),
                render_rgb=True,
                render_depth=False,
                render_seg=False,
                use_shadows=True,
                render_skybox=True,
                samples_per_pixel=samples,
            )
            self._rgb = wp.zeros((batch, height, width), dtype=wp.vec3)

    def render(self, states: Tensor) -> Tensor:
        """Pictures of states.

        Args:
            states: qpos and qvel in MuJoCo order, shape (N, nq + nv); only qpos matters. A state
                with a value that is not finite gives a black picture.

        Returns:
            RGB, shape (N, height, width, 3) uint8 on the CPU.

        Raises:
            ValueError: If the shape does not fit.
        """
        check_state(states, states.shape[0], self._state_size)
        if not len(states):
            return torch.zeros(0, self.height, self.width, 3, dtype=torch.uint8)
        qpos = states[:, : self._nq].detach().to(self._device, torch.float32)
        rgb = torch.cat([self._trace(part) for part in qpos.split(self._batch)])
        rgb[~torch.isfinite(states).all(dim=1).cpu()] = 0
        return rgb

    def _trace(self, qpos: Tensor) -> Tensor:
        """One launch: at most ``batch`` configurations; the other worlds repeat the last one."""
        # A NaN in a bounding volume would spoil the tree that all worlds share.
        rows = torch.nan_to_num(qpos, 0.0, 0.0, 0.0)
        rows = torch.cat((rows, rows[-1:].expand(self._batch - rows.shape[0], -1)))
        with self._on_device():
            wp.to_torch(self._data.qpos).copy_(rows)
            mjw.kinematics(self._model, self._data)
            mjw.camlight(self._model, self._data)
            mjw.refit_bvh(self._model, self._data, self._context)
            mjw.render(self._model, self._data, self._context)
            mjw.get_rgb(self._context, 0, self._rgb)
            rgb = wp.to_torch(self._rgb)[: qpos.shape[0]]
        return (255.0 * rgb).round().to("cpu", torch.uint8)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Warp on our device and, on CUDA, on torch's own stream, so that both agree on order."""
        with _quiet(), wp.ScopedDevice(str(self._device)):
            stream = (
                wp.ScopedStream(wp.stream_from_torch(torch.cuda.current_stream(self._device)))
                if self._device.type == "cuda"
                else nullcontext()
            )
            with stream:
                yield


def _dressed(robot: Robot, terrain: Terrain, aspect: float) -> mujoco.MjModel:
    """The robot on the terrain, with everything that only a picture needs."""
    spec = mujoco.MjSpec.from_string(robot.mjcf.replace("</mujoco>", f"{_SCENE}</mujoco>"))
    for body, shape, center, half_size, colour in _COSMETICS.get(robot.name, ()):
        spec.body(body).add_geom(type=shape, pos=center, size=half_size, rgba=colour)
    position, axes = _viewpoint(terrain, aspect)
    camera = spec.worldbody.add_camera(name=_CAMERA, pos=position, fovy=_FOVY)
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = axes
    spec.compile()
    mj_model = build_model(replace(robot, mjcf=spec.to_xml()), terrain, num_boxes=max(1, len(terrain.boxes)))
    for name in ("floor", *(f"box{i}" for i in range(num_boxes(mj_model)))):
        geom = mj_model.geom(name).id
        mj_model.geom_matid[geom] = mj_model.material(_FLOOR if name == "floor" else _DECK).id
        mj_model.geom_rgba[geom] = _BY_MATERIAL
    return mj_model


def _viewpoint(terrain: Terrain, aspect: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the camera stands so that the framed points just fit.

    Returns:
        Position (3) [m] and the picture's x and y axes (6), world frame.
    """
    points = _framed(terrain)
    back = np.array(_VIEW) / np.linalg.norm(_VIEW)
    right = np.cross((0.0, 0.0, 1.0), back)
    right /= np.linalg.norm(right)
    up = np.cross(back, right)
    slope = np.tan(np.radians(0.5 * _FOVY)) * _BORDER
    focus = points.mean(axis=0)
    distance = 1.0
    # A point shifts in the picture when the camera backs off: recentre and fit in turns.
    for _ in range(20):
        local = (points - focus) @ np.stack((right, up, back), axis=1)
        depth = distance - local[:, 2]
        u, v = local[:, 0] / depth, local[:, 1] / depth
        focus = focus + distance * (0.5 * (u.max() + u.min()) * right + 0.5 * (v.max() + v.min()) * up)
        local = (points - focus) @ np.stack((right, up, back), axis=1)
        reach = np.maximum(np.abs(local[:, 0]) / aspect, np.abs(local[:, 1])) / slope
        distance = float((reach + local[:, 2]).max())
    return focus + distance * back, np.concatenate((right, up))


def _framed(terrain: Terrain) -> np.ndarray:
    """Corners (n, 3) [m] of the start and of every box with a robot on top, world frame."""
    corners = []
    for box in terrain.boxes:
        c, s = np.cos(box.yaw), np.sin(box.yaw)
        x, y, _ = box.half_size
        for sx, sy in ((-x, -y), (-x, y), (x, -y), (x, y)):
            place = (box.center[0] + c * sx - s * sy, box.center[1] + s * sx + c * sy)
            corners += [(*place, 0.0), (*place, max(box.top, 0.0) + _HEADROOM)]
    (low, high) = _START
    corners += [(x, y, z) for x in (low[0], high[0]) for y in (low[1], high[1]) for z in (low[2], high[2])]
    return np.array(corners)
