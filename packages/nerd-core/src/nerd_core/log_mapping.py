"""Which column of a log is what, in which unit and frame: the mapping file of an import.

JSON, every unit, frame and order stated, for example of a free body without joints::

    {
      "time": {"column": "t", "unit": "s"},
      "position": {"columns": ["px", "py", "pz"], "unit": "mm"},
      "orientation": {"columns": ["qw", "qx", "qy", "qz"], "order": "wxyz"},
      "linear_velocity": {"columns": ["vx", "vy", "vz"], "unit": "m/s", "frame": "world"},
      "angular_velocity": {"columns": ["wx", "wy", "wz"], "unit": "rad/s", "frame": "body"}
    }

``time`` may be ``{"interval": 0.01, "unit": "s"}`` for rows at equal intervals. ``trajectory`` tells the
trajectories of a file apart: ``{"column": "run"}``, whose value changes where a new one begins, or ``{"start":
"first_row", "length": "rows"}``, two npz arrays; without it a file is one trajectory. Robots with joints have
``joints`` and ``controls``, both by the joint's name::

    "joints": {"hip": {"position": {"column": "q", "unit": "deg"}, "velocity": {"column": "qd", "unit": "deg/s"}}},
    "controls": {"hip": {"column": "tau", "unit": "N m"}}

Velocities may be left out; they are then differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .robot import RobotSpec
from .storage import read_json

__all__ = ["LogMapping", "Quantity", "read_mapping"]

LENGTH = {"m": 1.0, "cm": 1e-2, "mm": 1e-3}
ANGLE = {"rad": 1.0, "deg": math.pi / 180}
SPEED = {f"{unit}/s": factor for unit, factor in LENGTH.items()}
RATE = {f"{unit}/s": factor for unit, factor in ANGLE.items()} | {"rpm": 2 * math.pi / 60}
TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
FORCE, TORQUE = {"N": 1.0}, {"N m": 1.0}


@dataclass(frozen=True)
class Quantity:
    """Columns of one physical quantity.

    Attributes:
        what: Name of the quantity, for messages.
        columns: Column names in the log.
        width: Numbers per row.
        factor: What turns the column's unit into SI.
        unit: The column's unit.
        choice: Frame (``world`` or ``body``) of a velocity, order (``wxyz`` or ``xyzw``) of a quaternion.
    """

    what: str
    columns: tuple[str, ...]
    width: int
    factor: float
    unit: str
    choice: str = ""


@dataclass(frozen=True, kw_only=True)
class LogMapping:
    """A mapping file, checked against a robot.

    Attributes:
        time: Column of the time stamps; None if rows are at equal intervals.
        interval: Time between rows [s]; 0 with a column.
        trajectory: Column that tells trajectories apart, or arrays of first rows and lengths; empty if none.
        position: Base position, world frame; None for a fixed base, as the other three.
        orientation: Base quaternion, base to world.
        linear_velocity: Of the base; None if it is to be differentiated.
        angular_velocity: Of the base; None if it is to be differentiated.
        joint_positions: In the robot's order.
        joint_velocities: In the robot's order; None where it is to be differentiated.
        controls: In the robot's order.
        document: The mapping as it was read.
    """

    time: Quantity | None
    interval: float
    trajectory: tuple[str, ...]
    position: Quantity | None
    orientation: Quantity | None
    linear_velocity: Quantity | None
    angular_velocity: Quantity | None
    joint_positions: tuple[Quantity, ...]
    joint_velocities: tuple[Quantity | None, ...]
    controls: tuple[Quantity, ...]
    document: dict[str, Any]


def read_mapping(path: str | Path, robot: RobotSpec) -> LogMapping:
    """Read a mapping file for a robot.

    Raises:
        ValueError: An entry that is missing, unknown, or without unit, frame or order.
    """
    document = read_json(Path(path), what="mapping")
    try:
        return mapping_from_json(document, robot)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def mapping_from_json(document: Mapping[str, Any], robot: RobotSpec) -> LogMapping:
    """The mapping that a JSON object describes; :func:`read_mapping` reads one from a file."""
    base = ("position", "orientation") if robot.floating else ()
    rates = ("linear_velocity", "angular_velocity") if robot.floating else ()
    needed = ("time", *base, *(("joints",) if robot.joints else ()), *(("controls",) if robot.nu else ()))
    _check_keys("mapping", document, needed, (*rates, "trajectory"))
    time, interval = _time(document["time"])
    names = [joint.name for joint in robot.joints]
    joints = document.get("joints", {})
    _check_keys("joints", joints, tuple(names), ())
    positions, velocities = [], []
    for joint in robot.joints:
        entry = joints[joint.name]
        _check_keys(joint.name, entry, ("position",), ("velocity",))
        slides = joint.kind == "slide"
        positions.append(_quantity(f"{joint.name} position", entry["position"], 1, LENGTH if slides else ANGLE))
        rate = entry.get("velocity")
        units = SPEED if slides else RATE
        velocities.append(None if rate is None else _quantity(f"{joint.name} velocity", rate, 1, units))
    return LogMapping(
        time=time,
        interval=interval,
        trajectory=_trajectory(document.get("trajectory")),
        position=_quantity("position", document["position"], 3, LENGTH) if base else None,
        orientation=_quaternion(document["orientation"]) if base else None,
        linear_velocity=_velocity("linear_velocity", document, SPEED),
        angular_velocity=_velocity("angular_velocity", document, RATE),
        joint_positions=tuple(positions),
        joint_velocities=tuple(velocities),
        controls=_controls(document.get("controls", {}), robot),
        document=dict(document),
    )


def _controls(document: Mapping[str, Any], robot: RobotSpec) -> tuple[Quantity, ...]:
    driven = [robot.joints[index] for index in robot.actuated]
    _check_keys("controls", document, tuple(joint.name for joint in driven), ())
    found = []
    for joint in driven:
        slides = joint.kind == "slide"
        units = (LENGTH if slides else ANGLE) if robot.control == "position" else (FORCE if slides else TORQUE)
        found.append(_quantity(f"{joint.name} control", document[joint.name], 1, units))
    return tuple(found)


def _time(entry: Mapping[str, Any]) -> tuple[Quantity | None, float]:
    if not isinstance(entry, Mapping) or "interval" not in entry:
        return _quantity("time", entry, 1, TIME), 0.0
    _check_keys("time", entry, ("interval", "unit"), ())
    interval = entry["interval"]
    if not isinstance(interval, int | float) or not 0 < interval < math.inf:
        raise ValueError(f"time.interval is {interval!r}, expected a positive number")
    return None, interval * _factor("time", entry["unit"], TIME)


def _trajectory(entry: Mapping[str, Any] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    needed = ("column",) if isinstance(entry, Mapping) and "column" in entry else ("start", "length")
    _check_keys("trajectory", entry, needed, ())
    return tuple(str(entry[key]) for key in needed)


def _velocity(what: str, document: Mapping[str, Any], units: Mapping[str, float]) -> Quantity | None:
    if document.get(what) is None:
        return None
    return _quantity(what, document[what], 3, units, choice=("frame", ("world", "body")))


def _quaternion(entry: Mapping[str, Any]) -> Quantity:
    if isinstance(entry, Mapping):
        entry = {"unit": "1", **entry}
    return _quantity("orientation", entry, 4, {"1": 1.0}, choice=("order", ("wxyz", "xyzw")))


def _quantity(
    what: str,
    entry: Mapping[str, Any],
    width: int,
    units: Mapping[str, float],
    choice: tuple[str, tuple[str, ...]] | None = None,
) -> Quantity:
    key = "columns" if width > 1 else "column"
    _check_keys(what, entry, (key, "unit", *(() if choice is None else choice[:1])), ())
    given = entry[key]
    columns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else ()
    if not columns or not all(isinstance(name, str) for name in columns):
        raise ValueError(f"{what}.{key} is {given!r}, expected names of columns")
    chosen = "" if choice is None else entry[choice[0]]
    if choice is not None and chosen not in choice[1]:
        raise ValueError(f"{what}.{choice[0]} is {chosen!r}, expected {' or '.join(choice[1])}")
    return Quantity(what, columns, width, _factor(what, entry["unit"], units), str(entry["unit"]), str(chosen))


def _factor(what: str, unit: object, units: Mapping[str, float]) -> float:
    if unit not in units:
        raise ValueError(f"{what}.unit is {unit!r}, expected one of {', '.join(units)}")
    return units[str(unit)]


def _check_keys(what: str, entry: object, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{what} is {entry!r}, expected a JSON object")
    if absent := [key for key in needed if key not in entry]:
        raise ValueError(f"{what} lacks {', '.join(absent)}")
    if unknown := sorted(entry.keys() - {*needed, *optional}):
        raise ValueError(f"{what} has unknown keys {', '.join(unknown)}, expected {', '.join((*needed, *optional))}")
