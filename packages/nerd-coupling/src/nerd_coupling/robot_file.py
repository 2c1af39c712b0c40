"""Robots from files: MJCF or URDF, by path or from MuJoCo Menagerie, made into one self-contained MJCF text.

What a file says and this project cannot honour is refused by the name of the element, here or in refusal.py.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from xml.etree import ElementTree

import mujoco
import numpy as np

from nerd_coupling.description import robot_bodies
from nerd_coupling.refusal import label, refuse_inertia

__all__ = ["menagerie_path", "read_robot_file"]

_SUFFIXES = (".xml", ".mjcf", ".urdf")
_URDF_JOINTS = ("revolute", "continuous", "prismatic", "fixed")
_FLOOR = "floor"


def is_robot_file(name: str | Path) -> bool:
    """Whether a name means a file: a Path, or a text that ends like one."""
    return isinstance(name, Path) or str(name).lower().endswith(_SUFFIXES)


def menagerie_path(name: str) -> Path:
    """Path of a robot of MuJoCo Menagerie; its package downloads the robot at first use.

    Args:
        name: ``unitree_go2``, or with one of the robot's files, ``unitree_go2/go2_mjx``.

    Raises:
        ValueError: If the package is not installed, the robot or its file is unknown, or the download fails.
    """
    try:
        import mujoco_menagerie as menagerie  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"menagerie:{name}: mujoco-menagerie is not installed; install nerd-coupling[menagerie]"
        ) from None
    robot, _, entry = name.partition("/")
    known = menagerie.names()
    if robot not in known:
        close = difflib.get_close_matches(robot, known, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else "no similar name."
        raise ValueError(f"menagerie:{name}: no robot {robot!r} in MuJoCo Menagerie; {hint}")
    found = menagerie.get(robot)
    try:
        # The scene, which is the package's own default, has ground and lights of its own.
        return Path(found.xml(entry or found.default_model))
    except (menagerie.MenagerieError, OSError) as error:
        raise ValueError(f"menagerie:{name}: {error}") from None


def read_robot_file(
    path: Path, *, floating: bool = False, fit_meshes: bool = False, touches_nothing: bool = False
) -> str:
    """A robot file as one MJCF text, without the meshes and pictures that only a viewer needs.

    An MJCF file that needs no other file and no change is taken as it is; everything else MuJoCo writes anew, with six
    digits to a number.

    Args:
        path: MJCF (``.xml``, ``.mjcf``) or URDF (``.urdf``) file; what it includes lies beside it.
        floating: Give the root link a free joint, which URDF cannot say.
        fit_meshes: Replace each mesh that collides by the capsule that MuJoCo fits to it.
        touches_nothing: Accept a robot without a shape that collides.

    Raises:
        ValueError: If the file cannot be read, is malformed, or holds what cannot be honoured; the message names
            the file and the element.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        root = ElementTree.parse(path).getroot()
        if root.tag == "robot":
            _refuse_urdf(root)
        elif root.tag != "mujoco":
            raise ValueError(f"the root element is <{root.tag}>, expected <mujoco> or <robot> (URDF)")
        spec = _parsed(path)
        if floating:
            _set_free(spec)
        if not spec.actuators and root.tag == "robot":
            _add_motors(spec)
        _refuse_inertias(spec)
        changed = _replace_meshes(spec, fit_meshes) or floating or root.tag == "robot"
        _compiled(spec)
        changed = changed or any("file" in element.attrib for element in root.iter())
        text = spec.to_xml() if changed else path.read_text(encoding="utf-8")
        _refuse_shapes(mujoco.MjModel.from_xml_string(text), touches_nothing)
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as XML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return text


def _refuse_urdf(root: ElementTree.Element) -> None:
    """Name the first joint or link that MuJoCo would drop, or fill in, without a word."""
    moved, links = set(), {link.get("name") for link in root.findall("link")}
    for joint in root.findall("joint"):
        name, kind = joint.get("name", ""), joint.get("type", "")
        mimic = joint.find("mimic")
        if mimic is not None:
            raise ValueError(f"joint {name!r} mimics joint {mimic.get('joint')!r}, which cannot be honoured")
        if kind not in _URDF_JOINTS:
            raise ValueError(f"joint {name!r} is of type {kind!r}: expected one of {', '.join(_URDF_JOINTS)}")
        for end in ("parent", "child"):
            element = joint.find(end)
            link = None if element is None else element.get("link")
            if link not in links:
                raise ValueError(f"joint {name!r} has {end} link {link!r}: expected one of the file's links")
            if end == "child" and kind != "fixed":
                moved.add(link)
        if kind != "fixed":
            limit = joint.find("limit")
            if limit is None or not _number(limit.get("effort")) > 0.0:
                raise ValueError(f"joint {name!r} has no effort limit: expected <limit effort=...> above 0")
    for link in root.findall("link"):
        # MuJoCo would give such a link the mass of its shapes at the density of water.
        if link.find("inertial") is None and (link.get("name") in moved or link.find("collision") is not None):
            raise ValueError(f"link {link.get('name')!r} has no <inertial>: its mass would be made up")


def _number(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        return math.nan


def _parsed(path: Path) -> mujoco.MjSpec:
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None
    # URDF's default would melt links that are fixed to others, the base of an arm into the world.
    spec.compiler.fusestatic = False
    return spec


def _set_free(spec: mujoco.MjSpec) -> None:
    root = spec.worldbody.first_body()
    if root is None:
        raise ValueError("there is no body to set free")
    if root.joints:
        raise ValueError(f"body {root.name!r} has joint {root.joints[0].name!r}: expected none on a root to set free")
    root.add_freejoint(name="root")


def _add_motors(spec: mujoco.MjSpec) -> None:
    """One motor for each joint of a URDF, which has effort limits and no actuators."""
    for joint in spec.joints:
        if joint.type == mujoco.mjtJoint.mjJNT_FREE:
            continue
        motor = spec.add_actuator(name=joint.name, target=joint.name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        motor.set_to_motor()
        motor.forcerange = motor.ctrlrange = joint.actfrcrange
        motor.forcelimited = motor.ctrllimited = True


def _refuse_inertias(spec: mujoco.MjSpec) -> None:
    # Before compiling, which may also repair what is impossible (balanceinertia) and then says nothing.
    for body in spec.bodies:
        if not body.explicitinertial:
            continue
        if np.isnan(body.fullinertia[0]):
            tensor = np.diag(body.inertia)
        else:
            xx, yy, zz, xy, xz, yz = body.fullinertia
            tensor = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
        refuse_inertia(body.name, float(body.mass), tensor)


def _replace_meshes(spec: mujoco.MjSpec, fit: bool) -> bool:
    """Leave out meshes that are only looked at; refuse, or replace by capsules, those that collide.

    Returns:
        Whether a shape that collides was replaced.
    """
    from_geoms = spec.compiler.inertiafromgeom
    meshes = [(n, geom) for n, geom in enumerate(spec.geoms) if geom.type == mujoco.mjtGeom.mjGEOM_MESH]
    fitted = []
    for n, geom in meshes:
        name = label(geom.name, n)
        weightless = geom.mass == 0.0 or geom.density == 0.0
        inertial = geom.parent.explicitinertial and from_geoms != mujoco.mjtInertiaFromGeom.mjINERTIAFROMGEOM_TRUE
        if not (weightless or inertial or geom.parent.name == "world"):
            raise ValueError(
                f"geom {name}: the mesh {geom.meshname!r} gives body {geom.parent.name!r} its mass; "
                "expected an <inertial> there"
            )
        if not (geom.contype or geom.conaffinity):
            spec.delete(geom)
        elif fit:
            geom.type = mujoco.mjtGeom.mjGEOM_CAPSULE
            geom.name = geom.name or f"mesh{n}"
            fitted.append(geom)
        else:
            raise ValueError(
                f"geom {name} collides as the mesh {geom.meshname!r}: expected spheres, capsules, boxes and "
                "cylinders; with fit_meshes it becomes the capsule that fits it"
            )
    if fitted:
        shapes = _compiled(spec)
        for geom in fitted:
            found = shapes.geom(geom.name)
            geom.meshname = ""
            geom.pos, geom.quat, geom.size = found.pos, found.quat, found.size
    for element in (*spec.geoms, *spec.sites):
        element.material = ""
    for element in (*spec.meshes, *spec.skins, *spec.materials, *spec.textures):
        spec.delete(element)
    return bool(fitted)


def _compiled(spec: mujoco.MjSpec) -> mujoco.MjModel:
    try:
        return spec.compile()
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _refuse_shapes(mj_model: mujoco.MjModel, touches_nothing: bool) -> None:
    """Refuse ground that is not ours, and a robot that would fall through ours."""
    robot = set(robot_bodies(mj_model))
    touching = 0
    for g in range(mj_model.ngeom):
        name, body = mj_model.geom(g).name, int(mj_model.geom_bodyid[g])
        if not (mj_model.geom_contype[g] or mj_model.geom_conaffinity[g]):
            continue
        if body == 0 and name != _FLOOR:
            raise ValueError(
                f"geom {label(name, g)} of the world collides: expected a robot without ground (a plane named 'floor' "
                "is taken for it)"
            )
        # Ground has bit 1 in both; MuJoCo lets two geoms meet if a type of one is in the other's affinity.
        touching += body in robot and bool((mj_model.geom_contype[g] | mj_model.geom_conaffinity[g]) & 1)
    if not (touching or touches_nothing):
        root = mj_model.body(1).name if mj_model.nbody > 1 else ""
        raise ValueError(
            f"robot {label(root, 1)} has no shape that meets the ground (contype or conaffinity 1): "
            "expected one, or touches_nothing"
        )
