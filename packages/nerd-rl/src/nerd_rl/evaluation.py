"""What a policy is worth: the return of mean actions in a physics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .environment import Environment
from .policy import MeanPolicy

__all__ = ["Evaluation", "evaluate_policy"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """First episodes of all worlds under mean actions.

    Attributes:
        returns: Undiscounted sum of rewards of each world's episode, shape (N,).
        lengths: Model steps of each, shape (N,), int64.
        terminated: Episodes that ended before their time, shape (N,) bool.
        nonfinite: Worlds whose state was not finite.
        outside: Share of model steps that began outside what the physics was recorded from; 0 for an engine.
        path: States of world 0's episode, shape (T + 1, nq + nv).
    """

    returns: Tensor
    lengths: Tensor
    terminated: Tensor
    nonfinite: int
    outside: float
    path: Tensor

    def summary(self) -> dict[str, Any]:
        """Figures for a report, JSON values."""
        returns = self.returns.double()
        return {
            "episodes": len(returns),
            "return_mean": float(returns.mean()),
            "return_median": float(returns.median()),
            "return_std": float(returns.std(correction=0)),
            "return_min": float(returns.min()),
            "episode_steps_mean": float(self.lengths.double().mean()),
            "terminated": int(self.terminated.sum()),
            "nonfinite": self.nonfinite,
            "outside_recorded": self.outside,
        }


def evaluate_policy(environment: Environment, policy: MeanPolicy, *, seed: int = 0) -> Evaluation:
    """Run one episode per world with mean actions.

    Args:
        environment: The worlds; their episodes and random numbers start anew.
        policy: Mean actions.
        seed: Decides starts, commands and pushes: equal in every physics.
    """
    environment.seed(seed)
    observation = environment.reset()
    n = environment.nworld
    running = torch.ones(n, dtype=torch.bool, device=environment.device)
    returns = torch.zeros(n, dtype=torch.float64, device=environment.device)
    lengths = torch.zeros(n, dtype=torch.int64, device=environment.device)
    fell, broken = torch.zeros_like(running), torch.zeros_like(running)
    path, outside = [environment.now.state[0]], 0
    for _ in range(environment.task.episode_steps):
        # A world whose first episode is over goes on, but counts no more.
        done = environment.step(policy(observation))
        observation = done.observation
        returns += torch.where(running, done.reward.double(), 0.0)
        lengths += running
        if bool(running[0]):
            path.append(done.state[0])
        far = environment.physics.outside()
        outside += 0 if far is None else int((far & running).sum())
        fell |= running & done.terminated
        broken |= running & done.nonfinite
        running &= ~(done.terminated | done.truncated)
        if not bool(running.any()):
            break
    return Evaluation(
        returns=returns,
        lengths=lengths,
        terminated=fell,
        nonfinite=int(broken.sum()),
        outside=outside / max(int(lengths.sum()), 1),
        path=torch.stack(path),
    )
