"""MPPI: one width of noise, and a softmax over the scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nerd_mpc.planner_config import PlannerConfig, positive
from nerd_mpc.weights import softmax_weights

__all__ = ["MppiConfig"]


@dataclass(frozen=True, kw_only=True)
class MppiConfig(PlannerConfig):
    """Model predictive path integral control: DIAL-MPC without annealing.

    ``knots <- sum_k softmax(standing / temperature)_k knots_k`` with samples drawn at ``noise_scale``.

    Source: Williams et al., "Information Theoretic MPC for Model-Based Reinforcement Learning" (2017).
    Chosen here: the temperature counts standard deviations of the scores, so that it needs no unit
    of cost; and no term for the cost of the sampled control itself (a reward can hold one).

    Attributes:
        temperature: Softmax temperature, in standard deviations of the scores.
        iterations: Refinements per decision; one is the published algorithm.
        noise_scale: Standard deviation of every knot.
    """

    temperature: float = 0.1
    iterations: int = 1
    noise_scale: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("temperature", self.temperature)

    def weigh(self, standing: Tensor) -> Tensor:
        """Softmax."""
        return softmax_weights(standing, self.temperature)
