"""An environment as Gymnasium's ``VectorEnv``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from .environment import Environment

__all__ = ["GymEnv"]


class GymEnv(gymnasium.vector.VectorEnv):
    """The environment with numpy at its border; a world whose episode ends starts anew in the same step.

    ``info`` holds ``final_obs`` and its mask ``_final_obs`` where an episode ended, as Gymnasium's own vector
    environments have them in this mode, and ``nonfinite`` (N,).

    Args:
        environment: The environment; closed with this.

    Attributes:
        environment: The environment.
    """

    def __init__(self, environment: Environment) -> None:
        task = environment.task
        self.environment, self.num_envs = environment, environment.nworld
        self.metadata = {
            "autoreset_mode": AutoresetMode.SAME_STEP,
            "render_modes": [],
            "render_fps": round(1 / task.robot.spec.dt),
        }
        limit = np.float32(task.action_limit)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (task.num_observations,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-limit, limit, (task.num_actions,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a new episode in every world.

        Args:
            seed: Decides starts, commands and pushes; None to go on drawing.
            options: None; there are none.
        """
        super().reset(seed=seed)
        if options:
            raise ValueError(f"options is {options}, expected none")
        if seed is not None:
            self.environment.seed(seed)
        return _numpy(self.environment.reset()), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One model step of all worlds."""
        done = self.environment.step(torch.as_tensor(np.asarray(actions, dtype=np.float32)))
        info: dict[str, Any] = {"nonfinite": _numpy(done.nonfinite)}
        ended = _numpy(done.terminated | done.truncated)
        if ended.any():
            final = np.full(self.num_envs, None, dtype=object)
            last = _numpy(done.final_observation)
            for world in np.flatnonzero(ended):
                final[world] = last[world]
            info |= {"final_obs": final, "_final_obs": ended}
        reward = _numpy(done.reward).astype(np.float64)
        return _numpy(done.observation), reward, _numpy(done.terminated), _numpy(done.truncated), info

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.environment.close()


def _numpy(values: Tensor) -> np.ndarray:
    """A copy that the caller may keep."""
    return values.detach().cpu().numpy().copy()
