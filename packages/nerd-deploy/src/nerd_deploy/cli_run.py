"""Commands that compute: rollout, bench."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from .command import print_json, say

__all__ = ["Bench", "Rollout"]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Predict many worlds from states and controls in a .npz file.

    Worlds whose input is not finite are flagged, the others are untouched. The last line on standard
    output is one JSON document.

    Example: nerd-deploy rollout go2.nerd starts.npz --out predicted.npz
    """

    artifact: tyro.conf.Positional[Path]
    """Folder of an artifact, or exported file."""
    request: tyro.conf.Positional[Path]
    """Arrays state (B, nq + nv) and control (B, T, nu), and context.* or scene.* for contacts."""
    out: Path
    """File to create: state (B, T + 1, nq + nv) and flagged_at (B,)."""
    backend: str = "ort-cpu"
    """What computes the steps: ort-cpu, ort-cuda or ort-tensorrt."""
    threads: int = 1
    """CPU threads within and between operators."""

    def run(self) -> int:
        """Predict, write and report."""
        from .backend import open_backend
        from .rollouts import check_free, observer, read_request, roll, write_rollout

        check_free(self.out)
        step = open_backend(self.artifact, self.backend, threads=self.threads)
        request = read_request(self.request, step.manifest)
        sees = bool(step.manifest["context"]) and not request.context
        found = roll(step, request, observer(step.manifest, request.scene) if sees else None)
        write_rollout(self.out, found)
        flagged = (found.flagged_at >= 0).nonzero()[0].tolist()
        worlds, steps = request.control.shape[:2]
        say(f"{self.out}: {worlds} worlds, {steps} steps, {len(flagged)} flagged")
        for world in flagged[:10]:
            say(f"world {world}: not finite at step {found.flagged_at[world]}")
        print_json({"command": "rollout", "worlds": worlds, "steps": steps, "flagged": flagged})
        return 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time single steps per batch size.

    The last line on standard output is one JSON document.

    Example: nerd-deploy bench go2.nerd --batches 1 16 256
    """

    artifact: tyro.conf.Positional[Path]
    """Folder of an artifact, or exported file."""
    backend: str = "ort-cpu"
    """What computes the steps: ort-cpu, ort-cuda or ort-tensorrt."""
    batches: tuple[int, ...] = (1, 16, 256)
    """Numbers of worlds."""
    steps: int = 2000
    """Steps that are timed, per batch size; p99.9 takes 10,000."""
    warmup: int = 200
    """Steps before them that are not."""
    threads: int = 1
    """CPU threads within and between operators."""
    spin: bool = False
    """Let waiting threads spin: faster alone, at the expense of every other process."""

    def run(self) -> int:
        """Time and report."""
        from .bench import bench_artifact

        found = bench_artifact(
            self.artifact,
            backend=self.backend,
            batches=self.batches,
            steps=self.steps,
            warmup=self.warmup,
            threads=self.threads,
            spin=self.spin,
        )
        Console(stderr=True).print(_table(found))
        print_json(found)
        return 0


def _table(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['name']}, {found['backend']}, {found['threads']} threads, {found['steps']} steps [µs]")
    heads = {"p50_us": "p50", "p90_us": "p90", "p99_us": "p99", "p99_9_us": "p99.9", "max_us": "max"}
    for head in ("worlds", *heads.values(), "steps/s"):
        table.add_column(head, justify="right")
    for row in found["batches"]:
        cells = ["-" if row[key] is None else f"{row[key]:,.0f}" for key in heads]
        table.add_row(f"{row['batch']:,}", *cells, f"{row['steps_per_s']:,.0f}")
    return table
