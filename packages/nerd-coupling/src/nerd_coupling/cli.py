"""The ``nerd-coupling`` command: list and draw the robots, record a dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from nerd_core.command import print_json, run_command, say
from nerd_core.figures import check_plot, save_figure

from .drawing import contact_sheet
from .random_efforts import RandomEfforts
from .recording import RandomTargets, record
from .robots import Robot, load_robot, robot_names

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Robots:
    """List the robots that ship with this package, and draw them.

    Example: nerd-coupling robots --draw robots.png
    """

    draw: Path | None = None
    """Picture to write (.png, .svg or .pdf): all robots at their home poses; needs nerd-coupling[plot]."""

    def run(self) -> None:
        """Print the table, then one JSON document."""
        if self.draw is not None:
            check_plot(self.draw)
        table = Table(title="Robots")
        for head in (
            "name",
            "links",
            "joints",
            "control",
            "kp",
            "kd",
            "model step [ms]",
            "spheres",
        ):
            table.add_column(head)
        found = []
        for name in robot_names():
            robot = load_robot(name)
            spec = robot.spec
            row = {
                "name": name,
                "links": len(spec.bodies),
                "joints": len(spec.joints),
                "control": spec.control,
                "kp": sorted(set(spec.kp)),
                "kd": sorted(set(spec.kd)),
                "model_step_ms": round(1e3 * spec.dt, 3),
                "spheres": len(robot.probes),
            }
            found.append(row)
            table.add_row(*(str(value) for value in row.values()))
        Console(stderr=True).print(table)
        if self.draw is not None:
            save_figure(contact_sheet([load_robot(name) for name in robot_names()]), self.draw)
            say(f"{self.draw}: {len(found)} robots")
        print_json(found)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record a robot in MuJoCo C, each with its own recorder.

    go2: smooth random joint targets on and around random platforms. cartpole, double-pendulum, franka: NeRD's recorder,
    wide random starts and uniform efforts drawn anew at every model step; the double pendulum over a random plane per
    trajectory. A recording that was killed goes on with --resume and gives the same bytes. Other seeds, in other
    processes or on other hosts, give further datasets that training takes together.

    Example: nerd-coupling record double-pendulum --out pendulum --shards 4
    """

    robot: tyro.conf.Positional[str]
    """Name of the robot."""
    out: Path
    """Dataset folder to create."""
    shards: int = 4
    """Shards: of 82,000 transitions (go2) or 100,000 (the others)."""
    rows: int | None = None
    """Trajectories per shard; the recorder's own number if omitted."""
    horizon: int | None = None
    """Model steps per trajectory; the recorder's own number if omitted."""
    passive: bool = False
    """For evaluation: start as NeRD's environments reset, no effort."""
    ground: str | None = None
    """Double pendulum: none or c1 to c6, NeRD's evaluation grounds; a random plane per trajectory if omitted."""
    seed: int = 0
    """With a shard's number it decides everything that is drawn."""
    threads: int | None = None
    """Threads of MuJoCo; one per core if omitted."""
    resume: bool = False
    """Go on with an interrupted recording."""

    def run(self) -> None:
        """Record and report."""
        for name in ("shards", "threads", "rows", "horizon"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}, expected at least 1")
        robot = load_robot(self.robot)
        torch.set_num_threads(1)  # the engine's own threads do the work
        proposal = self._proposal(robot)
        record(
            self.out,
            robot,
            proposal,
            shards=self.shards,
            seed=self.seed,
            settings=proposal.settings(),
            threads=self.threads,
            num_boxes=1 if robot.spec.floating else 0,
            resume=self.resume,
        )
        say(f"{self.out}: {self.shards} shards")

    def _proposal(self, robot: Robot) -> RandomTargets | RandomEfforts:
        sizes = {name: getattr(self, name) for name in ("rows", "horizon") if getattr(self, name) is not None}
        if robot.spec.control == "effort":
            return RandomEfforts(robot, passive=self.passive, ground=self.ground, **sizes)
        if self.passive or self.ground is not None:
            raise ValueError(f"--passive and --ground are for robots driven by efforts, {robot.name} has servos")
        low, high = torch.tensor([j.range or (-3.14, 3.14) for j in robot.spec.joints]).unbind(-1)
        return RandomTargets(robot, torch.stack([low, high], -1), **sizes)


Command = Annotated[Robots, tyro.conf.subcommand("robots")] | Annotated[Record, tyro.conf.subcommand("record")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``nerd-coupling``.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv``.
    """
    run_command(
        "nerd-coupling",
        Command,
        description=("Robots and recordings. Try: nerd-coupling robots"),
        arguments=arguments,
        hint="interrupted; the same command with --resume goes on",
    )
