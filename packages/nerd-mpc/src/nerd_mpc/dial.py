"""DIAL-MPC: refine one nominal plan by sampling around it with annealed noise.

The planner knows no model and no simulator: a callable scores a batch of control sequences. MPPI, CEM
and predictive sampling are the same loop with another config: it says how wide the samples are drawn
and how their scores become weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nerd_mpc.dial_config import DialConfig, dial_preset, dial_presets
from nerd_mpc.planner_config import PlannerConfig, at_least_one
from nerd_mpc.weights import masked_moments, sample_weights, weigh_samples

__all__ = [
    "DialConfig",
    "PlanInfo",
    "PlanState",
    "PlannerConfig",
    "RolloutDynamics",
    "dial_preset",
    "dial_presets",
    "draw_noise",
    "first_control",
    "hold_plan",
    "initial_plan",
    "plan",
    "sample_weights",
    "warm_start",
]


class RolloutDynamics(Protocol):
    """Scores N control sequences from the present state, which it already knows."""

    def __call__(self, controls: Tensor, /) -> Tensor:
        """Roll out.

        Args:
            controls: Normalised controls in [-1, 1], shape (N, T, nu).

        Returns:
            Reward per step, shape (N, T), or its mean over time, shape (N,). Larger is better.
            A row with a NaN, an infinity or a magnitude over 1e30 is a rejected sample.
        """
        ...


class PlanState(NamedTuple):
    """The nominal plan.

    Attributes:
        knots: Normalised controls in [-1, 1], shape (K, nu), any device. Knot 0 is the control
            already committed for the coming period. In a Legendre basis these are coefficients,
            and the committed control is their ``first_control``.
    """

    knots: Tensor


@dataclass(frozen=True, kw_only=True)
class PlanInfo:
    """What happened during one decision. Tuples have one entry per realised iteration.

    Attributes:
        iterations: Refinements realised; fewer than asked for if the deadline passed or the plan
            had converged.
        best: Best accepted score, NaN where every sample was rejected.
        nominal: Score of the nominal plan before the iteration's update, finite or not.
        score_mean: Mean over accepted samples.
        score_std: Population standard deviation over accepted samples.
        effective_samples: 1 / sum of squared weights, between 1 and N.
        rejected: Samples given weight zero because their reward was not finite or over 1e30,
            summed over iterations.
        best_knots: The best accepted sample of all iterations, scored ``best_score``, shape (K, nu);
            the plan that was given if there was none.
        weights: Weights of the last iteration, shape (N,), float64; None after no iteration.
        sampled_knots: Samples of the last iteration, shape (N, K, nu), if they were asked for.
    """

    iterations: int
    best: tuple[float, ...]
    nominal: tuple[float, ...]
    score_mean: tuple[float, ...]
    score_std: tuple[float, ...]
    effective_samples: tuple[float, ...]
    rejected: int
    best_knots: Tensor
    weights: Tensor | None
    sampled_knots: Tensor | None = None

    @property
    def best_score(self) -> float:
        """Best accepted score of all iterations; NaN if there was none."""
        return max((score for score in self.best if not math.isnan(score)), default=math.nan)

    @property
    def nominal_score(self) -> float:
        """Score of the nominal plan in the last iteration; NaN if there was none."""
        return self.nominal[-1] if self.nominal else math.nan


def initial_plan(config: PlannerConfig, nu: int, *, device: torch.device | str = "cpu") -> PlanState:
    """The plan that holds every control at the middle of its range, knots of shape (K, nu)."""
    return PlanState(torch.zeros(config.num_knots, nu, device=device))


def hold_plan(config: PlannerConfig, control: Tensor) -> PlanState:
    """The plan that keeps one normalised control, shape (nu,), over the whole horizon."""
    return PlanState(config.control_spline.hold(control))


def first_control(plan_state: PlanState, config: PlannerConfig) -> Tensor:
    """The committed control, in [-1, 1], shape (nu,): apply it for the coming period.

    It is knot 0 where the basis has knots.
    """
    return config.control_spline.first(plan_state.knots).clamp(-1.0, 1.0)


def draw_noise(config: PlannerConfig, generator: torch.Generator, iterations: int, nu: int) -> Tensor:
    """Standard normal noise for one decision, shape (iterations, N, K, nu), float32 on the CPU.

    Drawn on the CPU so that one seed means one plan on every device. The entries of the last
    sample are drawn but ``plan`` does not use them: that sample is the nominal plan.

    Raises:
        ValueError: If the generator is not a CPU generator.
    """
    if generator.device.type != "cpu":
        raise ValueError(f"generator is on {generator.device}; expected a CPU generator")
    size = (at_least_one("iterations", iterations), config.num_samples, config.num_knots, nu)
    return torch.randn(size, generator=generator)


def warm_start(plan_state: PlanState, config: PlannerConfig, elapsed: float | None = None) -> PlanState:
    """Shift the plan by exact time, hold its tail, clip to the basis' range ([-1, 1] for knots).

    Args:
        plan_state: Plan made for a time ``elapsed`` seconds ago.
        config: Gives the basis.
        elapsed: Time since then [s]; one control period if omitted.
    """
    elapsed = config.dt if elapsed is None else elapsed
    basis = config.control_spline
    return PlanState(basis.clip(basis.shift(plan_state.knots, elapsed)))


@torch.no_grad()
def plan(
    plan_state: PlanState,
    rollout: RolloutDynamics,
    *,
    config: PlannerConfig,
    noise: Tensor | torch.Generator,
    iterations: int | None = None,
    deadline: Callable[[], bool] | None = None,
    keep_samples: bool = False,
) -> tuple[PlanState, PlanInfo]:
    """Refine the plan from the present state.

    Each iteration samples ``knots + sigma[i] * noise[i]`` with knot 0 pinned (that control is
    already committed: one control period of latency) and the nominal plan as last sample, clips to
    [-1, 1], evaluates the spline, clips again, scores, and moves the nominal plan to the weighted
    mean of the sampled knots (see ``nerd_mpc.weights``). Knot 0 never changes; in a Legendre basis
    the noise is such that the first control does not.

    Refinement ends early at the deadline, or when the plan has converged (``config.min_gain``). Then
    the best plan so far is returned: the one refined last, unless the plan that it was refined
    from had already scored worse than an earlier one; then that earlier one. The best single sample
    is ``PlanInfo.best_knots``.

    Args:
        plan_state: Nominal plan, knots (K, nu); its device is where samples are made. Clipped
            to the basis' range first.
        rollout: Scores controls of shape (N, T, nu).
        config: Budget and planner: ``DialConfig``, ``MppiConfig``, ``CemConfig`` or
            ``PredictiveSamplingConfig``.
        noise: Standard normal, shape (>= iterations, N, K, nu), or a CPU generator to draw it.
        iterations: Refinements; ``config.iterations`` if omitted.
        deadline: Asked before every iteration, once its predecessor's results are in; True stops.
        keep_samples: Whether ``PlanInfo.sampled_knots`` is filled.

    Returns:
        The refined plan and a record of the decision.

    Raises:
        ValueError: If a shape disagrees with the config, or the knots are not finite.
    """
    basis = config.control_spline
    nominal = basis.clip(_checked_knots(plan_state.knots, config))
    n = config.iterations if iterations is None else at_least_one("iterations", iterations)
    if isinstance(noise, torch.Generator):
        noise = draw_noise(config, noise, n, nominal.shape[1])
    expected = (config.num_samples, *nominal.shape)
    if noise.ndim != 4 or noise.shape[0] < n or noise.shape[1:] != expected:
        raise ValueError(f"noise has shape {tuple(noise.shape)}; expected (>={n}, *{expected})")
    table = config.noise_table(n).to(nominal)[:, :, None]  # (n, K, 1)
    noise = noise[:n].to(nominal)

    spread = table[0]
    records: list[Tensor] = []
    scored: list[Tensor] = []  # the nominal plan of every iteration
    best = (torch.full((), -math.inf, dtype=torch.float64, device=nominal.device), nominal)
    weights = samples = None
    for i in range(n):
        if deadline is not None:
            # Wait for the device here, or the clock would be read while the work is only queued.
            if records:
                records[-1] = records[-1].cpu()
            if deadline():
                break
        samples = basis.disturb(nominal, spread, noise[i])
        samples[-1] = nominal + 0.0  # as the others, a zero without its sign
        controls = basis.evaluate(samples).clamp(-1.0, 1.0)  # (N, T, nu)
        reward = _checked_reward(rollout(controls), controls).to(nominal.device)
        weights, scores, accepted = weigh_samples(reward, config.weigh)
        scored.append(nominal)
        # As a change of the nominal, in float64: knot 0 and an uninformed plan stay bit-equal.
        change = (weights[:, None, None] * (samples.double() - nominal.double())).sum(dim=0)
        nominal = basis.clip((nominal.double() + change).to(nominal.dtype))
        best = _better(best, samples, scores, accepted)
        records.append(_record(weights, scores, accepted))
        if config.min_gain is not None and _converged(records, config.min_gain):
            break
        if i + 1 < n:
            spread = config.next_spread(table[i + 1], samples, weights)
    if 0 < len(records) < n:
        nominal = _best_so_far(nominal, scored, records)
    info = _collect(records, best[1], weights, samples if keep_samples else None)
    return PlanState(nominal), info


def _better(best: tuple[Tensor, Tensor], samples: Tensor, scores: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Score and knots of the best sample seen so far, without waiting for the device."""
    valid = torch.where(accepted, scores, -math.inf)
    top = valid.argmax()
    return torch.maximum(valid[top], best[0]), torch.where(valid[top] > best[0], samples[top], best[1])


def _nominal_scores(records: list[Tensor]) -> list[float]:
    """Scores of the nominal plans, minus infinity where one was rejected."""
    rows = [record.tolist() for record in records]
    return [row[1] if row[6] else -math.inf for row in rows]


def _converged(records: list[Tensor], min_gain: float) -> bool:
    if len(records) < 2:
        return False
    scores = _nominal_scores(records)
    # Two rejected plans in a row make it not a number: no gain to judge by, so go on.
    return scores[-1] - scores[-2] <= min_gain * float(records[0][3])


def _best_so_far(refined: Tensor, scored: list[Tensor], records: list[Tensor]) -> Tensor:
    scores = _nominal_scores(records)
    first_best = scores.index(max(scores))
    return refined if scores[-1] == scores[first_best] else scored[first_best]


def _record(weights: Tensor, scores: Tensor, accepted: Tensor) -> Tensor:
    """One iteration's numbers for ``PlanInfo`` in one tensor, so that one copy brings them home."""
    mean, std = masked_moments(scores, accepted)
    best = torch.where(accepted.any(), torch.where(accepted, scores, -math.inf).max(), math.nan)
    effective = 1.0 / weights.square().sum()
    rejected = (~accepted).sum().double()
    return torch.stack([best, scores[-1], mean, std, effective, rejected, accepted[-1].double()])


def _collect(records: list[Tensor], best_knots: Tensor, weights: Tensor | None, samples: Tensor | None) -> PlanInfo:
    rows = [record.tolist() for record in records]
    best, nominal, mean, std, effective, rejected, _ = zip(*rows, strict=True) if rows else ((),) * 7
    return PlanInfo(
        iterations=len(rows),
        best=best,
        nominal=nominal,
        score_mean=mean,
        score_std=std,
        effective_samples=effective,
        rejected=int(sum(rejected)),
        best_knots=best_knots,
        weights=weights,
        sampled_knots=samples,
    )


def _checked_knots(knots: Tensor, config: PlannerConfig) -> Tensor:
    if knots.ndim != 2 or knots.shape[0] != config.num_knots:
        raise ValueError(f"plan_state.knots has shape {tuple(knots.shape)}; expected ({config.num_knots}, nu)")
    if not bool(torch.isfinite(knots).all()):
        raise ValueError("plan_state.knots holds a NaN or an infinity; expected finite knots")
    return knots


def _checked_reward(reward: Tensor, controls: Tensor) -> Tensor:
    if reward.shape not in (controls.shape[:1], controls.shape[:2]):
        raise ValueError(
            f"rollout returned shape {tuple(reward.shape)}; expected {tuple(controls.shape[:2])} "
            f"or {tuple(controls.shape[:1])}"
        )
    return reward
