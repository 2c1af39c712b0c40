"""Where a robot is in a Newton model, and its state in either convention.

Newton 1.8 writes a quaternion x y z w and a free joint's velocity as that of the child's centre of mass followed by the
angular velocity, both along world axes. Ours is MuJoCo's: w x y z, the velocity of the base's origin along world axes,
the angular velocity along the base's own. With the base's orientation R and its centre of mass c in its own frame:

    v_origin = v_com - ω_world × R c,    ω_base = Rᵀ ω_world

Source: Newton 1.8, ``State.joint_qd`` and ``eval_joint_child_state``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import newton
import numpy as np
import torch
import warp as wp
from torch import Tensor

from nerd_contact import Probe
from nerd_core import RobotSpec
from nerd_core.rotation import rotate, rotate_inverse

from .launches import on_device
from .newton_identity import Placement, differences, last_name, numbers, refuse_differences, rest_poses
from .robots import Robot
from .worlds import check_state

__all__ = ["NewtonRobot", "add_robot", "find_robot"]

# Newton's x y z w in the order w x y z.
_WXYZ = (3, 0, 1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class NewtonRobot:
    """One robot in each of B worlds of a Newton model.

    Attributes:
        spec: The robot.
        model: Newton's model.
        placement: Bodies, joints and articulations of the robot there.
        coords: Entries of ``State.joint_q`` that are our positions, in our order, shape (B, nq), int64.
        dofs: Entries of ``State.joint_qd`` that are our velocities, in our order, shape (B, nv), int64.
        links: Bodies that are our links, shape (B, links), int64.
        com: Centre of mass of the base in its own frame [m], shape (3,).
        origin: What a floating base's joint coordinates are relative to, and where the world of a fixed base's
            RobotSpec is, Newton's world frame [m], shape (B, 3).
    """

    spec: RobotSpec
    model: newton.Model
    placement: Placement
    coords: Tensor
    dofs: Tensor
    links: Tensor
    com: Tensor
    origin: Tensor

    @property
    def nworld(self) -> int:
        """Worlds B."""
        return len(self.links)

    @property
    def device(self) -> torch.device:
        """Where the model's arrays are."""
        return self.coords.device

    def raw(self, state: newton.State) -> Tensor:
        """The robot's joint coordinates and velocities as Newton holds them, shape (B, nq + nv) float32."""
        return torch.cat([self._array(state, "joint_q")[self.coords], self._array(state, "joint_qd")[self.dofs]], -1)

    def read(self, state: newton.State) -> Tensor:
        """The robot's state in our convention, shape (B, nq + nv) float32; [m, rad, m/s, rad/s], world.

        Raises:
            ValueError: If the state's arrays are not those of the model.
        """
        return self.from_newton(self.raw(state))

    def write(self, values: Tensor, state: newton.State, mask: Tensor | None = None) -> None:
        """Write states of ours into a Newton state, bodies included, in place; everything else there stays.

        Args:
            values: qpos and qvel, shape (B, nq + nv).
            state: Newton's state.
            mask: Worlds to write, shape (B,) bool. Default: all.

        Raises:
            ValueError: If a shape does not fit.
        """
        check_state(values, self.nworld, self.spec.state_size)
        rows = self.to_newton(values.detach().to(self.device, torch.float32))
        if mask is not None:
            if tuple(mask.shape) != (self.nworld,) or mask.dtype != torch.bool:
                shape = tuple(mask.shape)
                raise ValueError(f"mask has shape {shape} and type {mask.dtype}, expected ({self.nworld},) bool")
            rows = torch.where(mask.to(self.device)[:, None], rows, self.raw(state))
        with on_device(self.device):
            self.put(rows, state)

    def put(self, rows: Tensor, state: newton.State) -> None:
        """Write rows of :meth:`raw` and the bodies that follow, on Warp's and torch's common stream."""
        self._array(state, "joint_q")[self.coords] = rows[:, : self.spec.nq]
        self._array(state, "joint_qd")[self.dofs] = rows[:, self.spec.nq :]
        arrays: tuple[Any, Any] = (state.joint_q, state.joint_qd)
        newton.eval_fk(self.model, *arrays, state, mask=self.placement.articulations)

    def from_newton(self, rows: Tensor) -> Tensor:
        """Our states (B, nq + nv) from rows of :meth:`raw`."""
        if not self.spec.floating:
            return rows
        nq = self.spec.nq
        quat, angular = rows[:, 3:7], rows[:, nq + 3 : nq + 6]
        linear = rows[:, nq : nq + 3] - torch.linalg.cross(angular, rotate(quat, self.com.expand(len(rows), 3)))
        return torch.cat(
            [rows[:, :3] + self.origin, rows[:, 3:nq], linear, rotate_inverse(quat, angular), rows[:, nq + 6 :]], -1
        )

    def to_newton(self, values: Tensor) -> Tensor:
        """Rows of :meth:`raw` from our states (B, nq + nv); inverts :meth:`from_newton`."""
        if not self.spec.floating:
            return values
        nq = self.spec.nq
        quat = values[:, 3:7]
        angular = rotate(quat, values[:, nq + 3 : nq + 6])
        linear = values[:, nq : nq + 3] + torch.linalg.cross(angular, rotate(quat, self.com.expand(len(values), 3)))
        return torch.cat([values[:, :3] - self.origin, values[:, 3:nq], linear, angular, values[:, nq + 6 :]], -1)

    def _array(self, holder: Any, name: str) -> Tensor:
        """A view of a flat array that has one entry per coordinate or velocity of the whole model."""
        count = self.model.joint_coord_count if name in ("joint_q", "joint_target_q") else self.model.joint_dof_count
        return flat_view(holder, name, (count,), self.device)


def flat_view(holder: Any, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A zero-copy torch view of a Warp array, whatever its strides.

    Raises:
        ValueError: If the array is missing, of another shape, or on another device.
    """
    array = getattr(holder, name, None)
    if not isinstance(array, wp.array):
        raise ValueError(f"{name} is {array!r}, expected a Warp array of {shape[0]} entries, as the model's")
    view = wp.to_torch(array, requires_grad=False).detach()
    if tuple(view.shape) != shape or view.device != device:
        raise ValueError(
            f"{name} has shape {tuple(view.shape)} on {view.device}, expected {shape} on {device}, as the model has"
        )
    return view


def find_robot(model: newton.Model, robot: Robot) -> NewtonRobot:
    """Look a robot up in every world of a Newton model, by the names of its links, and compare it in everything.

    A link's name is the last part of its body's label, so ``go2/worldbody/base/FR_hip`` is FR_hip.

    Args:
        model: Newton's model; the robot once in each world, beside static and kinematic bodies.
        robot: The robot as it was recorded: tree, gains and limits, and, in its MJCF, masses, armature, damping and
            gravity.

    Raises:
        ValueError: If it is not there, or differs; the message names what and by how much.
    """
    placement = Placement.find(model, robot.spec)
    refuse_differences(differences(model, robot, placement), robot.name)
    spec, device = robot.spec, wp.device_to_torch(model.device)
    q_start, qd_start = numbers(model, "joint_q_start"), numbers(model, "joint_qd_start")
    joints = placement.joints[:, [joint.body for joint in spec.joints]]
    coords, dofs = q_start[joints], qd_start[joints]
    positions = rest_poses(model, placement)[0][:, 0]  # (B, 3)
    com = np.zeros(3)
    if spec.floating:
        base = placement.joints[:, :1]
        coords = np.concatenate([q_start[base] + np.arange(3), q_start[base] + 3 + np.array(_WXYZ), coords], 1)
        dofs = np.concatenate([qd_start[base] + np.arange(6), dofs], 1)
        com = numbers(model, "body_com")[placement.links[0, 0]]
        origin = positions
    else:
        origin = positions - np.array(spec.bodies[0].pos)

    def there(values: np.ndarray, kind: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    return NewtonRobot(
        spec=spec,
        model=model,
        placement=placement,
        coords=there(coords, torch.int64),
        dofs=there(dofs, torch.int64),
        links=there(placement.links, torch.int64),
        com=there(com, torch.float32),
        origin=there(origin, torch.float32),
    )


def add_robot(
    builder: newton.ModelBuilder, robot: Robot, *, probes: tuple[Probe, ...] | None = None, gap: float = 0.1
) -> None:
    """Add a robot to a Newton builder, in its home configuration, with the colliders that a learned model knows.

    Its links touch through the probes, spheres without mass: Newton then lists the rows of
    :class:`nerd_contact.PrimitiveCollider`. The robot's own capsules would give two rows where that has one per sample.

    Args:
        builder: The builder of one world, or of all.
        robot: The robot.
        probes: Its spheres; by default the robot's own.
        gap: Distance at which Newton lists contacts of the spheres, the other shape's own added [m].
    """
    first_shape, first_body, first_q = builder.shape_count, builder.body_count, builder.joint_coord_count
    builder.add_mjcf(robot.mjcf, parse_visuals=False, parse_sites=False)
    for shape in range(first_shape, builder.shape_count):
        if builder.shape_body[shape] >= first_body:
            builder.shape_flags[shape] &= ~(newton.ShapeFlags.COLLIDE_SHAPES | newton.ShapeFlags.COLLIDE_PARTICLES)
    body = {last_name(builder.body_label[b]): b for b in range(first_body, builder.body_count)}
    # Newton lets no two shapes of one negative group touch: the robot's spheres are many on every link.
    plain = replace(builder.default_shape_cfg, density=0.0, margin=0.0, gap=gap, collision_group=-1)
    for probe in robot.probes if probes is None else probes:
        builder.add_shape_sphere(
            body[robot.spec.bodies[probe.body].name],
            xform=wp.transform(probe.pos, wp.quat_identity()),
            radius=probe.radius,
            cfg=replace(plain, mu=probe.friction),
            label=f"{robot.name}/{probe.name}",
        )
    _place_at_home(builder, robot, first_q)


def _place_at_home(builder: newton.ModelBuilder, robot: Robot, first: int) -> None:
    home, spec = list(robot.home_qpos), robot.spec
    if spec.floating:
        home[3:7] = [home[4], home[5], home[6], home[3]]
    builder.joint_q[first : first + spec.nq] = home
    if spec.control == "position":
        lead = 7 if spec.floating else 0
        for joint, target in zip(spec.actuated, robot.home_ctrl, strict=True):
            builder.joint_target_q[first + lead + joint] = target
