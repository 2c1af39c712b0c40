"""Training a policy with rsl_rl's PPO, and the folder of a run.

A run folder holds::

    config.json              task, physics, worlds, seed: a resumed run must agree with them
    metrics.jsonl            one JSON object per iteration
    events.out.tfevents.*    the same and more for TensorBoard
    checkpoint.safetensors   all that a resume needs (see checkpoint.py)
    policies/000300.safetensors    the policy after so many iterations
    policy.onnx              the last of them, with names and scales

rsl_rl collects and updates; this module seeds, times, saves and resumes.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nerd_core.dataset import check_seed
from nerd_core.progress import RunProgress
from nerd_core.storage import (
    TEMPORARY_SUFFIX,
    as_json,
    check_writable,
    list_differences,
    read_json,
    write_json,
    write_tensors,
)

from .checkpoint import restore_checkpoint, save_checkpoint
from .environment import Environment
from .evaluation import evaluate_policy
from .policy import export_policy, mean_policy
from .rsl_env import rsl_env
from .task import Task

__all__ = ["GapCheck", "check_run_folder", "policy_file", "read_run", "run_settings", "train_policy"]

CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.safetensors"
POLICIES, ONNX = "policies", "policy.onnx"
FORMAT, FORMAT_VERSION = "nerd-rl-run", 1


@dataclass(frozen=True, kw_only=True)
class GapCheck:
    """A look at the policy in another physics while it trains.

    Attributes:
        environment: Worlds of the same task, usually in an analytical engine.
        every: Iterations between looks.
    """

    environment: Environment
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, expected at least 1")


def run_settings(task: Task, *, worlds: int, seed: int, physics: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json holds and a resume must repeat.

    Args:
        task: The task.
        worlds: Worlds N.
        seed: Seed.
        physics: What identifies the physics, JSON values.
    """
    return as_json(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "task": task.to_json(),
            "physics": dict(physics),
            "worlds": worlds,
            "seed": seed,
        }
    )


def read_run(path: Path) -> dict[str, Any]:
    """The settings of a run folder.

    Raises:
        ValueError: It is none, or of a newer format.
    """
    stored = read_json(path / CONFIG, what="training run's config")
    if stored.get("format") != FORMAT:
        raise ValueError(f"{path}: not a run of nerd-rl (format {stored.get('format')!r})")
    if stored.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: run format_version {stored.get('format_version')!r}, this nerd-rl reads {FORMAT_VERSION}"
        )
    return stored


def policy_file(path: Path, iteration: int | None = None) -> Path:
    """The file of a run's policy after so many iterations; None for the last.

    Raises:
        ValueError: There is none.
    """
    names = sorted(file.stem for file in (path / POLICIES).glob("*.safetensors"))
    if not names:
        raise ValueError(f"{path}: no policy there yet, expected a run that got to its first checkpoint")
    wanted = names[-1] if iteration is None else f"{iteration:06d}"
    if wanted not in names:
        kept = ", ".join(str(int(name)) for name in names)
        raise ValueError(f"iteration is {iteration}, expected one that {path} kept: {kept}")
    return path / POLICIES / f"{wanted}.safetensors"


def check_run_folder(out: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
    """Refuse a folder that is in use, or that holds another run; nothing is written.

    Raises:
        ValueError: The folder exists and is not to be resumed, cannot be written, or holds a run of other settings.
    """
    if resume:
        if gaps := list_differences(read_run(out), settings):
            raise ValueError(f"{out}: cannot resume, the run was started with {'; '.join(gaps)}")
        return
    if out.exists() and (not out.is_dir() or any(file.name != CONFIG + TEMPORARY_SUFFIX for file in out.iterdir())):
        raise ValueError(f"out: {out} exists; choose a new folder, or resume it")
    check_writable(out)


def train_policy(
    environment: Environment,
    out: Path,
    settings: Mapping[str, Any],
    *,
    iterations: int,
    save_every: int = 50,
    resume: bool = False,
    gap: GapCheck | None = None,
    progress: bool = True,
) -> Path:
    """Train a policy, or go on training one.

    The caller's random numbers come back. ``settings["seed"]`` decides first weights and actions.

    Args:
        environment: The worlds.
        out: Run folder to create, or to go on with if ``resume``.
        settings: What :func:`run_settings` gives.
        iterations: Iterations of the run as a whole; each is ``ppo.steps`` model steps of every world, and an update.
        save_every: Iterations between checkpoints; there is one at the end anyway.
        resume: Go on from the last checkpoint. Every setting must be the same; ``iterations`` may be more.
        gap: Look at the policy in another physics now and then.
        progress: Show progress on standard error.

    Returns:
        The run folder.

    Raises:
        ValueError: Settings out of range, a folder as :func:`check_run_folder` says, or a run that has all its
            iterations already.
    """
    for name, value in (("iterations", iterations), ("save_every", save_every)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    check_seed(settings["seed"])
    check_run_folder(out, settings, resume=resume)
    cuda = [environment.device] if environment.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(settings["seed"])
        runner = _make_runner(environment, out)
        first, seconds = 0, 0.0
        if resume and (out / CHECKPOINT).exists():
            first, seconds = restore_checkpoint(out / CHECKPOINT, runner, environment)
            if first >= iterations:
                raise ValueError(f"iterations is {iterations}, expected more than the {first} that {out} has done")
        if not resume:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / CONFIG, settings)
        (out / POLICIES).mkdir(exist_ok=True)
        _drop_later(out / METRICS, first)
        loop = _Loop(runner, environment, out, gap, seconds)
        units = environment.task.ppo.steps * environment.nworld
        with (
            _tensorboard(runner, out, first),
            RunProgress("train", iterations, unit="steps", done=first, shown=progress) as bar,
        ):
            for done in range(first + 1, iterations + 1):
                note = loop.iterate(done)
                if done % save_every == 0 or done == iterations:
                    loop.save(done)
                bar.advance(units, note)
    export_policy(out / ONNX, runner.alg.get_policy(), environment.task, {"iterations": iterations})
    return out


class _Loop:
    """One iteration after another, timed and logged."""

    def __init__(self, runner: Any, environment: Environment, out: Path, gap: GapCheck | None, seconds: float) -> None:
        self._runner, self._environment, self._out, self._gap = runner, environment, out, gap
        self._seconds = seconds

    def iterate(self, done: int) -> str:
        """Iteration number ``done``, counted from 1; gives words for the progress bar."""
        environment, runner = self._environment, self._runner
        counts = environment.world_steps, environment.nonfinite, environment.outside
        started = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # rsl_rl reports there; ours is for results
            runner.current_learning_iteration = done - 1
            runner.learn(1)
        took = time.perf_counter() - started
        self._seconds += took
        steps = environment.world_steps - counts[0]
        returns = runner.logger.rewbuffer
        mean = statistics.mean(returns) if returns else None
        row: dict[str, Any] = {
            "iteration": done,
            "seconds": round(self._seconds, 4),
            "world_steps": environment.world_steps,
            "steps_per_second": round(steps / took, 1),
            "return_mean": mean,
            "nonfinite": environment.nonfinite - counts[1],
            "outside_recorded": (environment.outside - counts[2]) / steps,
            "learning_rate": runner.alg.learning_rate,
            "action_std": float(runner.alg.get_policy().output_std.detach().mean()),
        }
        if self._gap is not None and done % self._gap.every == 0:
            row |= self._look(done)
        with open(self._out / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return _words(row)

    def _look(self, done: int) -> dict[str, Any]:
        """Mean actions in the other physics, on the same starts every time."""
        assert self._gap is not None
        found = evaluate_policy(self._gap.environment, mean_policy(self._runner.alg.get_policy()))
        value = float(found.returns.mean())
        self._runner.logger.writer.add_scalar("Check/return_mean", value, done - 1)
        return {"check_return_mean": value, "check_physics": self._gap.environment.physics.name}

    def save(self, done: int) -> None:
        """Policy and checkpoint; a kill between the two leaves the older checkpoint, which writes both again."""
        weights = self._runner.alg.get_policy().state_dict()
        write_tensors(self._out / POLICIES / f"{done:06d}.safetensors", weights)
        save_checkpoint(self._out / CHECKPOINT, self._runner, self._environment, iteration=done, seconds=self._seconds)


def _words(row: Mapping[str, Any]) -> str:
    words = "no episode has ended yet" if row["return_mean"] is None else f"return {row['return_mean']:.1f}"
    if "check_return_mean" in row:
        words += f", in {row['check_physics']} {row['check_return_mean']:.1f}"
    if row["outside_recorded"]:
        words += f", outside the recorded data {row['outside_recorded']:.1%}"
    return words + (f", {row['nonfinite']} not finite" if row["nonfinite"] else "")


def _make_runner(environment: Environment, out: Path) -> Any:
    """An rsl_rl runner that leaves files to us."""
    from rsl_rl.runners import OnPolicyRunner

    class Runner(OnPolicyRunner):
        """Collects and updates."""

        def save(self, path: str, infos: dict[str, Any] | None = None) -> None:
            """Nothing: our checkpoint holds more than rsl_rl's and is not pickled."""

    with contextlib.redirect_stdout(io.StringIO()):
        return Runner(
            rsl_env(environment),
            environment.task.ppo.rsl_settings(),
            log_dir=str(out),
            device=str(environment.device),
        )


@contextlib.contextmanager
def _tensorboard(runner: Any, out: Path, first: int) -> Iterator[None]:
    """One TensorBoard file for all iterations; what an interrupted run wrote after its checkpoint is purged."""
    from torch.utils.tensorboard import SummaryWriter

    # rsl_rl opens a file per call of learn, and writes the difference of the repository it lies in beside it.
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    runner.logger.init_logging_writer = nothing
    runner.logger.writer = SummaryWriter(log_dir=str(out), purge_step=first or None)
    try:
        yield
    finally:
        runner.logger.writer.close()


def _drop_later(path: Path, done: int) -> None:
    """Drop the lines of iterations that will come again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line cut short by a kill
            if json.loads(line)["iteration"] <= done:
                kept.append(line)
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
