"""Update rules: from the scores of N samples to the weights with which the plan moves to them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["best_weight", "elite_weights", "masked_moments", "sample_weights", "softmax_weights", "weigh_samples"]

SCORE_LIMIT = 1e30
"""Rewards beyond this size come from a diverged rollout, even where they are still finite."""


def weigh_samples(reward: Tensor, rule: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of N samples of which the last is the nominal plan.

    The rule sees ``(R - max R) / (std R + eps)`` over the accepted samples, where R is the mean
    reward over time. Adding a constant to every reward, or multiplying all by a positive one,
    changes nothing but rounding.

    Chosen here: eps is four times the rounding unit of the reward's number format times max |R|,
    so that it scales with the rewards. Where the scores differ by no more than that, they tell
    nothing: all weight stays on the nominal plan (or, if that was rejected, is spread evenly over
    the accepted samples). Where every sample was rejected, the nominal plan keeps all weight too.

    Args:
        reward: Shape (N, T) or (N,).
        rule: Maps these standings, shape (N,), minus infinity where rejected, to weights.

    Returns:
        Weights, scores and accepted (bool), each of shape (N,), the first two in float64.
    """
    reward64 = reward.double()
    if reward64.ndim == 1:
        reward64 = reward64[:, None]
    # NaN compares false, so one comparison rejects NaN, infinities and overflow.
    accepted = (reward64.abs() <= SCORE_LIMIT).all(dim=1)
    scores = reward64.mean(dim=1)
    _, std = masked_moments(scores, accepted)
    top = torch.where(accepted, scores, -math.inf).max()
    bottom = torch.where(accepted, scores, math.inf).min()
    number_format = reward.dtype if reward.is_floating_point() else torch.float64
    eps = 4.0 * torch.finfo(number_format).eps * torch.maximum(top.abs(), bottom.abs())
    tied = top - bottom <= eps

    ruled = rule(torch.where(accepted, (scores - top) / (std + eps), -math.inf))

    nominal = torch.zeros_like(scores)
    nominal[-1] = 1.0
    even = accepted.double() / accepted.sum().clamp(min=1)
    uninformed = torch.where(accepted[-1] | ~accepted.any(), nominal, even)
    return torch.where(tied | ~accepted.any(), uninformed, ruled), scores, accepted


def sample_weights(reward: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of DIAL-MPC and MPPI: ``weigh_samples`` with ``softmax_weights``.

    Args:
        reward: Shape (N, T) or (N,).
        temperature: In standard deviations of the scores.

    Returns:
        Weights, scores and accepted (bool), each of shape (N,), the first two in float64.
    """
    return weigh_samples(reward, lambda standing: softmax_weights(standing, temperature))


def softmax_weights(standing: Tensor, temperature: float) -> Tensor:
    """``softmax(standing / temperature)``, shape (N,)."""
    return torch.softmax(standing / temperature, dim=0)


def elite_weights(standing: Tensor, num_elites: int) -> Tensor:
    """Equal weights for the best ``num_elites`` accepted samples (all of them if fewer), shape (N,)."""
    best = standing.topk(num_elites).indices
    chosen = torch.zeros_like(standing)
    chosen[best] = (standing[best] > -math.inf).to(standing.dtype)
    return chosen / chosen.sum().clamp(min=1.0)


def best_weight(standing: Tensor) -> Tensor:
    """All weight on the best sample, on the nominal plan if none is better, shape (N,)."""
    best = torch.where(standing[-1] == 0.0, len(standing) - 1, standing.argmax())
    return (torch.arange(len(standing), device=standing.device) == best).to(standing.dtype)


def masked_moments(scores: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation over the accepted; NaN without any."""
    count = accepted.sum()
    mean = torch.where(accepted, scores, 0.0).sum() / count
    deviation = torch.where(accepted, scores - mean, 0.0)
    return mean, (deviation.square().sum() / count).sqrt()
