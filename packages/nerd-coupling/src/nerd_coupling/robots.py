"""Robots by name or file: our own primitive-geometry MJCF, and everything read from it (description.py), not typed.

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
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import mujoco

from nerd_contact import Probe
from nerd_core.robot import RobotSpec
from nerd_coupling.description import Point, is_box, probes, robot_spec
from nerd_coupling.heightfield import add_field, set_field
from nerd_coupling.robot_file import is_robot_file, menagerie_path, read_robot_file
from nerd_coupling.shipped import SHIPPED
from nerd_coupling.terrain import ABSENT, Terrain

__all__ = [
    "Object",
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
_MENAGERIE = "menagerie:"
# Chosen here: the model step of a robot from a file comes as near to this as its physics step allows [s].
_MODEL_STEP = 0.02


class Object(NamedTuple):
    """A free object that a robot handles: no part of the robot, and of no RobotSpec.

    Attributes:
        name: Name of its body.
        mjcf: MJCF text of the object alone, one body with a free joint, placed where it starts.
    """

    name: str
    mjcf: str


@dataclass(frozen=True, kw_only=True)
class Robot:
    """A robot's description for the engines.

    Attributes:
        spec: Kinematic tree, gains, limits and rates; travels inside datasets and models.
        mjcf: MJCF text of the robot alone; without ground, unless it has a ``floor`` of its own.
        home_qpos: Home configuration (nq) [m, quaternion wxyz, rad]; legged robots stand.
        home_ctrl: Control at home (nu): position targets [rad] that hold it, or zero efforts.
        foot_geoms: Names of the geoms that the robot stands on, most of them spheres; sites of the same names mark
            the centres of what touches.
        foot_sites: Names of these sites.
        probes: The colliders as spheres, for the torch collider; none for a robot that touches nothing.
        points: Marked points: foot centres first, then the others.
        margin: Largest gap of a contact row [m]; None for the encoder's own.
        fixed_points: The probes that make NeRD's fixed list of contact points.
        objects: Free objects it handles; ``build_model`` adds them on request.
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
    objects: tuple[Object, ...] = ()

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
    return tuple(sorted(SHIPPED))


def load_robot(
    name: str | Path,
    *,
    substeps: int | None = None,
    floating: bool = False,
    fit_meshes: bool = False,
    touches_nothing: bool = False,
) -> Robot:
    """A shipped robot by name, or any robot from a file.

    Args:
        name: One of ``robot_names()``; the path of an MJCF or URDF file, as a Path or a text that ends in ``.xml``,
            ``.mjcf`` or ``.urdf``; or ``menagerie:unitree_go2``, a robot of MuJoCo Menagerie, optionally with one of
            its files, ``menagerie:unitree_go2/go2_mjx`` (extra ``nerd-coupling[menagerie]``, downloads at first use).
        substeps: From files: physics steps per model step; by default what comes nearest to 20 ms.
        floating: From files: give the root link a free joint, which URDF cannot say.
        fit_meshes: From files: replace each mesh that collides by the capsule that MuJoCo fits to it.
        touches_nothing: From files: accept a robot without a shape that collides.

    Raises:
        ValueError: If the name is unknown (the message offers the nearest ones), or the file is malformed or holds
            what cannot be honoured (the message names the element).
    """
    path = menagerie_path(str(name).removeprefix(_MENAGERIE)) if str(name).startswith(_MENAGERIE) else None
    if path is not None or is_robot_file(name):
        text = read_robot_file(
            path or Path(name), floating=floating, fit_meshes=fit_meshes, touches_nothing=touches_nothing
        )
        label = str(name).removeprefix(_MENAGERIE) if path else Path(name).stem
        return _robot_from_text(text, label, substeps)
    options = {"substeps": substeps, "floating": floating, "fit_meshes": fit_meshes, "touches_nothing": touches_nothing}
    for option, value in options.items():
        if value:
            raise ValueError(f"{option} is {value}, but robot {name!r} is not from a file")
    if name not in SHIPPED:
        close = difflib.get_close_matches(str(name).lower(), robot_names(), cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else "no similar name."
        raise ValueError(f"name {name!r}: expected one of {', '.join(robot_names())}; {hint}")
    shipped = SHIPPED[str(name)]
    text = _asset(shipped.file)
    mj_model = mujoco.MjModel.from_xml_string(text)
    spheres, points = probes(mj_model, spacing=shipped.spacing)
    return Robot(
        spec=robot_spec(mj_model, name=str(name), substeps=shipped.substeps, control=shipped.control),
        mjcf=text,
        home_qpos=tuple(mj_model.key("home").qpos.tolist()),
        home_ctrl=tuple(mj_model.key("home").ctrl.tolist()),
        foot_geoms=shipped.feet,
        foot_sites=shipped.feet,
        probes=tuple(spheres),
        points=tuple(points),
        margin=shipped.margin,
        fixed_points=tuple(probe for probe in spheres if probe.name in shipped.fixed_points),
        objects=tuple(_object(_asset(file)) for file in shipped.objects),
    )


def _asset(file: str) -> str:
    return (resources.files("nerd_coupling") / "assets" / file).read_text(encoding="utf-8")


def _object(text: str) -> Object:
    return Object(mujoco.MjSpec.from_string(text).worldbody.first_body().name, text)


def _robot_from_text(text: str, name: str, substeps: int | None) -> Robot:
    """A robot of which only the MJCF text is known: control, home and rates are read from it."""
    mj_model = mujoco.MjModel.from_xml_string(text)
    if substeps is not None and substeps < 1:
        raise ValueError(f"substeps is {substeps}, expected at least 1")
    servo = bool(mj_model.nu) and mj_model.actuator_biasprm[0].any()
    spec = robot_spec(
        mj_model,
        name=name,
        substeps=substeps or max(1, round(_MODEL_STEP / mj_model.opt.timestep)),
        control="position" if servo else "effort",
    )
    keys = [mj_model.key(i) for i in range(mj_model.nkey)]
    home = next((key for key in keys if key.name == "home"), keys[0] if keys else None)
    qpos = mj_model.qpos0 if home is None else home.qpos
    if home is not None:
        ctrl = home.ctrl
    elif servo:
        ctrl = qpos[mj_model.jnt_qposadr[mj_model.actuator_trnid[:, 0]]].clip(*mj_model.actuator_ctrlrange.T)
    else:
        ctrl = mj_model.actuator_ctrlrange[:, 0] * 0.0
    spheres, points = probes(mj_model)
    return Robot(
        spec=spec,
        mjcf=text,
        home_qpos=tuple(qpos.tolist()),
        home_ctrl=tuple(ctrl.tolist()),
        foot_geoms=(),
        foot_sites=(),
        probes=tuple(spheres),
        points=tuple(points),
    )


def build_model(robot: Robot, terrain: Terrain, *, num_boxes: int = 1, with_objects: bool = False) -> mujoco.MjModel:
    """Compile the robot on a terrain.

    Ground geoms have contype 1, a shipped robot's have contype 0 and conaffinity 1: the robot touches
    the ground and not itself. All models of one robot and one ``num_boxes`` have equal sizes.

    Args:
        robot: The robot.
        terrain: What it stands on.
        num_boxes: Boxes in the model (bodies ``box0``, ``box1`` ...); unused ones lie out of reach.
        with_objects: Add the robot's objects. Their coordinates follow the robot's, 7 positions and 6 velocities
            each, and ``qpos0`` places them; the keyframe is left out, for it knows the robot only.

    Raises:
        ValueError: If the terrain has more than ``num_boxes`` boxes.
    """
    terrain.padded(num_boxes)  # refuses before anything is compiled
    spec = mujoco.MjSpec.from_string(_with_objects(robot) if with_objects else robot.mjcf)
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
    if terrain.field is not None:
        add_field(spec, terrain.field.shape, **ground)
    mj_model = spec.compile()
    set_terrain(mj_model, terrain)
    return mj_model


def _with_objects(robot: Robot) -> str:
    """MJCF text of the robot and its objects; without keyframes, which know the robot only."""
    # Joined as text: bodies that MjSpec attaches get a prefix to their names, or a warning.
    root = ElementTree.fromstring(robot.mjcf)
    world = root.find("worldbody")
    assert world is not None
    for item in robot.objects:
        world.extend(ElementTree.fromstring(item.mjcf).iterfind("worldbody/body"))
    for keyframe in root.findall("keyframe"):
        root.remove(keyframe)
    return ElementTree.tostring(root, encoding="unicode")


def build_models(robot: Robot, terrains: Iterable[Terrain], *, num_boxes: int = 1) -> dict[Terrain, mujoco.MjModel]:
    """One model per terrain, compiled once and then moved.

    Args:
        robot: The robot.
        terrains: The terrains; equal ones share a model.
        num_boxes: Boxes in every model.
    """
    different = list(dict.fromkeys(terrains))
    # A model compiled with room for a height field serves the terrains without one too.
    different.sort(key=lambda terrain: terrain.field is None)
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
    set_field(mj_model, terrain.field)
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
        # The plane's bounding volume is a half space along its first pose: let it bound nothing, or the middle phase
        # drops contacts.
        first = mj_model.body_bvhadr[0]
        mj_model.bvh_aabb[first : first + mj_model.body_bvhnum[0]] = [0.0, 0.0, 0.0, 1e10, 1e10, 1e10]


def num_boxes(mj_model: mujoco.MjModel) -> int:
    """Number of terrain boxes in a model made by ``build_model``."""
    return sum(is_box(mj_model.body(i).name) for i in range(mj_model.nbody))
