"""Does a log say what its mapping claims? Differentiated pose against stated velocity.

For every pair of neighbouring rows without a gap, the change of the pose over the interval is compared with the
velocity stated in the later row (as backward differences have it), in the earlier one, or their mean, whichever fits
best over the whole log. The disagreement of an interpretation is Σ |differentiated - stated| over
Σ max(|differentiated|, |stated|): 0 for a perfect log, about 1 for one that is read wrongly. If the mapping's own
interpretation disagrees and another one (quaternion order or direction, frame, unit, sign) agrees, that mix-up is
named; if none agrees, the log is refused too.

What nothing here can find: a wrong unit that position and velocity share, a world whose z is not up, and the order
of a quaternion when no angular velocity is logged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import wrap_angle
from .log_mapping import LogMapping, Quantity
from .motion import Motion
from .robot import RobotSpec
from .rotation import quat_conjugate, quat_multiply, quat_to_rotvec, rotate

__all__ = ["Agreement", "check_velocities"]

SUSPICIOUS = 0.1
"""Disagreement from which on another interpretation may be the right one, if it fits three times better."""
STILL = 1e-3
"""Mean speed [m/s or rad/s] below which nothing can be told."""
KINDS = ("backward", "central", "forward")
AND = " and "
DEGREE = math.pi / 180
ANGLE_SCALES = {1.0: "", DEGREE: "deg for rad", 1 / DEGREE: "rad for deg", -1.0: "the sign"}
SCALES = {1.0: "", 1e3: "a factor of 1000", 1e-3: "a factor of 1000", 1e2: "cm", 1e-2: "cm", -1.0: "the sign"}


class Agreement(NamedTuple):
    """How well a stated velocity fits the differentiated position.

    Attributes:
        disagreement: See the module; None where nothing moves.
        kind: Whether the stated velocities look like ``backward``, ``central`` or ``forward`` differences.
    """

    disagreement: float | None
    kind: str


class _Pairs(NamedTuple):
    """Neighbouring rows: values at both, the time between them, and where they are."""

    motions: list[Motion]
    motion: Tensor
    row: Tensor
    interval: Tensor

    def ends(self, take: Callable[[Motion], Tensor | None]) -> tuple[Tensor, Tensor]:
        """A quantity at the earlier and the later row, shapes (P, C)."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, motion in enumerate(self.motions):
            values = take(motion)
            assert values is not None
            rows = self.row[self.motion == index]
            parts[0].append(values[rows])
            parts[1].append(values[rows + 1])
        return torch.cat(parts[0]), torch.cat(parts[1])

    def where(self, pair: int) -> str:
        """Words for the later row of a pair."""
        return self.motions[int(self.motion[pair])].row(int(self.row[pair]) + 1)


class _Reading(NamedTuple):
    """One interpretation of the log.

    Attributes:
        words: What it changes in the mapping; empty for the mapping's own.
        changes: The differentiated pose, shape (P, C).
        earlier: The stated velocity in the earlier row, in the frame of ``changes``.
        later: The stated velocity in the later row.
    """

    words: str
    changes: Tensor
    earlier: Tensor
    later: Tensor


def check_velocities(
    motions: Sequence[Motion], mapping: LogMapping, robot: RobotSpec, tolerance: float = 0.5
) -> dict[str, Agreement]:
    """Compare every stated velocity with the differentiated pose.

    Args:
        motions: All trajectories of the import.
        mapping: What they are said to hold.
        robot: Names the joints.
        tolerance: Greatest disagreement of a log for which no better interpretation is known.

    Returns:
        The agreement of each velocity that is logged.

    Raises:
        ValueError: A velocity disagrees; the likely mix-up is named with file, row and columns.
    """
    pairs = _pairs(motions)
    found: dict[str, Agreement] = {}
    if len(pairs.row) == 0:
        return found
    # The angular velocity first: it tells whether the orientation is right, on which the linear one may rest.
    if mapping.angular_velocity is not None and mapping.orientation is not None:
        readings = _angular_readings(pairs, mapping.orientation, mapping.angular_velocity)
        blamed = (mapping.orientation, mapping.angular_velocity)
        found["angular_velocity"] = _judge("angular velocity", pairs, readings, blamed, tolerance)
    if mapping.linear_velocity is not None and mapping.position is not None and mapping.orientation is not None:
        readings = _linear_readings(pairs, mapping.orientation, mapping.linear_velocity)
        blamed = (mapping.position, mapping.linear_velocity)
        found["linear_velocity"] = _judge("linear velocity", pairs, readings, blamed, tolerance)
    for index, joint in enumerate(robot.joints):
        rate = mapping.joint_velocities[index]
        if rate is None:
            continue
        readings = _joint_readings(pairs, index, continuous=joint.continuous, slides=joint.kind == "slide")
        blamed = (mapping.joint_positions[index], rate)
        found[f"{joint.name} velocity"] = _judge(f"{joint.name} velocity", pairs, readings, blamed, tolerance)
    return found


def _judge(
    what: str, pairs: _Pairs, readings: Iterable[_Reading], blamed: tuple[Quantity, Quantity], tolerance: float
) -> Agreement:
    stated, *others = readings
    error, kind = _disagreement(stated)
    if error is None or error <= SUSPICIOUS:
        return Agreement(error, kind)
    scored = [(score, reading.words) for reading in others if (score := _disagreement(reading)[0]) is not None]
    least = min((score for score, _ in scored), default=math.inf)
    # Some readings are the same motion (the inverse orientation, or the other frame and the other sign): the one
    # that changes the mapping least is named.
    close = [pair for pair in scored if pair[0] <= 1.5 * least + 0.01]
    best, words = min(close, default=(math.inf, ""), key=lambda pair: (pair[1].count(AND), pair[0]))
    mixed_up = best < error / 3
    if not mixed_up and error <= tolerance:
        return Agreement(error, kind)
    wrong = (stated.changes - _stated(stated, kind)).norm(dim=1)
    pair = int(wrong.argmax())
    columns = ", ".join(name for quantity in blamed for name in quantity.columns)
    cure = f"it agrees ({best:.2g}) with {words}" if mixed_up else "no other order, frame or unit agrees either"
    raise ValueError(
        f"{pairs.where(pair)}, columns {columns}: the stated {what} is not that of the differentiated "
        f"{blamed[0].what}, here {_numbers(_stated(stated, kind)[pair])} and {_numbers(stated.changes[pair])} "
        f"(disagreement {error:.2g} over {len(pairs.row)} rows, expected at most {tolerance:g}); {cure}"
    )


def _stated(reading: _Reading, kind: str) -> Tensor:
    return {
        "backward": reading.later,
        "central": (reading.earlier + reading.later) / 2,
        "forward": reading.earlier,
    }[kind]


def _disagreement(reading: _Reading) -> tuple[float | None, str]:
    found = []
    for kind in KINDS:
        stated = _stated(reading, kind)
        size = torch.maximum(reading.changes.norm(dim=1), stated.norm(dim=1))
        if float(size.mean()) < STILL:
            return None, "at rest"
        found.append((float((reading.changes - stated).norm(dim=1).sum() / size.sum()), kind))
    return min(found)


def _angular_readings(pairs: _Pairs, orientation: Quantity, velocity: Quantity) -> Iterable[_Reading]:
    quats, rates = pairs.ends(lambda m: m.orientation), pairs.ends(lambda m: m.angular)
    frames = (velocity.choice, _other(velocity.choice, ("world", "body")))
    scales = ANGLE_SCALES | {1e3: "ms for s", 1e-3: "s for ms"}
    for (order, turned), frame, (scale, unit) in itertools.product(_orders(orientation), frames, scales.items()):
        before, after = turned(quats[0]), turned(quats[1])
        turn = quat_to_rotvec(quat_multiply(quat_conjugate(before), after)) / pairs.interval[:, None]
        changes = turn if frame == "body" else rotate(before, turn)
        words = [order, "" if frame == velocity.choice else f"angular_velocity.frame {frame}"]
        words.append(f"another unit or sign ({unit})" if unit else "")
        yield _Reading(_listed(words), changes, scale * rates[0], scale * rates[1])


def _linear_readings(pairs: _Pairs, orientation: Quantity, velocity: Quantity) -> Iterable[_Reading]:
    places, quats, speeds = (
        pairs.ends(lambda m: m.position),
        pairs.ends(lambda m: m.orientation),
        pairs.ends(lambda m: m.linear),
    )
    changes = (places[1] - places[0]) / pairs.interval[:, None]
    for frame in (velocity.choice, _other(velocity.choice, ("world", "body"))):
        orders = _orders(orientation) if frame == "body" else _orders(orientation)[:1]
        for (order, turned), (scale, unit) in itertools.product(orders, SCALES.items()):
            seen = speeds
            if frame == "body":
                seen = tuple(rotate(turned(q), v) for q, v in zip(quats, speeds, strict=True))
            words = [order, "" if frame == velocity.choice else f"linear_velocity.frame {frame}"]
            words.append(f"another unit or sign of position, velocity or time ({unit})" if unit else "")
            yield _Reading(_listed(words), changes, scale * seen[0], scale * seen[1])


def _joint_readings(pairs: _Pairs, index: int, *, continuous: bool, slides: bool) -> Iterable[_Reading]:
    before, after = pairs.ends(lambda m: m.joints[:, index : index + 1])
    rates = pairs.ends(lambda m: None if (rate := m.rates[index]) is None else rate[:, None])
    step = wrap_angle(after - before) if continuous else after - before
    for scale, unit in (SCALES if slides else ANGLE_SCALES | {1e3: "ms for s", 1e-3: "s for ms"}).items():
        words = f"another unit or sign of position, velocity or time ({unit})" if unit else ""
        yield _Reading(words, step / pairs.interval[:, None], scale * rates[0], scale * rates[1])


def _orders(orientation: Quantity) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Ways to read a quaternion: as stated, in the other order, as the inverse rotation."""
    other = _other(orientation.choice, ("wxyz", "xyzw"))
    back = [3, 0, 1, 2] if other == "xyzw" else [1, 2, 3, 0]
    return [
        ("", lambda quat: quat),
        (f"orientation.order {other}", lambda quat: quat[:, back]),
        ("the inverse orientation (world to body instead of body to world)", quat_conjugate),
    ]


def _pairs(motions: Sequence[Motion]) -> _Pairs:
    owner, rows, intervals = [], [], []
    for index, motion in enumerate(motions):
        for begin, end in motion.runs:
            at = torch.arange(begin, end - 1)
            rows.append(at)
            owner.append(torch.full_like(at, index))
            intervals.append(motion.time[at + 1] - motion.time[at])
    if not rows:
        nothing = torch.empty(0, dtype=torch.int64)
        return _Pairs(list(motions), nothing, nothing, torch.empty(0, dtype=torch.float64))
    return _Pairs(list(motions), torch.cat(owner), torch.cat(rows), torch.cat(intervals))


def _other(choice: str, both: tuple[str, str]) -> str:
    return both[1] if choice == both[0] else both[0]


def _listed(words: Iterable[str]) -> str:
    return AND.join(word for word in words if word)


def _numbers(values: Tensor) -> str:
    return "(" + ", ".join(f"{value:.3g}" for value in values.tolist()) + ")"
