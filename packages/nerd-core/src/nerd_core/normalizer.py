"""Per-channel normalisation, fitted on the training split and frozen."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Normalizer", "Total", "alone"]

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes that hold a part of the sample; every process gets the same bits."""


def alone(part: Tensor) -> Tensor:
    """The :data:`Total` of a process that holds the whole sample."""
    return part


class Normalizer(nn.Module):
    """Mean and standard deviation per channel, with a floor and an active mask.

    x̄ = (x - μ) / σ on active channels and 0 elsewhere. The floor is relative to the largest σ of the set, not
    absolute, so that channels of small physical scale (a rotation at a short time step) keep their weight.
    Channels whose σ is below ``1e-6`` of the largest never move: they are inactive, zero in the output and left out
    of the loss.

    Attributes:
        mean: μ, shape (C,).
        std: σ, shape (C,), positive.
        active: Channels that move, shape (C,), 1 or 0.
    """

    mean: Tensor
    std: Tensor
    active: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.register_buffer("active", torch.ones(channels))

    @torch.no_grad()
    def fit(self, values: Tensor, total: Total = alone) -> None:
        """Set the statistics from samples, in float64 and two passes.

        Args:
            values: Samples, shape (..., C); of a sample that is spread over processes, this one's part.
            total: Sums over the processes.

        Raises:
            ValueError: Samples that are not finite, in any process.
        """
        flat = values.reshape(-1, values.shape[-1]).double()
        count = total(flat.new_tensor(float(len(flat))))
        mean = total(flat.sum(0)) / count
        std = (total((flat - mean).square().sum(0)) / count).sqrt()
        # Looked for after the sums, so that every process sees what one of them found.
        if not bool(torch.isfinite(std).all()):
            raise ValueError("values: statistics of non-finite samples were asked for, expected finite ones")
        largest = std.max().clamp_min(1e-30)
        active = std > 1e-6 * largest
        self.mean.copy_(mean)
        self.std.copy_(torch.where(active, std.clamp_min(1e-4 * largest), torch.ones_like(std)))
        self.active.copy_(active)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalised channels, shape (..., C)."""
        return (x - self.mean) / self.std * self.active

    def denormalize(self, y: Tensor) -> Tensor:
        """Inverse of :meth:`normalize`; inactive channels return their constant mean."""
        return y * self.active * self.std + self.mean
