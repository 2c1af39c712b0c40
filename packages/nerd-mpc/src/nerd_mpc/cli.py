"""The ``nerd-mpc`` command: climb, and the recipe of the released model."""

import difflib
import platform as machine
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import Progress

from nerd_core.command import print_json, run_command
from nerd_core.dataset import check_seed
from nerd_core.device import cores, processor
from nerd_coupling.robots import Robot, load_robot
from nerd_coupling.warp_worlds import MjWarpWorlds

from .dial import DialConfig
from .dynamics import MjWarpRollout, MujocoRollout, NerdRollout, RolloutModel
from .episode import EpisodeRecord, run_episode
from .episode import Progress as Decision
from .outputs import OutputFolder
from .platform import PlatformTask, terrain_height
from .recipe import RecipeConfig, run_recipe
from .released import load_climber, released_model

__all__ = ["main"]

DYNAMICS = ("nerd", "mujoco", "mjwarp")


@dataclass(frozen=True, kw_only=True)
class Climb:
    """Climb a platform: plan in the learned model, execute in MuJoCo Warp, write a report and a video.

    Example: nerd-mpc climb --terrain T4
    """

    terrain: str | None = None
    """T1 … T6: decks of 0.06, 0.10, 0.14, 0.181, 0.22 and 0.26 m; T4 if neither this nor --height is given."""
    height: float | None = None
    """Deck height [m] instead of a named terrain."""
    dynamics: str = "nerd"
    """What plans are tried on: nerd, mujoco or mjwarp. Execution is always MuJoCo Warp."""
    model: Path | None = None
    """Model folder; the released model if omitted."""
    samples: int = 128
    """Sampled plans per refinement."""
    horizon: int = 20
    """Length of a plan in control periods of 20 ms."""
    iterations: int = 2
    """Refinements per decision."""
    seed: int = 0
    """Decides start jitter and planner noise."""
    threads: int | None = None
    """Processor threads; all that this process may use if omitted."""
    video: bool = True
    """Render a video with MuJoCo Warp's ray tracer."""
    out: Path | None = None
    """New folder for the results; runs/climb-… if omitted."""

    def run(self) -> None:
        """Climb, report, and end with exit code 0 only on success."""
        started = time.monotonic()
        height = terrain_height(self.terrain, self.height)
        self._check()
        config = climb_config(samples=self.samples, horizon=self.horizon, iterations=self.iterations)
        name = self.terrain or ("T4" if self.height is None else f"{height:g}m")
        default = f"climb-{name}-{self.dynamics}-{datetime.now():%Y%m%d-%H%M%S}"
        folder = OutputFolder(self.out or Path("runs") / default)
        console = Console(stderr=True)
        # A log file has no width; rich would break every line at 80 columns.
        console.width = console.width if console.is_terminal else 160
        record = climb(
            height,
            dynamics=self.dynamics,
            model=self.model,
            config=config,
            seed=self.seed,
            name=name,
            threads=self.threads,
            console=console,
        )
        with folder as out:
            self._write(record, out, console)
        summary = {**record.summary, "wall_seconds": round(time.monotonic() - started, 1)}
        console.print(f"{record.outcome}: report {folder.path / 'report.html'}")
        print_json({"command": "climb", **record.settings, **summary})
        if record.outcome != "climbed":
            raise SystemExit(130 if record.outcome == "interrupted" else 1)

    def _check(self) -> None:
        if self.dynamics not in DYNAMICS:
            close = difflib.get_close_matches(self.dynamics.lower(), DYNAMICS, cutoff=0.4)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(f"--dynamics is {self.dynamics!r}, expected one of {', '.join(DYNAMICS)}{hint}")
        if self.model is not None and self.dynamics != "nerd":
            raise ValueError(f"--model is {self.model}, expected only with --dynamics nerd")
        for name, least in (("samples", 2), ("horizon", 5), ("iterations", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}, expected at least {least}")
        check_seed(self.seed)
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads is {self.threads}, expected at least 1")

    def _write(self, record: EpisodeRecord, out: Path, console: Console) -> None:
        from .outputs import write_episode

        frames = None
        if self.video and len(record.controls):
            frames = self._frames(record, console)
        write_episode(record, frames, out)

    def _frames(self, record: EpisodeRecord, console: Console) -> torch.Tensor:
        from nerd_coupling.terrain import Terrain

        from .video import render_episode

        terrain = Terrain.platform(record.settings["height"])
        with Progress(console=console, transient=True) as bar:
            line = bar.add_task("rendering with MuJoCo Warp's ray tracer", total=None)

            def show(done: int, total: int) -> None:
                bar.update(line, completed=done, total=total)

            return render_episode(load_robot(record.settings["robot"]), terrain, record.states, progress=show)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Make the released model anew: record, train, record where the learned planner goes, train again.

    Example: nerd-mpc recipe --out runs/recipe
    """

    out: Path
    """Folder of all stages; the same command goes on where it was stopped."""
    workers: int | None = None
    """Recording processes; one per core if omitted."""
    config: Annotated[RecipeConfig, tyro.conf.arg(name="")] = field(default_factory=RecipeConfig)

    def run(self) -> None:
        """Run all stages."""
        best = run_recipe(self.out, self.config, workers=self.workers)
        print_json({"command": "recipe", "model": str(best)})


def climb_config(*, samples: int, horizon: int, iterations: int) -> DialConfig:
    """The climb's planner settings at a budget; every row of a comparison uses the same."""
    return DialConfig(
        num_samples=samples,
        horizon=horizon,
        num_knots=5,
        iterations=iterations,
        first_iterations=3 * iterations,
        temperature=0.15,
        noise_scale=1.0,
        anneal_iteration=0.5,
        anneal_horizon=1.0,
    )


def make_dynamics(
    dynamics: str,
    task: PlatformTask,
    samples: int,
    model: Path | None,
    *,
    threads: int | None = None,
) -> tuple[RolloutModel, dict[str, Any] | None]:
    """A rollout model by name, and the manifest of its network if it has one."""
    if dynamics == "mujoco":
        return MujocoRollout(task, threads=threads), None
    if dynamics == "mjwarp":
        return MjWarpRollout(task, samples), None
    network, manifest = load_climber(model or released_model(), task.robot.spec)
    return NerdRollout(network, task, samples, threads=threads), manifest


def climb(
    height: float,
    *,
    dynamics: str,
    model: Path | None,
    config: DialConfig,
    seed: int,
    name: str,
    threads: int | None = None,
    console: Console | None = None,
) -> EpisodeRecord:
    """One episode with everything set up for it; prints a line per decision to ``console``."""
    robot = load_robot("go2")
    task = PlatformTask(robot, height)
    quiet = console or Console(quiet=True)
    if dynamics == "nerd":
        load_climber(model or released_model(), robot.spec)  # a model that does not fit speaks first, alone
    quiet.print(f"Climbing {name} ({height:g} m), planning in {dynamics}. A first run compiles for about a minute.")
    with ThreadPoolExecutor(1) as beside:
        # On a first run MuJoCo Warp's kernels and the planner's step are compiled, by two compilers: side by side.
        warming = beside.submit(_warm_plant, robot, task)
        if dynamics != "nerd":
            warming.result()  # planner and plant would compile the same kernels at the same time
        with quiet.status("preparing the planner's dynamics (compiled once, then kept)"):
            rollout, manifest = make_dynamics(dynamics, task, config.num_samples, model, threads=threads)
        torch.set_num_threads(threads or cores())
        with quiet.status("preparing MuJoCo Warp (kernels are compiled once, then kept)"):
            plant = warming.result()
    settings = {
        "robot": robot.name,
        "terrain": name,
        "height": task.height,
        "dynamics": dynamics,
        "seed": seed,
        "plan": asdict(config),
        "model": None if manifest is None else _model_summary(manifest),
        "compiled": getattr(rollout, "compiled", None),
        **identity(),
    }

    def show(now: Decision) -> None:
        x, z = float(now.state[0]), float(now.state[2])
        quiet.print(
            f"{now.decision:4d}  x {x:5.2f} m  z {z:5.2f} m  feet on deck {now.feet_on_deck}  held {now.held:2d}/"
            f"{task.hold_decisions}  score {now.score:7.3f}  plan {now.planning_ms:6.1f} ms",
            highlight=False,
        )

    record = run_episode(task, rollout, plant, config, seed=seed, settings=settings, on_decision=show)
    if manifest is None:
        return record
    held_out = manifest.get("metrics", {}).get("held_out_position_error_m")
    return replace(record, summary={**record.summary, "held_out_error": held_out})


def _warm_plant(robot: Robot, task: PlatformTask) -> MjWarpWorlds:
    """The world that executes, its kernels compiled by a first step."""
    plant = MjWarpWorlds(robot, task.terrain, 1)
    plant.step(torch.tensor(robot.home_ctrl)[None])
    return plant


def _model_summary(manifest: dict[str, Any]) -> dict[str, Any]:
    held_out = manifest.get("metrics", {}).get("held_out_position_error_m")
    return {
        "name": manifest["name"],
        "parameters": manifest["parameters"],
        "weights_sha256": manifest["weights_sha256"],
        "held_out_position_error_m": held_out,
    }


def identity() -> dict[str, Any]:
    """Versions and machine, for results."""
    packages = ("nerd-core", "nerd-contact", "nerd-coupling", "nerd-mpc")
    engines = ("torch", "mujoco", "mujoco-warp", "warp-lang")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {p: metadata.version(p) for p in (*packages, *engines)},
        "machine": {
            "processor": processor(),
            "architecture": machine.machine(),
            "cores": cores(),
            "torch_threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "python": machine.python_version(),
        },
    }


Command = Annotated[Climb, tyro.conf.subcommand("climb")] | Annotated[Recipe, tyro.conf.subcommand("recipe")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``nerd-mpc``.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv``.
    """
    run_command(
        "nerd-mpc",
        Command,
        description=("Predictive control inside a learned model. Try: nerd-mpc climb --terrain T4"),
        arguments=arguments,
    )
