"""DIAL-MPC: refine one nominal plan by sampling around it with annealed noise.

The planner knows no model and no simulator: a callable scores a batch of control sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nerd_mpc.dial_config import DialConfig, at_least_one, dial_preset, dial_presets

__all__ = [
    "DialConfig",
    "PlanInfo",
    "PlanState",
    "RolloutDynamics",
    "dial_preset",
    "dial_presets",
    "draw_noise",
    "initial_plan",
    "plan",
    "sample_weights",
    "warm_start",
]

# Rewards beyond this size come from a diverged rollout, even where they are still finite.
_REWARD_LIMIT = 1e30


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
            already committed for the coming period.
    """

    knots: Tensor


@dataclass(frozen=True, kw_only=True)
class PlanInfo:
    """What happened during one decision. Tuples have one entry per realised iteration.

    Attributes:
        iterations: Refinements realised; fewer than asked for if the deadline passed.
        best: Best accepted score, NaN where every sample was rejected.
        nominal: Score of the nominal plan before the iteration's update, finite or not.
        score_mean: Mean over accepted samples.
        score_std: Population standard deviation over accepted samples.
        effective_samples: 1 / sum of squared weights, between 1 and N.
        rejected: Samples given weight zero because their reward was not finite or over 1e30,
            summed over iterations.
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


def initial_plan(config: DialConfig, nu: int, *, device: torch.device | str = "cpu") -> PlanState:
    """The plan that holds every control at the middle of its range, knots of shape (K, nu)."""
    return PlanState(torch.zeros(config.num_knots, nu, device=device))


def draw_noise(config: DialConfig, generator: torch.Generator, iterations: int, nu: int) -> Tensor:
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


def warm_start(plan_state: PlanState, config: DialConfig, elapsed: float | None = None) -> PlanState:
    """Shift the plan by exact time, hold its tail, clip to [-1, 1].

    Args:
        plan_state: Plan made for a time ``elapsed`` seconds ago.
        config: Gives the spline.
        elapsed: Time since then [s]; one control period if omitted.
    """
    elapsed = config.dt if elapsed is None else elapsed
    return PlanState(config.control_spline.shift(plan_state.knots, elapsed).clamp(-1.0, 1.0))


def sample_weights(reward: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of N samples of which the last is the nominal plan.

    ``w = softmax((R - max R) / (std R + eps) / temperature)`` over the accepted samples, where R
    is the mean reward over time. Adding a constant to every reward, or multiplying all by a
    positive one, changes nothing but rounding.

    Chosen here: eps is four times the rounding unit of the reward's number format times max |R|,
    so that it scales with the rewards. Where the scores differ by no more than that, they tell
    nothing: all weight stays on the nominal plan (or, if that was rejected, is spread evenly over
    the accepted samples). Where every sample was rejected, the nominal plan keeps all weight too.

    Args:
        reward: Shape (N, T) or (N,).
        temperature: In standard deviations of the scores.

    Returns:
        Weights, scores and accepted (bool), each of shape (N,), the first two in float64.
    """
    reward64 = reward.double()
    if reward64.ndim == 1:
        reward64 = reward64[:, None]
    # NaN compares false, so one comparison rejects NaN, infinities and overflow.
    accepted = (reward64.abs() <= _REWARD_LIMIT).all(dim=1)
    scores = reward64.mean(dim=1)
    _, std = _masked_moments(scores, accepted)
    top = torch.where(accepted, scores, -math.inf).max()
    bottom = torch.where(accepted, scores, math.inf).min()
    number_format = reward.dtype if reward.is_floating_point() else torch.float64
    eps = 4.0 * torch.finfo(number_format).eps * torch.maximum(top.abs(), bottom.abs())
    tied = top - bottom <= eps

    logits = (scores - top) / (std + eps) / temperature
    softmax = torch.softmax(torch.where(accepted, logits, -math.inf), dim=0)

    nominal = torch.zeros_like(scores)
    nominal[-1] = 1.0
    even = accepted.double() / accepted.sum().clamp(min=1)
    uninformed = torch.where(accepted[-1] | ~accepted.any(), nominal, even)
    return torch.where(tied | ~accepted.any(), uninformed, softmax), scores, accepted


@torch.no_grad()
def plan(
    plan_state: PlanState,
    rollout: RolloutDynamics,
    *,
    config: DialConfig,
    noise: Tensor | torch.Generator,
    iterations: int | None = None,
    deadline: Callable[[], bool] | None = None,
    keep_samples: bool = False,
) -> tuple[PlanState, PlanInfo]:
    """Refine the plan from the present state.

    Each iteration samples ``knots + sigma[i] * noise[i]`` with knot 0 pinned (that control is
    already committed: one control period of latency) and the nominal plan as last sample, clips to
    [-1, 1], evaluates the spline, clips again, scores, and moves the nominal plan to the weighted
    mean of the sampled knots (see ``sample_weights``). Knot 0 never changes.

    Args:
        plan_state: Nominal plan, knots (K, nu); its device is where samples are made. Clipped
            to [-1, 1] first.
        rollout: Scores controls of shape (N, T, nu).
        config: Budget and schedule.
        noise: Standard normal, shape (>= iterations, N, K, nu), or a CPU generator to draw it.
        iterations: Refinements; ``config.iterations`` if omitted.
        deadline: Asked before every iteration, once its predecessor's results are in; True stops
            and returns the plan as refined so far.
        keep_samples: Whether ``PlanInfo.sampled_knots`` is filled.

    Returns:
        The refined plan and a record of the decision.

    Raises:
        ValueError: If a shape disagrees with the config, or the knots are not finite.
    """
    nominal = _checked_knots(plan_state.knots, config)
    n = config.iterations if iterations is None else at_least_one("iterations", iterations)
    if isinstance(noise, torch.Generator):
        noise = draw_noise(config, noise, n, nominal.shape[1])
    expected = (config.num_samples, *nominal.shape)
    if noise.ndim != 4 or noise.shape[0] < n or noise.shape[1:] != expected:
        raise ValueError(f"noise has shape {tuple(noise.shape)}; expected (>={n}, *{expected})")
    table = config.noise_table(n).to(nominal)
    noise = noise[:n].to(nominal)
    spline = config.control_spline

    records: list[Tensor] = []
    weights = samples = None
    for i in range(n):
        if deadline is not None:
            # Wait for the device here, or the clock would be read while the work is only queued.
            if records:
                records[-1] = records[-1].cpu()
            if deadline():
                break
        samples = _sample(nominal, table[i], noise[i])
        controls = spline.evaluate(samples).clamp(-1.0, 1.0)  # (N, T, nu)
        reward = _checked_reward(rollout(controls), controls).to(nominal.device)
        weights, scores, accepted = sample_weights(reward, config.temperature)
        # As a change of the nominal, in float64: knot 0 and an uninformed plan stay bit-equal.
        change = (weights[:, None, None] * (samples.double() - nominal.double())).sum(dim=0)
        nominal = (nominal.double() + change).to(nominal.dtype).clamp(-1.0, 1.0)
        records.append(_record(weights, scores, accepted))
    info = _collect(records, weights, samples if keep_samples else None)
    return PlanState(nominal), info


def _sample(nominal: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """Samples around the nominal knots, shape (N, K, nu), the last one being the nominal."""
    step = sigma[:, None] * noise
    step[:, 0] = 0.0
    step[-1] = 0.0
    return (nominal + step).clamp(-1.0, 1.0)


def _masked_moments(scores: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation over the accepted; NaN without any."""
    count = accepted.sum()
    mean = torch.where(accepted, scores, 0.0).sum() / count
    deviation = torch.where(accepted, scores - mean, 0.0)
    return mean, (deviation.square().sum() / count).sqrt()


def _record(weights: Tensor, scores: Tensor, accepted: Tensor) -> Tensor:
    """One iteration's numbers for ``PlanInfo`` in one tensor, so that one copy brings them home."""
    mean, std = _masked_moments(scores, accepted)
    best = torch.where(accepted.any(), torch.where(accepted, scores, -math.inf).max(), math.nan)
    effective = 1.0 / weights.square().sum()
    rejected = (~accepted).sum().double()
    return torch.stack([best, scores[-1], mean, std, effective, rejected])


def _collect(records: list[Tensor], weights: Tensor | None, samples: Tensor | None) -> PlanInfo:
    rows = [record.tolist() for record in records]
    best, nominal, mean, std, effective, rejected = zip(*rows, strict=True) if rows else ((),) * 6
    return PlanInfo(
        iterations=len(rows),
        best=best,
        nominal=nominal,
        score_mean=mean,
        score_std=std,
        effective_samples=effective,
        rejected=int(sum(rejected)),
        weights=weights,
        sampled_knots=samples,
    )


def _checked_knots(knots: Tensor, config: DialConfig) -> Tensor:
    if knots.ndim != 2 or knots.shape[0] != config.num_knots:
        raise ValueError(f"plan_state.knots has shape {tuple(knots.shape)}; expected ({config.num_knots}, nu)")
    if not bool(torch.isfinite(knots).all()):
        raise ValueError("plan_state.knots holds a NaN or an infinity; expected finite knots")
    return knots.clamp(-1.0, 1.0)


def _checked_reward(reward: Tensor, controls: Tensor) -> Tensor:
    if reward.shape not in (controls.shape[:1], controls.shape[:2]):
        raise ValueError(
            f"rollout returned shape {tuple(reward.shape)}; expected {tuple(controls.shape[:2])} "
            f"or {tuple(controls.shape[:1])}"
        )
    return reward
