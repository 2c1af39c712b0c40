"""What the numbers of a dataset are: range and spread of every channel, and where it has been.

Shards are read one after another, so a dataset need not fit in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .dataset import MANIFEST, Trajectories, TrajectoryDataset
from .evaluate import IDLE, channel_names, state_channels
from .robot import RobotSpec
from .storage import readable

__all__ = [
    "ChannelStatistics",
    "Coverage",
    "DatasetReport",
    "FieldRange",
    "channel_units",
    "count_bad",
    "coverage",
    "inspect_dataset",
]


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """One channel over every frame of a dataset, in its SI unit; idle if it never moves."""

    name: str
    unit: str
    min: float
    mean: float
    std: float
    max: float
    idle: bool


@dataclass(frozen=True, kw_only=True)
class FieldRange:
    """A field of the surroundings: its shape per trajectory and the range of all its numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    min: float
    max: float


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What :func:`inspect_dataset` found.

    Attributes:
        robot: Name of the robot.
        robot_digest: SHA-256 of its description.
        dt: Model step [s].
        engine: Engine, version and settings, as recorded.
        versions: Versions of the libraries that recorded.
        seed: The recorder's seed.
        trajectories: Trajectories N.
        horizon: Model steps T of each.
        transitions: N times T.
        shards: ``file``, ``rows`` and ``bytes`` of every shard.
        digest: SHA-256 that names the numbers and the robot.
        verified: The size and SHA-256 of every shard are those of the manifest.
        states: The 2·nv state channels: angles wrapped, an orientation as a rotation vector.
        controls: The controls.
        scenes: Fields of the surroundings.
        rejected: Trajectories that the recorder left out, by reason.
    """

    robot: str
    robot_digest: str
    dt: float
    engine: dict[str, Any]
    versions: dict[str, Any]
    seed: int | None
    trajectories: int
    horizon: int
    transitions: int
    shards: tuple[dict[str, Any], ...]
    digest: str
    verified: bool
    states: tuple[ChannelStatistics, ...]
    controls: tuple[ChannelStatistics, ...]
    scenes: tuple[FieldRange, ...]
    rejected: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Histograms of a dataset between each channel's least and greatest value.

    Attributes:
        counts: Frames per bin of each state channel, then of each control, shape (C, bins).
        plane: Frames per cell of the first position (rows) and its velocity (columns), (bins, bins).
        position: Index of that position among the state channels.
        velocity: Index of its velocity.
    """

    counts: Tensor
    plane: Tensor
    position: int
    velocity: int


def channel_units(robot: RobotSpec) -> tuple[str, ...]:
    """SI units of the 2·nv state channels, then of the nu controls."""
    position = ["m" if joint.kind == "slide" else "rad" for joint in robot.joints]
    velocity = [f"{unit}/s" for unit in position]
    base = (["m"] * 3 + ["rad"] * 3, ["m/s"] * 3 + ["rad/s"] * 3) if robot.floating else ([], [])
    effort = {"m": "N", "rad": "N m"}
    driven = [position[joint] for joint in robot.actuated]
    controls = driven if robot.control == "position" else [effort[unit] for unit in driven]
    return (*base[0], *position, *base[1], *velocity, *controls)


def inspect_dataset(path: str | Path) -> DatasetReport:
    """Verify a dataset and measure every channel, one shard in memory at a time.

    Raises:
        ValueError: Not a complete, undamaged dataset, or one with numbers that are not finite.
    """
    dataset = TrajectoryDataset.open(path)
    robot, manifest = dataset.robot, dataset.manifest
    with readable(Path(path) / MANIFEST):
        states, controls, scenes = _measure(dataset)
        return DatasetReport(
            robot=robot.name,
            robot_digest=robot.digest(),
            dt=robot.dt,
            engine=dict(manifest["engine"]),
            versions=dict(manifest.get("versions", {})),
            seed=manifest.get("seed"),
            trajectories=dataset.num_trajectories,
            horizon=dataset.horizon,
            transitions=dataset.num_transitions,
            shards=tuple({key: shard[key] for key in ("file", "rows", "bytes")} for shard in manifest["shards"]),
            digest=dataset.digest,
            verified=True,  # opening compared every shard's size and SHA-256 with the manifest
            states=states,
            controls=controls,
            scenes=scenes,
            rejected=dict(manifest.get("rejected", {})),
        )


def coverage(dataset: TrajectoryDataset, report: DatasetReport, bins: int = 48) -> Coverage:
    """Histograms of every channel, and of the first position against its velocity.

    Args:
        dataset: The dataset.
        report: What :func:`inspect_dataset` found in it.
        bins: Bins of each channel.
    """
    nv, width = dataset.robot.nv, 2 * dataset.robot.nv
    channels = (*report.states, *report.controls)
    least, most = (torch.tensor([getattr(c, end) for c in channels], dtype=torch.float64) for end in ("min", "max"))
    room = torch.where(most > least, most - least, torch.ones_like(most))
    counts = torch.zeros(len(channels), bins, dtype=torch.int64)
    plane = torch.zeros(bins * bins, dtype=torch.int64)
    for index in range(len(report.shards)):
        states, controls = _channels(dataset.robot, dataset.load_shard(index))
        for values, part in ((states, slice(0, width)), (controls, slice(width, None))):
            cell = ((values - least[part]) / room[part] * bins).long().clamp(0, bins - 1)
            flat = cell + torch.arange(cell.shape[1]) * bins
            counts[part] += torch.bincount(flat.flatten(), minlength=cell.shape[1] * bins).view(-1, bins)
            if part.start == 0:
                plane += torch.bincount(cell[:, 0] * bins + cell[:, nv], minlength=bins * bins)
    return Coverage(counts=counts, plane=plane.view(bins, bins), position=0, velocity=nv)


def _measure(
    dataset: TrajectoryDataset,
) -> tuple[tuple[ChannelStatistics, ...], tuple[ChannelStatistics, ...], tuple[FieldRange, ...]]:
    robot = dataset.robot
    names = channel_names(robot), tuple(f"{robot.joints[joint].name}_ctrl" for joint in robot.actuated)
    moments = _Moments(), _Moments()
    ranges: dict[str, tuple[float, float]] = {}
    for index, entry in enumerate(dataset.manifest["shards"]):
        shard, file = dataset.load_shard(index), dataset.path / entry["file"]
        if not len(shard.states):
            continue
        for what, values, of, sums in zip(("state", "control"), _channels(robot, shard), names, moments, strict=True):
            _refuse_bad(file, what, values.view(len(shard.states), -1, len(of)), of)
            sums.add(values)
        for name, field in shard.scenes.items():
            numbers = field.double().reshape(len(field), -1, 1)
            _refuse_bad(file, f"scene.{name}", numbers, ("",))
            if numbers.numel():
                least, most = ranges.get(name, (math.inf, -math.inf))
                ranges[name] = min(least, float(numbers.min())), max(most, float(numbers.max()))
    units = channel_units(robot)
    shapes = dataset.manifest["shapes"]
    return (
        moments[0].channels(names[0], units[: 2 * robot.nv]),
        moments[1].channels(names[1], units[2 * robot.nv :]),
        tuple(
            FieldRange(
                name=name,
                shape=tuple(shapes[f"scene.{name}"]["shape"]),
                dtype=shapes[f"scene.{name}"]["dtype"],
                min=least,
                max=most,
            )
            for name, (least, most) in sorted(ranges.items())
        ),
    )


class _Moments:
    """Least, mean, standard deviation and greatest of each column, shard by shard."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, values: Tensor) -> None:
        if not self.count:
            # Sums are taken about the first shard's mean: a far but steady channel keeps its digits.
            self.shift = values.mean(0)
            self.first = self.second = torch.zeros_like(self.shift)
            self.least, self.most = values[0], values[0]
        self.count += len(values)
        self.first = self.first + (values - self.shift).sum(0)
        self.second = self.second + (values - self.shift).square().sum(0)
        self.least = torch.minimum(self.least, values.amin(0))
        self.most = torch.maximum(self.most, values.amax(0))

    def channels(self, names: tuple[str, ...], units: tuple[str, ...]) -> tuple[ChannelStatistics, ...]:
        mean = self.shift + self.first / self.count
        variance = (self.second - self.first.square() / self.count) / max(self.count - 1, 1)
        columns = (self.least, mean, variance.clamp_min(0).sqrt(), self.most)
        rows = torch.stack(columns, 1).tolist()
        return tuple(
            ChannelStatistics(name=name, unit=unit, min=low, mean=middle, std=std, max=high, idle=std <= IDLE)
            for name, unit, (low, middle, std, high) in zip(names, units, rows, strict=True)
        )


def _channels(robot: RobotSpec, shard: Trajectories) -> tuple[Tensor, Tensor]:
    """Frames as (·, 2·nv) state channels and (·, nu) controls, float64."""
    return (
        state_channels(robot, shard.states.double()).flatten(0, 1),
        shard.controls.double().flatten(0, 1),
    )


def _refuse_bad(file: Path, what: str, values: Tensor, names: tuple[str, ...]) -> None:
    """Values are (trajectories, ·, names)."""
    bad = ~values.isfinite()
    if not bool(bad.any()):
        return
    row, _, column = bad.nonzero()[0].tolist()
    where = f"{what} {names[column]}".strip()
    raise ValueError(f"{file}: {where} holds {count_bad(values)}, the first in trajectory {row} of this shard")


def count_bad(values: Tensor) -> str:
    """Words for how many numbers are not finite."""
    count = int((~values.isfinite()).sum())
    return "1 number that is not finite" if count == 1 else f"{count} numbers that are not finite"
