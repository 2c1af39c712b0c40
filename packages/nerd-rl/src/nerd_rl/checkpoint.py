"""A training run's checkpoint: everything that the next iteration depends on, in one safetensors file.

Weights and normalisers of policy and value function, Adam's moments and rate, torch's random numbers, the environment
(states, histories of a learned model, warm starts of an engine, its random numbers) and rsl_rl's running returns. So a
run that is resumed is, on a CPU with as many threads, the run that was never stopped, bit for bit; only the seconds
differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nerd_core.storage import read_tensors, readable, write_tensors

from .environment import Environment

__all__ = ["restore_checkpoint", "save_checkpoint"]

FORMAT_VERSION = 1


def save_checkpoint(path: Path, runner: Any, environment: Environment, *, iteration: int, seconds: float) -> None:
    """Write a checkpoint, replaced in one step.

    Args:
        path: The file.
        runner: The rsl_rl ``OnPolicyRunner``.
        environment: Its environment.
        iteration: Iterations done.
        seconds: Training time so far [s].
    """
    algorithm, logger = runner.alg, runner.logger
    saved = algorithm.save()
    tensors = {f"actor.{name}": value for name, value in saved["actor_state_dict"].items()}
    tensors |= {f"critic.{name}": value for name, value in saved["critic_state_dict"].items()}
    for index, values in saved["optimizer_state_dict"]["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
    tensors |= {f"environment.{name}": value for name, value in environment.memory().items()}
    tensors |= {
        "format_version": torch.tensor(FORMAT_VERSION),
        "iteration": torch.tensor(iteration),
        "seconds": torch.tensor(seconds, dtype=torch.float64),
        "learning_rate": torch.tensor(algorithm.learning_rate, dtype=torch.float64),
        "random": torch.get_rng_state(),
        "log.returns": torch.tensor(list(logger.rewbuffer), dtype=torch.float64),
        "log.lengths": torch.tensor(list(logger.lenbuffer), dtype=torch.float64),
        "log.return_so_far": logger.cur_reward_sum,
        "log.length_so_far": logger.cur_episode_length,
    }
    if environment.device.type == "cuda":
        tensors["random_cuda"] = torch.cuda.get_rng_state(environment.device)
    write_tensors(path, tensors)


def restore_checkpoint(path: Path, runner: Any, environment: Environment) -> tuple[int, float]:
    """Put a runner and its environment where a checkpoint left them.

    Returns:
        Iterations done, and training time so far [s].

    Raises:
        ValueError: The file is missing, damaged, newer, or does not fit.
    """
    with readable(path):
        return _restore(path, read_tensors(path, what="checkpoint"), runner, environment)


def _restore(path: Path, tensors: dict[str, Tensor], runner: Any, environment: Environment) -> tuple[int, float]:
    version = int(tensors["format_version"])
    if version > FORMAT_VERSION:
        raise ValueError(f"{path}: checkpoint format_version {version}, this nerd-rl reads up to {FORMAT_VERSION}")
    algorithm, logger = runner.alg, runner.logger
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _under(tensors, "optimizer.").items():
        index, key = name.split(".")
        moments.setdefault(int(index), {})[key] = value
    groups = algorithm.optimizer.state_dict()["param_groups"]
    for group in groups:
        group["lr"] = float(tensors["learning_rate"])
    saved = {
        "actor_state_dict": _under(tensors, "actor."),
        "critic_state_dict": _under(tensors, "critic."),
        "optimizer_state_dict": {"state": moments, "param_groups": groups},
    }
    try:
        algorithm.load(saved, None, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: does not fit the run's settings: {' '.join(str(error).split())}") from None
    environment.restore(_under(tensors, "environment."))
    logger.rewbuffer.extend(tensors["log.returns"].tolist())
    logger.lenbuffer.extend(tensors["log.lengths"].tolist())
    logger.cur_reward_sum.copy_(tensors["log.return_so_far"])
    logger.cur_episode_length.copy_(tensors["log.length_so_far"])
    iteration, seconds = int(tensors["iteration"]), float(tensors["seconds"])
    logger.tot_time = seconds
    logger.tot_timesteps = iteration * environment.task.ppo.steps * environment.nworld
    # Last: nothing of the above may draw after it.
    torch.set_rng_state(tensors["random"])
    if "random_cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random_cuda"], environment.device)
    return iteration, seconds


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
