"""The robot's identity: kinematic tree, joints, control law and time step.

A :class:`RobotSpec` travels inside every dataset, model and exported file; loading an artifact that was made
for another robot, gain or time step is refused with the list of differences.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Body", "Joint", "RobotSpec"]


@dataclass(frozen=True, kw_only=True)
class Body:
    """A link of the tree.

    Attributes:
        name: Name of the link.
        parent: Index of the parent link in ``RobotSpec.bodies``; -1 for the root.
        pos: Origin in the parent's frame [m].
        quat: Orientation in the parent's frame, w x y z.
    """

    name: str
    parent: int
    pos: tuple[float, float, float] = (0.0, 0.0, 0.0)
    quat: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A one-degree-of-freedom joint.

    Attributes:
        name: Name of the joint.
        kind: ``hinge`` or ``slide``.
        body: Index of the link that the joint moves.
        axis: Unit axis in the link's frame.
        pos: Anchor in the link's frame [m].
        range: Lower and upper limit [rad or m]; None where there is none.
    """

    name: str
    kind: str
    body: int
    axis: tuple[float, float, float]
    pos: tuple[float, float, float] = (0.0, 0.0, 0.0)
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("hinge", "slide"):
            raise ValueError(f"joint {self.name}: kind is {self.kind!r}, expected 'hinge' or 'slide'")

    @property
    def continuous(self) -> bool:
        """Whether the angle wraps: a hinge without limits, or with limits wider than a full turn."""
        if self.kind != "hinge":
            return False
        return self.range is None or self.range[1] - self.range[0] > 2 * math.pi


@dataclass(frozen=True, kw_only=True)
class RobotSpec:
    """Everything about a robot that a learned model of it depends on.

    The state of B worlds is one tensor, shape (B, nq + nv), MuJoCo's order. Floating base: world position of the
    base origin [m] 3, base quaternion w x y z 4, joint positions [rad or m]; base linear velocity in world axes
    [m/s] 3, base angular velocity in body axes [rad/s] 3, joint velocities. Fixed base: joint positions, joint
    velocities.

    Attributes:
        name: Name of the robot.
        floating: Whether the root link moves freely.
        bodies: Links, parents before children.
        joints: Joints in the order of the state.
        control: ``effort`` (N m or N, held over the model step) or ``position`` (targets of a PD law evaluated
            at every physics step).
        actuated: Index of the joint that each control drives.
        ctrl_range: Lower and upper bound of each control.
        kp: Proportional gains [N m/rad]; empty with effort control.
        kd: Derivative gains [N m s/rad]; empty with effort control.
        effort_limit: Bound on each actuator's effort [N m or N].
        timestep: Physics time step [s].
        substeps: Physics steps per model step.
    """

    name: str
    floating: bool
    bodies: tuple[Body, ...]
    joints: tuple[Joint, ...]
    control: str
    actuated: tuple[int, ...]
    ctrl_range: tuple[tuple[float, float], ...]
    effort_limit: tuple[float, ...]
    timestep: float
    substeps: int
    kp: tuple[float, ...] = ()
    kd: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.control not in ("effort", "position"):
            raise ValueError(f"control is {self.control!r}, expected 'effort' or 'position'")
        if not self.timestep > 0:
            raise ValueError(f"timestep is {self.timestep}, expected a positive time [s]")
        if self.substeps < 1:
            raise ValueError(f"substeps is {self.substeps}, expected at least 1")
        for index, body in enumerate(self.bodies):
            if not -1 <= body.parent < index:
                raise ValueError(f"body {body.name}: parent {body.parent} must come before it")
        gains = (self.kp, self.kd) if self.control == "position" else ()
        for label, values in (
            ("ctrl_range", self.ctrl_range),
            ("effort_limit", self.effort_limit),
            *zip(("kp", "kd"), gains, strict=False),
        ):
            if len(values) != self.nu:
                raise ValueError(f"{label} has {len(values)} entries, expected one per control ({self.nu})")

    @property
    def dt(self) -> float:
        """Model step [s]: one prediction of the network."""
        return self.timestep * self.substeps

    @property
    def nq(self) -> int:
        """Number of position coordinates."""
        return len(self.joints) + (7 if self.floating else 0)

    @property
    def nv(self) -> int:
        """Number of velocity coordinates."""
        return len(self.joints) + (6 if self.floating else 0)

    @property
    def nu(self) -> int:
        """Number of controls."""
        return len(self.actuated)

    @property
    def state_size(self) -> int:
        """Width of the state, nq + nv."""
        return self.nq + self.nv

    def to_json(self) -> dict[str, Any]:
        """The spec as plain JSON values."""
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    def from_json(data: dict[str, Any]) -> "RobotSpec":
        """Rebuild a spec from :meth:`to_json`; unknown or missing fields are a ValueError."""

        def frozen(value: Any) -> Any:
            return tuple(frozen(v) for v in value) if isinstance(value, list) else value

        try:
            fields = {k: frozen(v) for k, v in data.items() if k not in ("bodies", "joints")}
            bodies = tuple(Body(**{k: frozen(v) for k, v in b.items()}) for b in data["bodies"])
            joints = tuple(Joint(**{k: frozen(v) for k, v in j.items()}) for j in data["joints"])
            return RobotSpec(bodies=bodies, joints=joints, **fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"robot description is not readable: {error}") from None

    def digest(self) -> str:
        """SHA-256 of the canonical JSON form."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: "RobotSpec") -> list[str]:
        """Every field in which ``other`` differs, as readable lines; empty when the robots are the same."""
        mine, theirs = self.to_json(), other.to_json()
        lines: list[str] = []
        for key in mine:
            a, b = mine[key], theirs[key]
            if a == b:
                continue
            if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and len(a) > 1:
                lines += [
                    f"{key}[{i}]: {x} here, {y} there" for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y
                ]
            elif isinstance(a, list) and isinstance(b, list) and len(a) != len(b):
                lines.append(f"{key}: {len(a)} entries here, {len(b)} there")
            else:
                lines.append(f"{key}: {a} here, {b} there")
        return lines
