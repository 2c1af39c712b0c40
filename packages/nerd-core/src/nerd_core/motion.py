"""Logged motions in SI units: one per trajectory of a file, with its gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .log_mapping import LogMapping, Quantity
from .logs import Log

__all__ = ["Gap", "Motion", "read_motions"]

UNIT_NORM = 0.02
"""Largest deviation of a logged quaternion's norm from one."""
LONG_INTERVAL = 1.5
"""Rows further apart than so many median intervals have rows missing between them."""


@dataclass(frozen=True)
class Gap:
    """Where a trajectory is cut.

    Attributes:
        where: File, row and column, in words.
    """

    where: str


@dataclass(frozen=True)
class Motion:
    """One logged trajectory; F rows, float64, NaN where the log has gaps.

    Attributes:
        log: The file.
        first: Index of its first row in the file.
        time: Time stamps [s], shape (F,).
        position: Base position, world frame [m], shape (F, 3); None for a fixed base.
        orientation: Unit quaternion w x y z, base to world, shape (F, 4); None for a fixed base.
        linear: Base velocity in the frame that the mapping states [m/s], shape (F, 3); None if not logged.
        angular: Base rate in the frame that the mapping states [rad/s], shape (F, 3); None if not logged.
        joints: Joint positions [rad or m], shape (F, joints).
        rates: Joint velocities, shape (F,) each; None where not logged.
        controls: Controls, shape (F, nu).
        runs: Rows ``[begin, end)`` of each stretch without a gap.
        gaps: The cuts between them.
    """

    log: Log
    first: int
    time: Tensor
    position: Tensor | None
    orientation: Tensor | None
    linear: Tensor | None
    angular: Tensor | None
    joints: Tensor
    rates: tuple[Tensor | None, ...]
    controls: Tensor
    runs: tuple[tuple[int, int], ...]
    gaps: tuple[Gap, ...]

    def row(self, index: int) -> str:
        """Words for a row of this trajectory: the file and the row in it."""
        return f"{self.log.path}: {self.log.row(self.first + index)}"


def read_motions(log: Log, mapping: LogMapping, max_gap: float | None = None) -> list[Motion]:
    """The trajectories of a file.

    Args:
        log: The file.
        mapping: Which column is what.
        max_gap: Rows further apart than this [s] have a gap between them; None for 1.5 times the median interval.

    Raises:
        ValueError: Columns that are missing or of unequal length, time that does not increase, quaternions that are
            not unit, a trajectory of fewer than two rows; file, row and column are named.
    """
    columns: dict[str, Tensor] = {}
    labels: dict[str, tuple[str, ...]] = {}
    for quantity in _quantities(mapping):
        values, labels[quantity.what] = log.columns(quantity.columns, quantity.width)
        columns[quantity.what] = values * quantity.factor
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        named = ", ".join(f"{labels[what][0]} {len(values)}" for what, values in columns.items())
        raise ValueError(f"{log.path}: the columns have different numbers of rows: {named}")
    count = lengths.pop() if lengths else 0
    return [_motion(log, mapping, columns, labels, *span, max_gap) for span in _spans(log, mapping, count)]


def _quantities(mapping: LogMapping) -> Iterator[Quantity]:
    base = (mapping.position, mapping.orientation, mapping.linear_velocity, mapping.angular_velocity)
    for quantity in (mapping.time, *base, *mapping.joint_positions, *mapping.joint_velocities, *mapping.controls):
        if quantity is not None:
            yield quantity


def _spans(log: Log, mapping: LogMapping, count: int) -> list[tuple[int, int]]:
    """First row and row after the last of each trajectory."""
    if not mapping.trajectory:
        return [(0, count)]
    parts = [log.column(name) for name in mapping.trajectory]
    for name, part in zip(mapping.trajectory, parts, strict=True):
        if part.ndim != 1 or not bool(part.isfinite().all()):
            raise ValueError(f"{log.path}: column {name} tells trajectories apart, expected one number in every row")
    if len(parts) == 1:
        if len(parts[0]) != count:
            raise ValueError(f"{log.path}: column {mapping.trajectory[0]} has {len(parts[0])} rows, others {count}")
        cuts = [0, *((parts[0].diff() != 0).nonzero()[:, 0] + 1).tolist(), count]
        return [(a, b) for a, b in pairwise(cuts) if b > a]
    spans = []
    for index, (start, length) in enumerate(zip(parts[0].tolist(), parts[1].tolist(), strict=True)):
        if start < 0 or length < 0 or start + length > count:
            raise ValueError(
                f"{log.path}: row {index}, columns {', '.join(mapping.trajectory)}: rows {start:g} to "
                f"{start + length:g} of {count}, expected rows that exist"
            )
        spans.append((int(start), int(start + length)))
    return spans


def _motion(
    log: Log,
    mapping: LogMapping,
    columns: dict[str, Tensor],
    labels: dict[str, tuple[str, ...]],
    begin: int,
    end: int,
    max_gap: float | None,
) -> Motion:
    if end - begin < 2:
        where = log.row(begin) if end > begin else "no row"
        raise ValueError(f"{log.path}: {where}: a trajectory of {end - begin} rows, expected at least 2")
    part = {what: values[begin:end] for what, values in columns.items()}
    time = _time(log, mapping, part, labels, begin, end)
    runs, gaps = _runs(log, part, labels, time, begin, max_gap)
    # After the gaps: one missing number would spread over the whole quaternion, and the wrong column be named.
    if mapping.orientation is not None:
        part["orientation"] = _unit(log, part["orientation"], labels["orientation"], mapping.orientation, begin)

    def stacked(quantities: tuple[Quantity, ...]) -> Tensor:
        return torch.cat([time.new_empty(len(time), 0), *(part[quantity.what] for quantity in quantities)], 1)

    rates = tuple(None if rate is None else part[rate.what][:, 0] for rate in mapping.joint_velocities)
    joints, controls = stacked(mapping.joint_positions), stacked(mapping.controls)
    return Motion(
        log=log,
        first=begin,
        time=time,
        position=part.get("position"),
        orientation=part.get("orientation"),
        linear=part.get("linear_velocity"),
        angular=part.get("angular_velocity"),
        joints=joints,
        rates=rates,
        controls=controls,
        runs=runs,
        gaps=gaps,
    )


def _time(
    log: Log,
    mapping: LogMapping,
    part: dict[str, Tensor],
    labels: dict[str, tuple[str, ...]],
    begin: int,
    end: int,
) -> Tensor:
    """Time stamps [s], increasing."""
    if mapping.time is None:
        return torch.arange(end - begin, dtype=torch.float64) * mapping.interval
    time, name = part.pop("time")[:, 0], labels["time"][0]
    wrong = ~time.isfinite()
    if bool(wrong.any()):
        row = log.row(begin + int(wrong.nonzero()[0]))
        raise ValueError(f"{log.path}: {row}, column {name}: the time is not finite, expected a number in every row")
    wrong = time.diff() <= 0
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        factor = mapping.time.factor
        before, after = (float(time[i]) / factor for i in (index, index + 1))
        raise ValueError(
            f"{log.path}: {log.row(begin + index + 1)}, column {name}: time goes from {before:.9g} to {after:.9g}, "
            "expected it to increase within a trajectory"
        )
    return time


def _unit(log: Log, raw: Tensor, names: tuple[str, ...], stated: Quantity, begin: int) -> Tensor:
    """Unit quaternions w x y z."""
    norm = raw.norm(dim=1)
    wrong = (norm - 1).abs() > UNIT_NORM
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"{log.path}: {log.row(begin + index)}, columns {', '.join(names)}: the quaternion's norm is "
            f"{float(norm[index]):.3g}, expected 1"
        )
    quat = raw / norm[:, None]
    return quat if stated.choice == "wxyz" else quat[:, [3, 0, 1, 2]]


def _runs(
    log: Log,
    part: dict[str, Tensor],
    labels: dict[str, tuple[str, ...]],
    time: Tensor,
    begin: int,
    max_gap: float | None,
) -> tuple[tuple[tuple[int, int], ...], tuple[Gap, ...]]:
    """Stretches of rows without a gap, and where the gaps are."""
    whole = torch.ones(len(time), dtype=torch.bool)
    for what, values in part.items():
        if what != "time":
            whole &= values.isfinite().all(1)
    interval = time.diff()
    longest = LONG_INTERVAL * float(interval.median()) if max_gap is None else max_gap
    late = torch.cat([torch.zeros(1, dtype=torch.bool), interval > longest])
    gaps, runs, start = [], [], None
    for index, (good, jumps) in enumerate(zip(whole.tolist(), late.tolist(), strict=True)):
        if start is not None and (jumps or not good):
            runs.append((start, index))
            start = None
        if good and start is None:
            start = index
        row = f"{log.path}: {log.row(begin + index)}"
        if not good and (index == 0 or bool(whole[index - 1])):
            gaps.append(Gap(f"{row}, column {_first_bad(part, labels, index)}: no finite number"))
        elif jumps:
            gaps.append(Gap(f"{row}: {float(interval[index - 1]):.4g} s after the row before"))
    if start is not None:
        runs.append((start, len(time)))
    return tuple(runs), tuple(gaps)


def _first_bad(part: dict[str, Tensor], labels: dict[str, tuple[str, ...]], index: int) -> str:
    for what, values in part.items():
        bad = ~values[index].isfinite()
        if what != "time" and bool(bad.any()):
            return labels[what][int(bad.nonzero()[0])]
    return "unknown"
