"""The ``nerd-rl`` command: train a policy in a physics, look at it in another."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from nerd_core.command import print_json, run_command, say
from nerd_core.dataset import check_seed
from nerd_core.device import cores, select_device, threads
from nerd_core.figures import check_plot, save_figure
from nerd_core.storage import as_json, list_differences

from .ant import ant_run
from .cartpole import cartpole_swing_up
from .environment import Environment
from .evaluation import evaluate_policy
from .physics import Physics, check_physics, open_physics
from .policy import load_policy, mean_policy
from .ppo import PpoConfig
from .task import Task
from .training import GapCheck, check_run_folder, policy_file, read_run, run_settings, train_policy
from .velocity import anymal_velocity, go2_velocity

__all__ = ["TASKS", "main"]

TASKS: dict[str, Callable[[], Task]] = {
    "cartpole-swing-up": cartpole_swing_up,
    "ant-run": ant_run,
    "go2-velocity": go2_velocity,
    "anymal-c-velocity": anymal_velocity,
}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a policy with PPO (rsl_rl) in a physics.

    Tasks: cartpole-swing-up, ant-run, go2-velocity, anymal-c-velocity. The run folder holds checkpoints, policies,
    policy.onnx, metrics.jsonl and TensorBoard's file. The last line on standard output is one JSON document.

    Example: nerd-rl train cartpole-swing-up --physics teacher --out swing-up
    """

    task: tyro.conf.Positional[str]
    """Name of the task."""
    physics: str
    """teacher (the analytical CartPole), mujoco, mjwarp, nerd or nerd-baseline."""
    out: Path
    """Run folder to create."""
    model: Path | None = None
    """Model or run folder, for nerd and nerd-baseline."""
    worlds: int = 1024
    """Worlds that are stepped side by side."""
    iterations: int = 300
    """Iterations of the run as a whole: collect, then update."""
    seed: int = 0
    """Decides first weights, actions, starts, commands and pushes."""
    save_every: int = 50
    """Iterations between checkpoints."""
    check_physics: str | None = None
    """Look at the policy in this physics now and then: how it would do outside the model."""
    check_every: int = 25
    """Iterations between looks."""
    check_worlds: int = 16
    """Episodes of a look."""
    device: str = "auto"
    """auto, cpu or cuda; MuJoCo C is always on the CPU."""
    threads: int | None = None
    """Processor threads; one per core if omitted."""
    eager: bool = False
    """Do not compile a model's step; it is compiled where there is a C++ compiler or a GPU."""
    resume: bool = False
    """Go on from the run's last checkpoint, with the same settings; iterations may be more."""
    ppo: PpoConfig

    @staticmethod
    def following(arguments: list[str]) -> Train:
        """The defaults, which follow the task of a command line not yet parsed."""
        name = next((word for word in arguments if word in TASKS), None)
        ppo = PpoConfig() if name is None else TASKS[name]().ppo
        return Train(task=tyro.MISSING, physics=tyro.MISSING, out=tyro.MISSING, ppo=ppo)

    def run(self) -> None:
        """Train and report."""
        task = replace(find_task(self.task), ppo=self.ppo)
        self._check()
        if not self.resume:
            check_run_folder(self.out, {}, resume=False)  # before anything that takes time
        device = select_device(self.device)
        with threads(self.threads or cores()):
            physics, weights = self._open(self.physics, task, self.worlds, device, model=self.model)
            environment = Environment(task, physics, seed=self.seed)
            about = {
                "name": self.physics,
                "weights": weights,
                "device": device.type,
                "compiled": getattr(physics, "compiled", None),
            }
            settings = run_settings(task, worlds=self.worlds, seed=self.seed, physics=about)
            check_run_folder(self.out, settings, resume=self.resume)
            gap = None
            if self.check_physics is not None:
                other, _ = self._open(self.check_physics, task, self.check_worlds, device)
                gap = GapCheck(environment=Environment(task, other), every=self.check_every)
            train_policy(
                environment,
                self.out,
                settings,
                iterations=self.iterations,
                save_every=self.save_every,
                resume=self.resume,
                gap=gap,
            )
        if environment.nonfinite:
            say(f"{environment.nonfinite} worlds were not finite, and were started anew")
        if environment.outside:
            share = environment.outside / environment.world_steps
            say(f"{share:.1%} of the model steps began outside the recorded data")
        print_json(
            {
                "command": "train",
                "task": task.name,
                "physics": self.physics,
                "out": str(self.out),
                "iterations": self.iterations,
                "world_steps": environment.world_steps,
                "nonfinite": environment.nonfinite,
                "outside_recorded": environment.outside / environment.world_steps,
            }
        )

    def _check(self) -> None:
        check_physics(self.physics, self.model)
        if self.check_physics is not None:
            if self.check_physics not in ("teacher", "mujoco", "mjwarp"):
                raise ValueError(f"--check-physics is {self.check_physics!r}, expected teacher, mujoco or mjwarp")
            at_least(self, "check_every", "check_worlds")
        at_least(self, "worlds", "iterations", "save_every", "threads")
        check_seed(self.seed)

    def _open(
        self, name: str, task: Task, worlds: int, device: torch.device, model: Path | None = None
    ) -> tuple[Physics, str | None]:
        return open_physics(
            name,
            task.robot,
            task.terrain,
            worlds,
            model=model,
            device=str(device),
            compiled=False if self.eager else None,
            num_threads=self.threads,
        )


@dataclass(frozen=True, kw_only=True)
class Play:
    """Evaluate a trained policy with mean actions in a physics, which need not be that of its training.

    Equal seeds give equal starts, commands and pushes in every physics. The last line on standard output is one JSON
    document.

    Example: nerd-rl play swing-up --physics mujoco
    """

    run_folder: tyro.conf.Positional[Path]
    """Run folder of nerd-rl train."""
    physics: str
    """teacher, mujoco, mjwarp, nerd or nerd-baseline."""
    model: Path | None = None
    """Model or run folder, for nerd and nerd-baseline."""
    worlds: int = 64
    """Episodes, one per world."""
    iteration: int | None = None
    """Policy after so many iterations; the last one if omitted."""
    seed: int = 0
    """Decides starts, commands and pushes."""
    film: Path | None = None
    """New picture file, .png or .svg: the first episode at eight times (extra nerd-rl[plot])."""
    device: str = "auto"
    """auto, cpu or cuda."""
    threads: int | None = None
    """Processor threads; one per core if omitted."""
    eager: bool = False
    """Do not compile a model's step; it is compiled where there is a C++ compiler or a GPU."""

    def run(self) -> None:
        """Evaluate, draw and report."""
        check_physics(self.physics, self.model)
        at_least(self, "worlds", "threads")
        check_seed(self.seed)
        task, weights = self._trained()
        if self.film is not None:
            check_plot(self.film)
        device = select_device(self.device)
        actor = load_policy(weights, task, task.ppo).to(device)
        with threads(self.threads or cores()):
            physics, _ = open_physics(
                self.physics,
                task.robot,
                task.terrain,
                self.worlds,
                model=self.model,
                device=str(device),
                compiled=False if self.eager else None,
                num_threads=self.threads,
            )
            environment = Environment(task, physics, seed=self.seed)
            found = evaluate_policy(environment, mean_policy(actor.to(environment.device)), seed=self.seed)
            environment.close()
        summary = found.summary()
        say(
            f"{task.name} in {self.physics}: return {summary['return_mean']:.2f} ± {summary['return_std']:.2f} "
            f"over {summary['episodes']} episodes, {summary['terminated']} of them ended early"
        )
        if self.film is not None:
            from .film import film_strip

            save_figure(film_strip(task.robot, found.path.cpu()), self.film)
        print_json({"command": "play", "task": task.name, "physics": self.physics, "seed": self.seed, **summary})

    def _trained(self) -> tuple[Task, Path]:
        """The task of the run, with its PPO settings, and the file of its policy."""
        stored = read_run(self.run_folder)["task"]
        task = find_task(stored["name"])
        task = replace(task, ppo=PpoConfig(**stored["ppo"]))
        if gaps := list_differences(stored, as_json(task.to_json())):
            raise ValueError(f"{self.run_folder}: trained for another task or robot: {'; '.join(gaps)}")
        return task, policy_file(self.run_folder, self.iteration)


def find_task(name: str) -> Task:
    """A task by name; ValueError with the nearest names if there is none."""
    if name not in TASKS:
        close = difflib.get_close_matches(name.lower(), TASKS, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"task is {name!r}, expected one of {', '.join(TASKS)}{hint}")
    return TASKS[name]()


def at_least(command: Any, *names: str) -> None:
    """Refuse numbers below 1; None is left alone."""
    for name in names:
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least 1")


def _commands(train: Train) -> Any:
    """The subcommands, with the defaults of ``train``."""
    return (
        Annotated[Train, tyro.conf.subcommand("train", default=train)] | Annotated[Play, tyro.conf.subcommand("play")]
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``nerd-rl``.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv``.
    """
    run_command(
        "nerd-rl",
        _commands(Train.following(sys.argv[1:] if arguments is None else arguments)),
        description=(
            "Policies learned inside a learned model. Try: nerd-rl train cartpole-swing-up --physics teacher "
            "--out swing-up; nerd-rl play swing-up --physics mujoco"
        ),
        arguments=arguments,
        hint="interrupted; the same command with --resume goes on",
    )
