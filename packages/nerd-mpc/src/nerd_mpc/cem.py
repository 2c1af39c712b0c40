"""The cross-entropy method: mean and width of the noise follow the best samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nerd_mpc.planner_config import PlannerConfig, positive
from nerd_mpc.weights import elite_weights

__all__ = ["CemConfig"]


@dataclass(frozen=True, kw_only=True)
class CemConfig(PlannerConfig):
    """Cross-entropy method: mean and standard deviation of the elites, iteration by iteration.

    ``knots <- mean of the elites``, ``sigma[h, j] <- max(std of the elites, noise_floor)`` per knot
    h and control j. The elites are the ``num_elites`` best samples; the nominal plan may be one.

    Source: Rubinstein, "The Cross-Entropy Method for Combinatorial and Continuous Optimization" (1999).
    Chosen here: every decision starts again at ``noise_scale``, so that a plan that had settled can
    still answer a push; the population standard deviation; no smoothing.

    Attributes:
        num_elites: Samples that the plan moves to, 2 to ``num_samples``.
        noise_floor: Least standard deviation, at most ``noise_scale``.
        noise_scale: Standard deviation in the first iteration.
    """

    num_elites: int = 16
    noise_floor: float = 0.02
    noise_scale: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        elites = self.num_elites
        if isinstance(elites, bool) or not isinstance(elites, int) or not 2 <= elites <= self.num_samples:
            raise ValueError(
                f"num_elites is {elites!r}; expected an integer from 2 to num_samples = {self.num_samples}"
            )
        if positive("noise_floor", self.noise_floor) > self.noise_scale:
            raise ValueError(f"noise_floor is {self.noise_floor}; expected at most noise_scale = {self.noise_scale}")

    def next_spread(self, planned: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
        """Standard deviation of the elites, shape (K, nu)."""
        w = weights[:, None, None]
        mean = (w * samples).sum(0)
        spread = (w * (samples - mean).square()).sum(0).sqrt()
        # Scores that told nothing left the nominal plan alone with all weight: no reason to narrow.
        spread = torch.where(weights[-1] == 1.0, planned, spread)
        return spread.clamp(min=self.noise_floor).to(samples.dtype)

    def weigh(self, standing: Tensor) -> Tensor:
        """Equal weights for the elites."""
        return elite_weights(standing, self.num_elites)
