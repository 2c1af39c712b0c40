"""The planner table: rows of dynamics, terrains and seeds, executed in MuJoCo Warp.

Run from the repository's root, alone on the machine:

    uv run python benchmarks/climb.py --dynamics nerd mujoco --terrains T2 T4 --seeds 0 1 2 3 4

Every row has the same samples, horizon, refinements, noise and torque limits. Writes
benchmarks/results/climb-<label>.json with every episode, hardware and versions; the last line on standard output is
that document's summary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from provenance import commit
from rich.console import Console

from nerd_core.command import print_json, speaking_plainly
from nerd_mpc.cli import climb, climb_config, identity
from nerd_mpc.platform import TERRAINS, terrain_height


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Episodes to run and where to write them."""

    label: str
    """Name of the results file."""
    dynamics: tuple[str, ...] = ("nerd", "mujoco")
    """Rows."""
    terrains: tuple[str, ...] = tuple(TERRAINS)
    """Terrains."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Start jitter and planner noise."""
    model: Path | None = None
    """Model folder for the row nerd; the released model if omitted."""
    samples: int = 128
    horizon: int = 20
    iterations: int = 2
    out: Path = Path("benchmarks/results")

    def run(self) -> None:
        """Run all episodes; the file is written after each, so that a stop loses one at most."""
        config = climb_config(samples=self.samples, horizon=self.horizon, iterations=self.iterations)
        path = self.out / f"climb-{self.label}.json"
        if path.exists():
            raise ValueError(f"--label: {path} exists, expected a new name")
        path.parent.mkdir(parents=True, exist_ok=True)
        console, episodes = Console(stderr=True), []
        for terrain in self.terrains:
            for seed in self.seeds:
                for dynamics in self.dynamics:
                    record = climb(
                        terrain_height(terrain, None),
                        dynamics=dynamics,
                        model=self.model,
                        config=config,
                        seed=seed,
                        name=terrain,
                    )
                    episode = {
                        "terrain": terrain,
                        "seed": seed,
                        "dynamics": dynamics,
                        **record.summary,
                    }
                    episode["model"] = record.settings["model"]
                    episodes.append(episode)
                    console.print(
                        f"{terrain} seed {seed} {dynamics:8s} {record.outcome:12s} "
                        f"{record.summary['decisions']} decisions, {record.summary['planning_ms']['median']} ms, "
                        f"on-plan {record.summary['on_plan_error_median_m']}",
                        highlight=False,
                    )
                    document = {
                        "command": "benchmarks/climb.py",
                        "commit": commit(),
                        "plan": {
                            "samples": self.samples,
                            "horizon": self.horizon,
                            "iterations": self.iterations,
                        },
                        **identity(),
                        "table": table(episodes),
                        "episodes": episodes,
                    }
                    path.write_text(json.dumps(document, indent=1) + "\n")
        print_json({"results": str(path), "table": table(episodes)})


def table(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Climbs, planning time and on-plan error per row and terrain."""
    rows = []
    for dynamics, terrain in dict.fromkeys((e["dynamics"], e["terrain"]) for e in episodes):
        mine = [e for e in episodes if (e["dynamics"], e["terrain"]) == (dynamics, terrain)]
        times = [e["planning_ms"]["median"] for e in mine if e["planning_ms"]["median"] is not None]
        errors = {
            h: median([e["on_plan_error_median_m"][h] for e in mine if h in e["on_plan_error_median_m"]])
            for h in ("10", "20")
        }
        rows.append(
            {
                "dynamics": dynamics,
                "terrain": terrain,
                "climbed": sum(e["outcome"] == "climbed" for e in mine),
                "episodes": len(mine),
                "planning_ms_median": median(times),
                "on_plan_error_median_m": errors,
            }
        )
    return rows


def median(values: list[float]) -> float | None:
    """Middle value, or None of nothing."""
    return round(float(torch.tensor(values).median()), 5) if values else None


if __name__ == "__main__":
    speaking_plainly("benchmarks/climb.py", lambda: tyro.cli(Settings).run())
