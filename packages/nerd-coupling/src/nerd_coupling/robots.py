"""Robots by name: our own primitive-geometry MJCF, and everything read from it rather than typed.

``load_robot`` gives the description, ``build_model`` puts it on a terrain, ``set_terrain`` moves an
existing model to another terrain without compiling again.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from importlib import resources
from typing import Literal, NamedTuple

import mujoco
import numpy as np

from nerd_contact import Probe
from nerd_core.robot import Body, Joint, RobotSpec
from nerd_coupling.terrain import ABSENT, Terrain

# Robots shipped with this package: name -> (MJCF file, feet, physics steps per model step).
_SHIPPED = {"go2": ("go2.xml", ("FR_foot", "FL_foot", "RR_foot", "RL_foot"), 4)}
_FLOOR = "floor"
# Largest distance between neighbouring probes on a capsule [m].
_PROBE_SPACING = 0.07


class Point(NamedTuple):
    """A named point on a robot.

    Attributes:
        name: Site name.
        body: Index into ``RobotSpec.bodies``.
        pos: Position in the body frame [m].
    """

    name: str
    body: int
    pos: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Robot:
    """A robot's description for the engines.

    Attributes:
        spec: Kinematic tree, gains, limits and rates; travels inside datasets and models.
        mjcf: MJCF text of the robot alone, without ground.
        home_qpos: Standing configuration (nq) [m, quaternion wxyz, rad].
        home_ctrl: Control that holds it (nu), position targets [rad].
        foot_geoms: Names of the foot sphere geoms; sites of the same names mark their centres.
        foot_sites: Names of the foot centre sites.
        probes: The colliders as spheres, for the torch collider.
        points: Marked points: foot centres first, then the others.
    """

    spec: RobotSpec
    mjcf: str
    home_qpos: tuple[float, ...]
    home_ctrl: tuple[float, ...]
    foot_geoms: tuple[str, ...]
    foot_sites: tuple[str, ...]
    probes: tuple[Probe, ...]
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """Name as given to ``load_robot``."""
        return self.spec.name

    @property
    def home_state(self) -> tuple[float, ...]:
        """Standing still: ``home_qpos`` followed by zero velocities (nq + nv)."""
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
    file, feet, substeps = _SHIPPED[name]
    text = (resources.files("nerd_coupling") / "assets" / file).read_text(encoding="utf-8")
    mj_model = mujoco.MjModel.from_xml_string(text)
    spheres, points = probes(mj_model)
    return Robot(
        spec=robot_spec(mj_model, name=name, substeps=substeps),
        mjcf=text,
        home_qpos=tuple(mj_model.key("home").qpos.tolist()),
        home_ctrl=tuple(mj_model.key("home").ctrl.tolist()),
        foot_geoms=feet,
        foot_sites=feet,
        probes=tuple(spheres),
        points=tuple(points),
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
    mj_model.geom_friction[mj_model.geom(_FLOOR).id, 0] = terrain.floor_friction


def num_boxes(mj_model: mujoco.MjModel) -> int:
    """Number of terrain boxes in a model made by ``build_model``."""
    return sum(_is_box(mj_model.body(i).name) for i in range(mj_model.nbody))


def robot_spec(
    mj_model: mujoco.MjModel,
    *,
    name: str,
    substeps: int,
    control: Literal["effort", "position"] = "position",
) -> RobotSpec:
    """Read a RobotSpec from a compiled model, ground bodies left out.

    Gains come from the actuators' gain and bias parameters, effort limits from their force range.

    Args:
        mj_model: The robot, with or without ground from ``build_model``.
        name: Name to record.
        substeps: Physics steps per model step.
        control: ``position`` for position servos, ``effort`` for plain motors.

    Raises:
        ValueError: If the model holds something a RobotSpec cannot express (equality constraints,
            tendons, ball joints, geared or unlimited actuators ...); the message names the element.
    """
    _refuse_unsupported(mj_model)
    _refuse_actuators(mj_model, control)
    ids = _robot_bodies(mj_model)
    index = {body: i for i, body in enumerate(ids)}
    bodies = tuple(
        Body(
            name=mj_model.body(i).name,
            parent=index.get(int(mj_model.body_parentid[i]), -1),
            pos=_tuple(mj_model.body_pos[i]),
            quat=_tuple(mj_model.body_quat[i]),
        )
        for i in ids
    )
    free = mujoco.mjtJoint.mjJNT_FREE
    hinge = mujoco.mjtJoint.mjJNT_HINGE
    movable = [j for j in range(mj_model.njnt) if mj_model.jnt_type[j] != free]
    joints = tuple(
        Joint(
            name=mj_model.joint(j).name,
            kind="hinge" if mj_model.jnt_type[j] == hinge else "slide",
            body=index[int(mj_model.jnt_bodyid[j])],
            axis=_tuple(mj_model.jnt_axis[j]),
            pos=_tuple(mj_model.jnt_pos[j]),
            range=_tuple(mj_model.jnt_range[j]) if mj_model.jnt_limited[j] else None,
        )
        for j in movable
    )
    position = control == "position"
    return RobotSpec(
        name=name,
        floating=bool(mj_model.njnt and mj_model.jnt_type[0] == free),
        bodies=bodies,
        joints=joints,
        control=control,
        actuated=tuple(movable.index(int(j)) for j in mj_model.actuator_trnid[:, 0]),
        ctrl_range=tuple(_tuple(r) for r in mj_model.actuator_ctrlrange),
        kp=_tuple(mj_model.actuator_gainprm[:, 0]) if position else (),
        kd=_tuple(-mj_model.actuator_biasprm[:, 2]) if position else (),
        effort_limit=_tuple(mj_model.actuator_forcerange[:, 1]),
        timestep=float(mj_model.opt.timestep),
        substeps=substeps,
    )


def probes(mj_model: mujoco.MjModel) -> tuple[list[Probe], list[Point]]:
    """The robot's colliders as spheres, and its marked points.

    Every sphere geom is one probe; a capsule becomes spheres of its radius along its axis, at both
    ends and at most 0.07 m apart.

    Returns:
        Probes in geom order, and one point per site, foot centres first, then the others.

    Raises:
        ValueError: If a collider is neither a sphere nor a capsule.
    """
    index = {body: i for i, body in enumerate(_robot_bodies(mj_model))}
    found: list[Probe] = []
    for g in range(mj_model.ngeom):
        body = index.get(int(mj_model.geom_bodyid[g]))
        if body is None or not (mj_model.geom_contype[g] or mj_model.geom_conaffinity[g]):
            continue
        geom = mj_model.geom(g)
        if geom.type == mujoco.mjtGeom.mjGEOM_SPHERE:
            offsets = [0.0]
        elif geom.type == mujoco.mjtGeom.mjGEOM_CAPSULE:
            half = float(geom.size[1])
            offsets = np.linspace(-half, half, math.ceil(2.0 * half / _PROBE_SPACING) + 1).tolist()
        else:
            kind = mujoco.mjtGeom(int(geom.type[0])).name
            raise ValueError(f"geom {geom.name!r} is a {kind}: expected a sphere or a capsule")
        axis = np.zeros(3)
        mujoco.mju_rotVecQuat(axis, np.array([0.0, 0.0, 1.0]), geom.quat)
        for n, offset in enumerate(offsets):
            name = geom.name if len(offsets) == 1 else f"{geom.name}_{n}"
            found.append(
                Probe(
                    name=name,
                    body=body,
                    pos=_tuple(geom.pos + offset * axis),
                    radius=float(geom.size[0]),
                    friction=float(geom.friction[0]),
                )
            )
    sites = [mj_model.site(s) for s in range(mj_model.nsite)]
    points = [Point(s.name, index[int(s.bodyid[0])], _tuple(s.pos)) for s in sites if int(s.bodyid[0]) in index]
    # A foot's site is named like its geom: the centre of a probe.
    probe_names = {probe.name for probe in found}
    return found, sorted(points, key=lambda point: point.name not in probe_names)


def _is_box(name: str) -> bool:
    return name.startswith("box") and name[3:].isdecimal()


def _robot_bodies(mj_model: mujoco.MjModel) -> list[int]:
    return [i for i in range(1, mj_model.nbody) if not _is_box(mj_model.body(i).name)]


def _refuse_unsupported(mj_model: mujoco.MjModel) -> None:
    """Name the first element that a RobotSpec would silently lose."""
    if mj_model.neq:
        raise ValueError(f"equality constraint {mj_model.eq(0).name!r} cannot be honoured")
    if mj_model.ntendon:
        raise ValueError(f"tendon {mj_model.tendon(0).name!r} cannot be honoured")
    for j in range(mj_model.njnt):
        kind = mujoco.mjtJoint(int(mj_model.jnt_type[j]))
        if kind == mujoco.mjtJoint.mjJNT_BALL or (kind == mujoco.mjtJoint.mjJNT_FREE and j > 0):
            raise ValueError(
                f"joint {mj_model.joint(j).name!r} is {kind.name}: expected hinge or slide joints "
                "and at most one free joint, the first"
            )


def _refuse_actuators(mj_model: mujoco.MjModel, control: str) -> None:
    """Name the first actuator that is not the plain servo or motor a RobotSpec describes."""
    hinge_or_slide = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
    for a in range(mj_model.nu):
        name = mj_model.actuator(a).name
        gain, bias = mj_model.actuator_gainprm[a], mj_model.actuator_biasprm[a]
        if mj_model.actuator_trntype[a] != mujoco.mjtTrn.mjTRN_JOINT or (
            mujoco.mjtJoint(int(mj_model.jnt_type[mj_model.actuator_trnid[a, 0]])) not in hinge_or_slide
        ):
            raise ValueError(f"actuator {name!r} must drive a hinge or slide joint")
        if mj_model.actuator_gear[a, 0] != 1.0 or not mj_model.actuator_forcelimited[a]:
            raise ValueError(f"actuator {name!r} must have gear 1 and a force range")
        if mj_model.actuator_forcerange[a, 0] != -mj_model.actuator_forcerange[a, 1]:
            raise ValueError(f"actuator {name!r} must have a force range symmetric about zero")
        if not mj_model.actuator_ctrllimited[a]:
            raise ValueError(f"actuator {name!r} must have a control range")
        if control == "position" and (bias[0] != 0.0 or bias[1] != -gain[0]):
            raise ValueError(f"actuator {name!r} is not a position servo (bias {bias[:3]})")
        if control == "effort" and (gain[0] != 1.0 or bias.any()):
            raise ValueError(f"actuator {name!r} is not a motor with gain 1 (gain {gain[0]})")


def _tuple(values: np.ndarray) -> tuple:
    return tuple(float(v) for v in values)
