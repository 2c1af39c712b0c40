"""Names, shapes, units and frames of the inputs and outputs of an exported step."""

from __future__ import annotations

from typing import Any

from nerd_core import FlashNerd, FlashNerdConfig, RobotSpec, StateCodec

__all__ = ["CONTEXT_NAMES", "input_tensors", "output_tensors"]

BATCH = "batch"

# Fields of a nerd_contact.ContactSet: width (0 for one number per row), type (None for the
# precision of the file), unit and frame.
_CONTACT_FIELDS = {
    "point": (3, None, "m", "base"),
    "normal": (3, None, "1", "base"),
    "gap": (0, None, "m", None),
    "velocity": (3, None, "m/s", "base"),
    "friction": (0, None, "1", None),
    "link": (0, "int64", "index", None),
    "kind": (0, "int64", "index", None),
    "mask": (0, "bool", "1", None),
}

CONTEXT_NAMES = tuple(_CONTACT_FIELDS)


def input_tensors(model: FlashNerd, rows: int, precision: str) -> list[dict[str, Any]]:
    """Descriptions of the inputs of a model's step, in order.

    Args:
        model: The network.
        rows: Contact rows K of one world; 0 without a context encoder.
        precision: Type of all that is not a count, an index or a mask.
    """
    robot, codec = model.robot, model.codec
    state = _tensor("state", precision, robot.state_size) | _state_entries(robot, codec)
    control = _tensor("control", precision, robot.nu) | _control_entries(robot)
    fields = _CONTACT_FIELDS if rows else {}
    context = [
        _tensor(name, dtype or precision, rows, *([width] if width else [])) | {"unit": unit, "frame": frame}
        for name, (width, dtype, unit, frame) in fields.items()
    ]
    valid = _tensor("valid", "int64") | {"meaning": "time samples since the reset of the world"}
    cursor = {"name": "cursor", "dtype": "int64", "shape": [], "meaning": "time samples in all"}
    return [state, control, *context, *_ring_tensors(model.config, precision), valid, cursor]


def output_tensors(model: FlashNerd, precision: str) -> list[dict[str, Any]]:
    """Descriptions of the outputs of a model's step, in order."""
    robot, codec = model.robot, model.codec
    delta = _tensor("delta", precision, codec.delta_size) | _delta_entries(robot, codec)
    after = _tensor("next_state", precision, robot.state_size) | _state_entries(robot, codec)
    pairs = [
        {
            "name": f"new_{ring['name']}",
            "dtype": ring["dtype"],
            "shape": [BATCH, *ring["shape"][2:]],
            "meaning": f"to be written to {ring['name']}[:, cursor % {ring['shape'][1]}]",
        }
        for ring in _ring_tensors(model.config, precision)
    ]
    return [delta, after, *pairs]


def _ring_tensors(config: FlashNerdConfig, precision: str) -> list[dict[str, Any]]:
    # A block of span 1 looks at the present alone and remembers nothing.
    size = (config.heads, config.width // config.heads)
    return [
        _tensor(f"{kind}_{block}", precision, span, *size)
        for block, span in enumerate(config.spans)
        if span > 1
        for kind in ("keys", "values")
    ]


def _tensor(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": [BATCH, *shape]}


def _state_entries(robot: RobotSpec, codec: StateCodec) -> dict[str, list[str]]:
    base, spin = robot.floating, ["m/s"] * 3 + ["rad/s"] * 3
    units = (["m"] * 3 + ["1"] * 4 if base else []) + _joint_units(robot)
    units += (spin if base else []) + _joint_units(robot, "/s")
    joints = ["joint"] * len(robot.joints)
    frames = (["world"] * 7 if base else []) + joints
    frames += (["world"] * 3 + ["base"] * 3 if base else []) + joints
    return {"entries": list(codec.state_names), "units": units, "frames": frames}


def _delta_entries(robot: RobotSpec, codec: StateCodec) -> dict[str, list[str]]:
    base = ["m"] * 3 + ["rad"] * 3 + ["m/s"] * 3 + ["rad/s"] * 3 if robot.floating else []
    joints = _joint_units(robot) + _joint_units(robot, "/s")
    frames = ["base"] * len(base) + ["joint"] * len(joints)
    return {"entries": list(codec.delta_names), "units": base + joints, "frames": frames}


def _control_entries(robot: RobotSpec) -> dict[str, list[str]]:
    driven = [robot.joints[j] for j in robot.actuated]
    position = {"hinge": "rad", "slide": "m"}
    effort = {"hinge": "N m", "slide": "N"}
    units = position if robot.control == "position" else effort
    return {
        "entries": [joint.name for joint in driven],
        "units": [units[joint.kind] for joint in driven],
        "frames": ["joint"] * len(driven),
    }


def _joint_units(robot: RobotSpec, rate: str = "") -> list[str]:
    return [("rad" if joint.kind == "hinge" else "m") + rate for joint in robot.joints]
