"""Predictive sampling: the best sample is the next plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nerd_mpc.planner_config import PlannerConfig
from nerd_mpc.weights import best_weight

__all__ = ["PredictiveSamplingConfig"]


@dataclass(frozen=True, kw_only=True)
class PredictiveSamplingConfig(PlannerConfig):
    """Predictive sampling: ``knots <- knots_best``, with samples drawn at ``noise_scale``.

    The nominal plan is a sample, so on deterministic dynamics the score never falls.

    Source: Howell et al., "Predictive Sampling: Real-time Behaviour Synthesis with MuJoCo"
    (arXiv:2212.00541).

    Attributes:
        iterations: Refinements per decision; one is the published algorithm.
        noise_scale: Standard deviation of every knot.
    """

    iterations: int = 1
    noise_scale: float = 0.2

    def weigh(self, standing: Tensor) -> Tensor:
        """All weight on the best."""
        return best_weight(standing)
