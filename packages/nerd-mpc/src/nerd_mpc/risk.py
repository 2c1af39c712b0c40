"""Risk over perturbed models: one score per sample from its scores in every model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nerd_mpc.weights import SCORE_LIMIT

__all__ = ["Risk", "over_models", "under_risk"]

Measure = Literal["mean", "worst", "cvar"]


@dataclass(frozen=True, kw_only=True)
class Risk:
    """How the scores of one plan in M perturbed models become one score.

    * ``mean``: the expected score.
    * ``worst``: the least.
    * ``cvar``: the mean of the worst fraction ``tail`` of the models (conditional value at risk).
      With the scores in ascending order s_0 <= s_1 ..., and k whole models inside the tail,
      ``(s_0 + ... + s_(k-1) + (tail M - k) s_k) / (tail M)``. It is the mean for ``tail`` = 1 and the worst
      for ``tail`` <= 1 / M.

    Source: Rockafellar and Uryasev, "Optimization of Conditional Value-at-Risk" (2000), for M
    equally likely outcomes.
    Chosen here: a plan that diverges in any model is rejected, whatever the measure.

    Attributes:
        measure: One of the three above.
        tail: Fraction of the models in (0, 1]; only ``cvar`` reads it.

    Raises:
        ValueError: If an attribute is outside the ranges above.
    """

    measure: Measure = "mean"
    tail: float = 0.25

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise ValueError(f"measure is {self.measure!r}; expected one of {', '.join(get_args(Measure))}")
        if not 0.0 < self.tail <= 1.0:
            raise ValueError(f"tail is {self.tail}; expected a fraction in (0, 1]")

    def __call__(self, scores: Tensor) -> Tensor:
        """Reduce the scores.

        Args:
            scores: Shape (M, N), larger is better.

        Returns:
            Shape (N,); NaN where any model's score is not finite or over 1e30 in size.

        Raises:
            ValueError: If there is no model, or the shape is another.
        """
        if scores.ndim != 2 or len(scores) == 0:
            raise ValueError(f"scores has shape {tuple(scores.shape)}; expected (models >= 1, samples)")
        if self.measure == "mean":
            reduced = scores.mean(0)
        elif self.measure == "worst":
            reduced = scores.amin(0)
        else:
            share = self.tail * len(scores)
            weight = (share - torch.arange(len(scores), dtype=torch.float64)).clamp(0.0, 1.0)
            # Models outside the tail must not count even as 0 * inf.
            inside = weight > 0.0
            ascending = scores.sort(0).values[inside.to(scores.device)]
            reduced = (weight[inside] / weight.sum()).to(scores) @ ascending
        sound = (scores.abs() <= SCORE_LIMIT).all(0)
        return torch.where(sound, reduced, math.nan)


def over_models(rollouts: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    """Score the same controls in every one of M models, one after the other.

    Args:
        rollouts: Each maps controls (N, T, nu) to rewards (N, T) or scores (N,).

    Returns:
        A callable from controls (N, T, nu) to scores of shape (M, N).

    Raises:
        ValueError: If there is no model.
    """
    models = tuple(rollouts)
    if not models:
        raise ValueError("rollouts is empty; expected at least one model")

    def score(controls: Tensor) -> Tensor:
        return torch.stack([_over_time(rollout(controls), 1, len(controls)) for rollout in models])

    return score


def under_risk(rollout: Callable[[Tensor], Tensor], risk: Risk) -> Callable[[Tensor], Tensor]:
    """Dynamics for ``plan`` that score a sample by its risk over a batch of perturbed models.

    Args:
        rollout: Maps controls (N, T, nu) to rewards (M, N, T) or scores (M, N) in M models.
        risk: How M scores become one.

    Returns:
        A callable from controls (N, T, nu) to scores of shape (N,).
    """

    def score(controls: Tensor) -> Tensor:
        return risk(_over_time(rollout(controls), 2, len(controls)))

    return score


def _over_time(reward: Tensor, axes: int, num_samples: int) -> Tensor:
    """Mean over a time axis, if there is one; a step that is not sound makes the mean NaN."""
    if reward.ndim not in (axes, axes + 1) or reward.shape[axes - 1] != num_samples:
        models = "" if axes == 1 else "models, "
        raise ValueError(
            f"rollout returned shape {tuple(reward.shape)}; expected ({models}{num_samples}) or "
            f"({models}{num_samples}, time)"
        )
    if reward.ndim == axes:
        return reward
    sound = (reward.abs() <= SCORE_LIMIT).all(-1)
    return torch.where(sound, reward.mean(-1), math.nan)
