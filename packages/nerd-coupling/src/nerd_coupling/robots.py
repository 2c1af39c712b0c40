"""Robots by name: our own primitive-geometry MJCF, and everything read from it (description.py) rather than typed.

``load_robot`` gives the description, ``build_model`` puts it on a terrain, ``set_terrain`` moves an
existing model to another terrain without compiling again.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import mujoco

from nerd_contact import Probe
from nerd_core.robot import RobotSpec
from nerd_coupling.description import Point, is_box, probes, robot_spec
from nerd_coupling.terrain import ABSENT, Terrain

__all__ = [
    "Point",
    "Robot",
    "build_model",
    "build_models",
    "load_robot",
    "num_boxes",
    "probes",
    "robot_names",
    "robot_spec",
    "set_terrain",
]

_FLOOR = "floor"


@dataclass(frozen=True, kw_only=True)
class _Shipped:
    """What the MJCF file of a shipped robot does not say.

    Attributes:
        file: MJCF file.
        substeps: Physics steps per model step.
        control: Kind of control.
        feet: Foot geoms and sites.
        spacing: Largest distance between neighbouring probes on a capsule [m].
        margin: Largest gap of a contact row [m]; None for the encoder's own.
        fixed_points: Probes that make NeRD's fixed list.
    """

    file: str
    substeps: int
    control: Literal["effort", "position"] = "effort"
    feet: tuple[str, ...] = ()
    spacing: float = 0.07
    margin: float | None = None
    fixed_points: tuple[str, ...] = ()


_SHIPPED = {
    "cartpole": _Shipped(file="cartpole.xml", substeps=5),
    "double-pendulum": _Shipped(
        file="double_pendulum.xml",
        substeps=5,
        # Against a plane the ends of a capsule say everything; the others serve edges.
        spacing=0.375,
        # NeRD's max(4 · radius, 0.12 m).
        margin=0.4,
        fixed_points=("link1_0", "link1_4", "link2_0", "link2_4"),
    ),
    "franka": _Shipped(file="franka.xml", substeps=9),
    "go2": _Shipped(file="go2.xml", substeps=4, control="position", feet=("FR_foot", "FL_foot", "RR_foot", "RL_foot")),
}


@dataclass(frozen=True, kw_only=True)
class Robot:
    """A robot's description for the engines.

    Attributes:
        spec: Kinematic tree, gains, limits and rates; travels inside datasets and models.
        mjcf: MJCF text of the robot alone; without ground, unless it has a ``floor`` of its own.
        home_qpos: Home configuration (nq) [m, quaternion wxyz, rad]; legged robots stand.
        home_ctrl: Control at home (nu): position targets [rad] that hold it, or zero efforts.
        foot_geoms: Names of the foot sphere geoms; sites of the same names mark their centres.
        foot_sites: Names of the foot centre sites.
        probes: The colliders as spheres, for the torch collider; none for a robot that touches nothing.
        points: Marked points: foot centres first, then the others.
        margin: Largest gap of a contact row [m]; None for the encoder's own.
        fixed_points: The probes that make NeRD's fixed list of contact points.
    """

    spec: RobotSpec
    mjcf: str
    home_qpos: tuple[float, ...]
    home_ctrl: tuple[float, ...]
    foot_geoms: tuple[str, ...]
    foot_sites: tuple[str, ...]
    probes: tuple[Probe, ...]
    points: tuple[Point, ...]
    margin: float | None = None
    fixed_points: tuple[Probe, ...] = ()

    @property
    def name(self) -> str:
        """Name as given to ``load_robot``."""
        return self.spec.name

    @property
    def home_state(self) -> tuple[float, ...]:
        """At rest: ``home_qpos`` followed by zero velocities (nq + nv)."""
        return self.home_qpos + (0.0,) * self.spec.nv


def robot_names() -> tuple[str, ...]:
    """Names that ``load_robot`` knows."""
    return tuple(sorted(_SHIPPED))


def load_robot(name: str) -> Robot:
    """A shipped robot by name.

    Raises:
        ValueError: If the name is unknown; the message offers the nearest ones.
    """
    if name not in _SHIPPED:
        close = difflib.get_close_matches(str(name).lower(), robot_names(), cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else "no similar name."
        raise ValueError(f"name {name!r}: expected one of {', '.join(robot_names())}; {hint}")
    shipped = _SHIPPED[name]
    text = (resources.files("nerd_coupling") / "assets" / shipped.file).read_text(encoding="utf-8")
    mj_model = mujoco.MjModel.from_xml_string(text)
    spheres, points = probes(mj_model, spacing=shipped.spacing)
    return Robot(
        spec=robot_spec(mj_model, name=name, substeps=shipped.substeps, control=shipped.control),
        mjcf=text,
        home_qpos=tuple(mj_model.key("home").qpos.tolist()),
        home_ctrl=tuple(mj_model.key("home").ctrl.tolist()),
        foot_geoms=shipped.feet,
        foot_sites=shipped.feet,
        probes=tuple(spheres),
        points=tuple(points),
        margin=shipped.margin,
        fixed_points=tuple(probe for probe in spheres if probe.name in shipped.fixed_points),
    )


def build_model(robot: Robot, terrain: Terrain, *, num_boxes: int = 1) -> mujoco.MjModel:
    """Compile the robot on a terrain.

    Ground geoms have contype 1, the robot's have contype 0 and conaffinity 1: the robot touches
    the ground and not itself. All models of one robot and one ``num_boxes`` have equal sizes.

    Args:
        robot: The robot.
        terrain: What it stands on.
        num_boxes: Boxes in the model (bodies ``box0``, ``box1`` ...); unused ones lie out of reach.

    Raises:
        ValueError: If the terrain has more than ``num_boxes`` boxes.
    """
    terrain.padded(num_boxes)  # refuses before anything is compiled
    spec = mujoco.MjSpec.from_string(robot.mjcf)
    spec.option.timestep = robot.spec.timestep
    world = spec.worldbody
    ground = {"contype": 1, "conaffinity": 1, "margin": 0.0}
    if spec.geom(_FLOOR) is None:
        world.add_geom(name=_FLOOR, type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0.0, 0.0, 1.0], **ground)
    for i in range(num_boxes):
        # Explicit, massless inertia: otherwise the compiler derives an inertial frame from the box,
        # and moving the box would have to redo that.
        body = world.add_body(
            name=f"box{i}",
            pos=ABSENT.center,
            explicitinertial=True,
            mass=0.0,
            ipos=[0.0, 0.0, 0.0],
            inertia=[0.0, 0.0, 0.0],
        )
        body.add_geom(
            name=f"box{i}",
            type=mujoco.mjtGeom.mjGEOM_BOX,
            size=ABSENT.half_size,
            mass=0.0,
            **ground,
        )
    mj_model = spec.compile()
    set_terrain(mj_model, terrain)
    return mj_model


def build_models(robot: Robot, terrains: Iterable[Terrain], *, num_boxes: int = 1) -> dict[Terrain, mujoco.MjModel]:
    """One model per terrain, compiled once and then moved.

    Args:
        robot: The robot.
        terrains: The terrains; equal ones share a model.
        num_boxes: Boxes in every model.
    """
    different = list(dict.fromkeys(terrains))
    models = {different[0]: build_model(robot, different[0], num_boxes=num_boxes)}
    for terrain in different[1:]:
        models[terrain] = copy.copy(models[different[0]])
        set_terrain(models[terrain], terrain)
    return models


def set_terrain(mj_model: mujoco.MjModel, terrain: Terrain) -> None:
    """Move a model made by ``build_model`` to another terrain, in place.

    The bounding volumes of the collision broad phase move too; the result equals a fresh compile.

    Raises:
        ValueError: If the terrain has more boxes than the model.
    """
    for i, box in enumerate(terrain.padded(num_boxes(mj_model))):
        body, geom = mj_model.body(f"box{i}").id, mj_model.geom(f"box{i}").id
        mj_model.body_pos[body] = box.center
        mj_model.body_quat[body] = box.quaternion
        mj_model.geom_size[geom] = box.half_size
        mj_model.geom_rbound[geom] = math.hypot(*box.half_size)
        mj_model.geom_aabb[geom, 3:] = box.half_size
        mj_model.bvh_aabb[mj_model.body_bvhadr[body], 3:] = box.half_size
        mj_model.geom_friction[geom, 0] = box.friction
    floor = mj_model.geom(_FLOOR).id
    mj_model.geom_friction[floor, 0] = terrain.floor_friction
    for pair in range(mj_model.npair):
        # A pair has friction of its own; give it what MuJoCo gives every other contact.
        geoms = (int(mj_model.pair_geom1[pair]), int(mj_model.pair_geom2[pair]))
        if floor in geoms:
            mj_model.pair_friction[pair, :2] = mj_model.geom_friction[geoms, 0].max()
    if not terrain.is_level or mj_model.geom_sameframe[floor] == mujoco.mjtSameFrame.mjSAMEFRAME_NONE:
        # MuJoCo reads a geom's own pose only if it is not said to be that of its body.
        mj_model.geom_sameframe[floor] = mujoco.mjtSameFrame.mjSAMEFRAME_NONE
        mj_model.geom_pos[floor] = [c * terrain.floor_offset for c in terrain.floor_normal]
        mj_model.geom_quat[floor] = terrain.floor_quaternion


def num_boxes(mj_model: mujoco.MjModel) -> int:
    """Number of terrain boxes in a model made by ``build_model``."""
    return sum(is_box(mj_model.body(i).name) for i in range(mj_model.nbody))
