"""Sampling budget and noise schedule of DIAL-MPC, with named settings."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nerd_mpc.planner_config import PlannerConfig, at_least_one, positive
from nerd_mpc.weights import softmax_weights

Annealing = Literal["factor", "beta"]


@dataclass(frozen=True, kw_only=True)
class DialConfig(PlannerConfig):
    """Sampling budget and noise schedule of DIAL-MPC.

    The standard deviation of knot h (of H + 1 = ``num_knots``) in iteration i (of n) is, for

    * ``annealing="factor"`` (the reference code; decay per iteration does not depend on n):
      ``sigma[i, h] = noise_scale * anneal_horizon^(H - h) * anneal_iteration^i``
    * ``annealing="beta"`` (the paper's two betas, also in hydrax; stretched over the n iterations):
      ``sigma[i, h] = noise_scale * exp(-i / (beta_i * n) - (H - h) / (beta_h * H))``
      with ``beta_i = anneal_iteration`` and ``beta_h = anneal_horizon``

    Source: DIAL-MPC, arXiv:2409.15610, and its reference code.
    Chosen here: i ascends from 0 in both forms, so the first iteration is the widest.

    The modes of a ``legendre`` basis decay the other way, from mode 0 (the mean) to the last: there
    ``H - h`` is replaced by ``h``. Chosen here.

    Attributes:
        num_samples: N, rollouts per iteration; the last one is the nominal plan itself.
        horizon: T, controls per rollout.
        num_knots: K = H + 1, knots of the control spline, at least 2 (the first is pinned).
        iterations: Refinements per decision.
        first_iterations: Refinements of the very first decision, which starts from nothing.
        temperature: Softmax temperature, in standard deviations of the scores.
        noise_scale: Largest standard deviation, in units of the normalised control.
        anneal_iteration: Decay over iterations: a factor in (0, 1], or a beta in (0, inf].
        anneal_horizon: Decay from the last knot to the first: a factor or a beta, as above.
        annealing: Which of the two forms the two numbers above belong to.
        min_gain: When refinement ends early; see ``PlannerConfig``.
        spline: Kind of the control basis.
        dt: Control period [s].

    Raises:
        ValueError: If a field is outside the ranges above.
    """

    temperature: float = 0.05
    anneal_iteration: float = 0.5
    anneal_horizon: float = 1.0
    annealing: Annealing = "factor"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("temperature", self.temperature)
        if self.annealing not in ("factor", "beta"):
            raise ValueError(f"annealing is {self.annealing!r}; expected 'factor' or 'beta'")
        limit = 1.0 if self.annealing == "factor" else math.inf
        for name in ("anneal_iteration", "anneal_horizon"):
            value = getattr(self, name)
            if not 0.0 < value <= limit:
                raise ValueError(f"{name} is {value}; expected (0, {limit}] for annealing={self.annealing!r}")

    def noise_table(self, iterations: int | None = None) -> Tensor:
        """Standard deviations ``sigma[i, h]``, shape (iterations, K), float32.

        Args:
            iterations: Rows of the table; ``self.iterations`` if omitted.
        """
        n = self.iterations if iterations is None else at_least_one("iterations", iterations)
        i = torch.arange(n, dtype=torch.float64)[:, None]
        last = self.num_knots - 1
        ahead = last - torch.arange(self.num_knots, dtype=torch.float64)[None, :]  # H - h
        if self.spline == "legendre":
            ahead = last - ahead
        if self.annealing == "factor":
            decay = self.anneal_horizon**ahead * self.anneal_iteration**i
        else:
            decay = torch.exp(-i / (self.anneal_iteration * n) - ahead / (self.anneal_horizon * last))
        return (self.noise_scale * decay).float()

    def weigh(self, standing: Tensor) -> Tensor:
        """Softmax."""
        return softmax_weights(standing, self.temperature)

    def to_annealing(self, annealing: Annealing, iterations: int | None = None) -> DialConfig:
        """The same noise table in the other form.

        Args:
            annealing: The form wanted.
            iterations: n of the table that must agree; ``self.iterations`` if omitted. Tables of
                another length differ, because only the beta form stretches with n.
        """
        if annealing == self.annealing:
            return self
        n = self.iterations if iterations is None else at_least_one("iterations", iterations)
        convert = _factor_to_beta if annealing == "beta" else _beta_to_factor
        return replace(
            self,
            annealing=annealing,
            anneal_iteration=convert(self.anneal_iteration, n),
            anneal_horizon=convert(self.anneal_horizon, self.num_knots - 1),
        )


def _factor_to_beta(factor: float, steps: int) -> float:
    return math.inf if factor == 1.0 else -1.0 / (steps * math.log(factor))


def _beta_to_factor(beta: float, steps: int) -> float:
    return math.exp(-1.0 / (beta * steps))


def _shipped(
    samples: int,
    hsample: int,
    hnode: int,
    iterations: int,
    temperature: float,
    anneal_horizon: float,
    anneal_iteration: float,
) -> DialConfig:
    """One row of the reference code's examples, which counts neither nominal nor first node."""
    return DialConfig(
        num_samples=samples + 1,
        horizon=hsample + 1,
        num_knots=hnode + 1,
        iterations=iterations,
        temperature=temperature,
        anneal_horizon=anneal_horizon,
        anneal_iteration=anneal_iteration,
    )


def dial_presets() -> dict[str, DialConfig]:
    """Named settings: the ten that DIAL-MPC ships, and three for climbing.

    ``climb-paper`` is the reference code's crate climb; ``climb-cpu`` and ``climb-smoke`` are the
    same schedule with fewer samples.
    """
    climb = _shipped(2048, 25, 5, 4, 0.05, 1.0, 0.5)
    return {
        "unitree_go2_trot": _shipped(2048, 16, 4, 2, 0.05, 0.9, 0.5),
        "unitree_go2_seq_jump": _shipped(2048, 20, 5, 2, 0.05, 0.9, 0.5),
        "unitree_go2_crate_climb": climb,
        "unitree_h1_jog": _shipped(2048, 25, 5, 4, 0.05, 1.0, 0.5),
        "unitree_h1_loco": _shipped(2048, 20, 5, 1, 0.05, 0.9, 0.2),
        "unitree_h1_push_crate": _shipped(2048, 24, 6, 4, 0.05, 0.9, 0.5),
        "allegro_reorient": _shipped(2048, 20, 4, 2, 0.05, 1.0, 0.5),
        "go2_trot_deploy": _shipped(2048, 16, 4, 1, 0.05, 0.9, 0.5),
        "go2_seq_jump_deploy": _shipped(2048, 20, 5, 1, 0.1, 0.9, 0.5),
        "h1_loco_deploy": _shipped(3000, 20, 5, 1, 0.04, 0.95, 0.2),
        "climb-paper": climb,
        "climb-cpu": replace(climb, num_samples=256),
        "climb-smoke": replace(climb, num_samples=128),
    }


def dial_preset(name: str) -> DialConfig:
    """The preset of that name; a ValueError names close ones."""
    presets = dial_presets()
    if name not in presets:
        close = difflib.get_close_matches(name, presets) or sorted(presets)
        raise ValueError(f"name is {name!r}; expected one of {', '.join(close)}")
    return presets[name]
