"""Import of real or logged trajectories into a dataset. Open :func:`import_trajectories` first.

Reading (:mod:`.logs`), naming (:mod:`.log_mapping`), cutting at gaps (:mod:`.motion`), checking (:mod:`.log_checks`),
resampling (:mod:`.resampling`), and then this module: pieces of equal length, splits, files. Everything is read and
checked before anything is written, and the folder appears under its name when it is finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .artifact import BEST
from .dataset import ROW_GROUPS, TrajectoryDataset, TrajectoryWriter, check_seed
from .log_checks import Agreement, check_velocities
from .log_mapping import LogMapping, read_mapping
from .logs import read_log
from .motion import Motion, read_motions
from .resampling import METHODS, states_of_run
from .robot import RobotSpec
from .storage import TEMPORARY_SUFFIX, check_writable, publish_directory, read_json, readable, sha256_of
from .windows import seeded_generator

__all__ = ["ImportReport", "import_trajectories", "read_robot"]

SHARD_ROWS = 1000
SHORT = "piece between gaps shorter than the horizon"
SHORT_TRAJECTORY = "trajectory shorter than the horizon"
COARSE, FINE = 10.0, 1e-3


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import read and wrote.

    Attributes:
        datasets: Folder of each dataset, by the split's name; ``""`` without splits.
        trajectories: Logged trajectories that were read.
        rows: Pieces of T model steps that were written.
        gaps: Where trajectories were cut: file, row and column.
        left_out: Pieces and trajectories left out, by reason.
        agreements: How well each logged velocity fits the differentiated pose.
        differentiated: Velocities that are not in the log.
    """

    datasets: dict[str, TrajectoryDataset]
    trajectories: int
    rows: int
    gaps: tuple[str, ...]
    left_out: dict[str, int]
    agreements: dict[str, Agreement]
    differentiated: tuple[str, ...]


@dataclass
class _Pieces:
    """Pieces of equal length, the trajectory that each one comes from, and what was left out."""

    states: list[Tensor] = field(default_factory=list)
    controls: list[Tensor] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def import_trajectories(
    files: Sequence[str | Path],
    robot: RobotSpec,
    mapping: str | Path,
    out: str | Path,
    *,
    horizon: int,
    velocities: str = "backward",
    max_gap: float | None = None,
    skip_short: bool = False,
    splits: Mapping[str, int] | None = None,
    tolerance: float = 0.5,
    seed: int = 0,
) -> ImportReport:
    """Write logged trajectories as a dataset, or as one per split.

    Every dataset's trajectories have T model steps. A logged one, or what gaps leave of it, is cut into pieces from
    its start; the last piece ends where the log ends and may overlap the one before. The pieces of one logged
    trajectory stay on one side of every split, here and in training (``row_groups`` of the manifest's ``extra``).

    Args:
        files: CSV and npz files of one layout.
        robot: The robot; its model step is what the log is resampled to.
        mapping: Mapping file, see :mod:`nerd_core.log_mapping`.
        out: Folder to create; with splits, the folder of their datasets.
        horizon: Model steps T of each piece; at least the training window.
        velocities: ``backward`` or ``central`` differences for velocities that are not logged.
        max_gap: Rows further apart [s] have a gap between them; None for 1.5 times the median interval.
        skip_short: Leave out trajectories without gaps that are shorter than T, instead of refusing them.
        splits: Name to number of logged trajectories, drawn by the seed; None for one dataset.
        tolerance: Disagreement of stated and differentiated velocities that is let pass.
        seed: Seed of the splits.

    Raises:
        ValueError: Bad input; file, row and column are named, and nothing is written.
    """
    out = Path(out)
    _check_settings(files, horizon, velocities, max_gap, tolerance, seed)
    if out.exists():
        raise ValueError(f"out: {out} exists; choose a new folder")
    check_writable(out)
    names = read_mapping(mapping, robot)
    motions = [motion for file in files for motion in read_motions(read_log(file), names, max_gap)]
    _check_intervals(motions, robot)
    agreements = check_velocities(motions, names, robot, tolerance)
    pieces = _cut(motions, names, robot, horizon, velocities, skip_short=skip_short)
    chosen = _split(sorted(set(pieces.groups)), splits, seed)
    differentiated = _differentiated(names, robot)
    engine = {
        "name": "nerd_core.import",
        "version": 1,
        "files": [{"name": Path(file).name, "sha256": sha256_of(Path(file))} for file in files],
        "mapping": names.document,
        "differentiated": dict.fromkeys(differentiated, velocities),
        "interpolation": "linear, orientations slerp, controls held; rows at the model steps as they are",
        "stated_velocities": {name: found._asdict() for name, found in agreements.items()},
        "gaps": sum(len(motion.gaps) for motion in motions),
    }
    settings = {"horizon": horizon, "max_gap": max_gap, "skip_short": skip_short, "trajectories": len(motions)}
    settings |= {"splits": None if splits is None else dict(splits)}
    temporary = out.with_name(out.name + TEMPORARY_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    for name, members in chosen.items():
        rows = [index for index, group in enumerate(pieces.groups) if group in members]
        extra = settings | {"split": name, ROW_GROUPS: [pieces.groups[row] for row in rows]}
        _write(temporary / name, robot, engine, seed, extra, pieces, rows)
    publish_directory(temporary, out)
    return ImportReport(
        datasets={name: TrajectoryDataset.open(out / name) for name in chosen},
        trajectories=len(motions),
        rows=len(pieces.groups),
        gaps=tuple(gap.where for motion in motions for gap in motion.gaps),
        left_out=pieces.left_out,
        agreements=agreements,
        differentiated=differentiated,
    )


def read_robot(path: str | Path) -> RobotSpec:
    """The robot of a RobotSpec JSON file, or of a dataset, model or run folder.

    Raises:
        ValueError: Nothing there describes a robot.
    """
    path = Path(path)
    if path.is_dir():
        path = next((f for f in (path / "manifest.json", path / BEST / "manifest.json") if f.exists()), path)
        if path.is_dir():
            raise ValueError(f"robot: {path} holds no manifest.json, expected a dataset, model or run folder")
    document = read_json(path, what="robot description")
    with readable(path):
        return RobotSpec.from_json(document["robot"] if path.name == "manifest.json" else document)


def _check_settings(
    files: Sequence[str | Path], horizon: int, velocities: str, max_gap: float | None, tolerance: float, seed: int
) -> None:
    check_seed(seed)
    expected = {
        "files": (files, len(files) > 0, "at least one"),
        "horizon": (horizon, horizon >= 1, "at least 1"),
        "velocities": (velocities, velocities in METHODS, " or ".join(METHODS)),
        "max_gap": (max_gap, max_gap is None or max_gap > 0, "a positive time [s]"),
        "tolerance": (tolerance, tolerance > 0, "a positive number"),
    }
    for name, (value, good, words) in expected.items():
        if not good:
            raise ValueError(f"{name} is {value!r}, expected {words}")


def _check_intervals(motions: Sequence[Motion], robot: RobotSpec) -> None:
    """Rows much further apart or much closer than the model steps: the unit of time is wrong, or the robot."""
    for motion in motions:
        interval = float(motion.time.diff().median())
        if not FINE * robot.dt <= interval <= COARSE * robot.dt:
            raise ValueError(
                f"{motion.row(0)}, column time: rows are {interval:.4g} s apart, the robot's model step is "
                f"{robot.dt:.4g} s; expected at most {COARSE:g} and at least {FINE:g} of it: is the unit of time right?"
            )


def _cut(
    motions: Sequence[Motion],
    mapping: LogMapping,
    robot: RobotSpec,
    horizon: int,
    velocities: str,
    *,
    skip_short: bool,
) -> _Pieces:
    pieces = _Pieces()
    for group, motion in enumerate(motions):
        for run in motion.runs:
            states, controls = states_of_run(motion, run, mapping, robot, velocities)
            last = len(states) - 1 - horizon
            if last >= 0:
                for start in sorted({*range(0, last + 1, horizon), last}):
                    pieces.states.append(states[start : start + horizon + 1])
                    pieces.controls.append(controls[start : start + horizon])
                    pieces.groups.append(group)
            elif motion.gaps:
                pieces.leave_out(SHORT)
            elif skip_short:
                pieces.leave_out(SHORT_TRAJECTORY)
            else:
                raise ValueError(
                    f"{motion.row(0)} to {motion.log.row(motion.first + len(motion.time) - 1)}, column time: this "
                    f"trajectory has {len(states)} frames at the model's steps, expected at least {horizon + 1} for "
                    f"a horizon of {horizon}; a smaller horizon takes it, skip_short leaves it out"
                )
    if not pieces.groups:
        first = next((gap.where for motion in motions for gap in motion.gaps), "no gaps")
        raise ValueError(f"files: no stretch of {horizon + 1} frames without a gap is left (first gap: {first})")
    return pieces


def _split(groups: list[int], splits: Mapping[str, int] | None, seed: int) -> dict[str, set[int]]:
    """Trajectories of each split; whole ones, in an order that the seed decides."""
    if splits is None:
        return {"": set(groups)}
    for name, count in splits.items():
        if not name.isidentifier() or count < 1:
            raise ValueError(f"splits: got {name}={count}, expected names like 'train' with at least 1 trajectory")
    if sum(splits.values()) != len(groups):
        raise ValueError(f"splits: {dict(splits)} are {sum(splits.values())} trajectories, expected {len(groups)}")
    order = torch.randperm(len(groups), generator=seeded_generator(seed, "import splits")).tolist()
    found, first = {}, 0
    for name, count in splits.items():
        found[name] = {groups[place] for place in order[first : first + count]}
        first += count
    return found


def _write(
    path: Path,
    robot: RobotSpec,
    engine: Mapping[str, Any],
    seed: int,
    extra: Mapping[str, Any],
    pieces: _Pieces,
    rows: list[int],
) -> None:
    with TrajectoryWriter(path, robot, engine=engine, seed=seed, extra=extra) as writer:
        for reason, count in pieces.left_out.items():
            writer.reject(reason, count)
        for first in range(0, len(rows), SHARD_ROWS):
            part = rows[first : first + SHARD_ROWS]
            writer.append(
                torch.stack([pieces.states[row] for row in part]),
                torch.stack([pieces.controls[row] for row in part]),
            )


def _differentiated(mapping: LogMapping, robot: RobotSpec) -> tuple[str, ...]:
    base = {"linear_velocity": mapping.linear_velocity, "angular_velocity": mapping.angular_velocity}
    absent = [name for name, stated in base.items() if robot.floating and stated is None]
    pairs = zip(robot.joints, mapping.joint_velocities, strict=True)
    return (*absent, *(f"{joint.name} velocity" for joint, rate in pairs if rate is None))
