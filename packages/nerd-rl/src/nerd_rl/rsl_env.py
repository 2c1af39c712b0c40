"""An environment as rsl_rl's ``VecEnv``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .environment import Environment

__all__ = ["rsl_env"]


def rsl_env(environment: Environment) -> Any:
    """The environment as an instance of ``rsl_rl.env.VecEnv``, with one group of observations, ``policy``.

    ``extras`` holds ``time_outs``, so that PPO can bootstrap the value of what was only cut off, and ``log``: the mean
    of every reward term, the worlds that were not finite and the share of those outside the recorded data.
    """
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict

    class RslEnv(VecEnv):
        """Worlds of one task as rsl_rl sees them."""

        def __init__(self) -> None:
            self.num_envs = environment.nworld
            self.num_actions = environment.task.num_actions
            self.max_episode_length = environment.task.episode_steps
            self.device = environment.device
            self.cfg = environment.task.to_json()

        @property
        def episode_length_buf(self) -> Tensor:
            """Model steps since each episode's start, shape (N,)."""
            return environment.now.steps

        @episode_length_buf.setter
        def episode_length_buf(self, steps: Tensor) -> None:
            environment.now = environment.now._replace(steps=steps.clone())

        def get_observations(self) -> TensorDict:
            """Observations of the present."""
            return self._grouped(environment.observation)

        def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
            """One model step of all worlds."""
            done = environment.step(actions)
            log: dict[str, Any] = {f"Reward/{name}": term.mean() for name, term in done.terms.items()}
            log["Physics/nonfinite"] = done.nonfinite.float().sum()
            outside = environment.physics.outside()
            if outside is not None:
                log["Physics/outside_recorded"] = outside.float().mean()
            ended = (done.terminated | done.truncated).to(torch.int64)
            return self._grouped(done.observation), done.reward, ended, {"time_outs": done.truncated, "log": log}

        def _grouped(self, observation: Tensor) -> TensorDict:
            return TensorDict({"policy": observation}, batch_size=[self.num_envs], device=observation.device)

    return RslEnv()
