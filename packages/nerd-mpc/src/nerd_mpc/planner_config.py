"""What every sampling planner is told: a budget, a basis, and the width of its noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nerd_mpc.basis import BasisKind, ControlBasis, control_basis

__all__ = ["PlannerConfig", "at_least_one"]


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Budget, basis and noise of a sampling planner.

    ``nerd_mpc.dial.plan`` is one loop for all planners. A planner is a subclass that answers two
    questions: how wide the samples are drawn (``noise_table``, ``next_spread``), and how the scores
    become weights (``weigh``).

    Attributes:
        num_samples: N, rollouts per iteration; the last one is the nominal plan itself.
        horizon: T, controls per rollout.
        num_knots: K, knots (or coefficients) of the control basis, at least 2.
        iterations: Refinements per decision.
        first_iterations: Refinements of the very first decision, which starts from nothing.
        noise_scale: Largest standard deviation, in units of the normalised control.
        min_gain: Refinement ends early once an iteration has raised the nominal plan's score by no
            more than this many standard deviations of the first iteration's scores; None never.
        spline: Kind of the control basis: a spline, or ``legendre`` (one polynomial piece).
        dt: Control period [s].

    Raises:
        ValueError: If a field is outside its range.
    """

    num_samples: int = 256
    horizon: int = 26
    num_knots: int = 6
    iterations: int = 4
    first_iterations: int = 10
    noise_scale: float = 1.0
    min_gain: float | None = None
    spline: BasisKind = "quadratic"
    dt: float = 0.02

    def __post_init__(self) -> None:
        for name, least in (
            ("num_samples", 2),
            ("horizon", 2),
            ("num_knots", 2),
            ("iterations", 1),
            ("first_iterations", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; expected an integer >= {least}")
        positive("noise_scale", self.noise_scale)
        if self.min_gain is not None and not (self.min_gain >= 0.0 and math.isfinite(self.min_gain)):
            raise ValueError(f"min_gain is {self.min_gain}; expected a finite number >= 0, or None")
        _ = self.control_spline  # its own checks name kind, num_knots and dt

    @property
    def control_spline(self) -> ControlBasis:
        """The basis from knots to controls."""
        return control_basis(self.spline, num_knots=self.num_knots, horizon=self.horizon, dt=self.dt)

    def noise_table(self, iterations: int | None = None) -> Tensor:
        """Standard deviations ``sigma[i, h]`` of knot h in iteration i, shape (iterations, K), float32.

        Args:
            iterations: Rows of the table; ``self.iterations`` if omitted.
        """
        n = self.iterations if iterations is None else at_least_one("iterations", iterations)
        return torch.full((n, self.num_knots), self.noise_scale)

    def next_spread(self, planned: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
        """Standard deviations of the next iteration: those of the table, unless a planner adapts them.

        Args:
            planned: Next row of the noise table, shape (K, 1).
            samples: Knots just scored, shape (N, K, nu).
            weights: Their weights, shape (N,), float64.

        Returns:
            Shape (K, 1) or (K, nu).
        """
        return planned

    def weigh(self, standing: Tensor) -> Tensor:
        """Weights of the samples, summing to one.

        Args:
            standing: Scores in standard deviations below the best one, shape (N,), float64: 0 for
                the best, minus infinity where a sample was rejected. The last is the nominal plan.

        Returns:
            Shape (N,), float64, 0 where a sample was rejected.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to weigh samples")


def at_least_one(name: str, value: int) -> int:
    """``value``, or a ValueError that names it."""
    if value < 1:
        raise ValueError(f"{name} is {value}; expected an integer >= 1")
    return value


def positive(name: str, value: float) -> float:
    """``value``, or a ValueError that names it."""
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; expected a positive number")
    return value
