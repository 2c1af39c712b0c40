"""The command that reads logs: ``nerd-core import-trajectories``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from .command import say
from .importing import ImportReport, import_trajectories, read_robot

__all__ = ["ImportTrajectories"]

SHOWN_GAPS = 5


@dataclass(frozen=True, kw_only=True)
class ImportTrajectories:
    """Turn real or logged trajectories (CSV, npz) into a dataset.

    Example: nerd-core import-trajectories tosses.npz --robot cube.json --mapping mapping.json --horizon 32 --out cube
    """

    files: tyro.conf.Positional[tuple[Path, ...]]
    """CSV and npz files of one layout."""
    robot: Path
    """JSON file of the robot, or a dataset, model or run folder that carries one."""
    mapping: Path
    """JSON file: which column is what, in which unit and frame."""
    out: Path
    """Folder to create."""
    horizon: int
    """Model steps of each piece; at least the training window."""
    velocities: Literal["backward", "central"] = "backward"
    """Differences that give the velocities that the log lacks."""
    max_gap: float | None = None
    """Rows further apart [s] have a gap between them; without it, 1.5 times the median interval."""
    skip_short: bool = False
    """Leave out trajectories shorter than the horizon, instead of refusing them."""
    split: tuple[str, ...] = ()
    """NAME=COUNT, one each: datasets of so many logged trajectories below --out."""
    tolerance: float = 0.5
    """Disagreement of logged velocities and differentiated pose that is let pass."""
    seed: int = 0
    """Seed of the splits."""

    def run(self) -> None:
        """Import and report."""
        report = import_trajectories(
            self.files,
            read_robot(self.robot),
            self.mapping,
            self.out,
            horizon=self.horizon,
            velocities=self.velocities,
            max_gap=self.max_gap,
            skip_short=self.skip_short,
            splits=self._splits(),
            tolerance=self.tolerance,
            seed=self.seed,
        )
        for line in _lines(report, self.velocities):
            say(line)

    def _splits(self) -> dict[str, int] | None:
        found: dict[str, int] = {}
        for word in self.split:
            name, _, count = word.partition("=")
            if not count.isdecimal() or name in found:
                raise ValueError(f"split: got {word!r}, expected NAME=COUNT, each name once")
            found[name] = int(count)
        return found or None


def _lines(report: ImportReport, velocities: str) -> list[str]:
    lines = [f"gap: {gap}" for gap in report.gaps[:SHOWN_GAPS]]
    if len(report.gaps) > SHOWN_GAPS:
        lines.append(f"gaps: {len(report.gaps) - SHOWN_GAPS} more")
    lines += [f"left out: {count} of kind {reason!r}" for reason, count in report.left_out.items()]
    for name, found in report.agreements.items():
        told = (
            "nothing moves" if found.disagreement is None else f"{found.disagreement:.2g} from {found.kind} differences"
        )
        lines.append(f"{name}: {told}")
    lines += [f"{name}: not logged, {velocities} differences" for name in report.differentiated]
    for dataset in report.datasets.values():
        lines.append(
            f"{dataset.path}: {dataset.num_trajectories} trajectories of {dataset.horizon} steps, "
            f"digest {dataset.digest[:12]}"
        )
    return lines
