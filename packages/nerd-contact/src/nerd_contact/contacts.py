"""Contact sets: what the robot touches, or is about to touch, wherever that is."""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ContactSet", "Counterpart"]


class Counterpart(IntEnum):
    """What a contact row is against."""

    STATIC = 0
    DYNAMIC = 1
    SELF = 2


class ContactSet(NamedTuple):
    """K contact rows per world, padded, in no particular order.

    Rows are kept while the gap is below a margin at least as large as a point can travel in one model step, so a
    contact is seen before it happens.

    Attributes:
        point: Point on the robot's surface, base frame [m], shape (..., K, 3).
        normal: Unit normal towards the robot, base frame, shape (..., K, 3).
        gap: Signed distance, negative inside [m], shape (..., K).
        velocity: Velocity of the robot's point relative to the counterpart, base frame [m/s], shape (..., K, 3).
        friction: Sliding friction coefficient, shape (..., K).
        link: Index of the robot's link, shape (..., K), int64.
        kind: :class:`Counterpart`, shape (..., K), int64.
        mask: True for rows that exist, shape (..., K), bool. What stands in other rows must not matter.
        count: Rows that existed before any were dropped for want of room, shape (...,), int64. Pairs that were not
            looked at for want of room, and may have been rows, count too.
    """

    point: Tensor
    normal: Tensor
    gap: Tensor
    velocity: Tensor
    friction: Tensor
    link: Tensor
    kind: Tensor
    mask: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - the field's own word

    @property
    def overflow(self) -> Tensor:
        """Rows that were dropped in each world, shape (...,), int64.

        A value, like the rows: a recorder leaves out worlds where it is not 0, a planner gives them no weight.
        """
        return self.count - self.mask.sum(-1)

    def deepest(self, rows: int) -> "ContactSet":
        """The ``rows`` rows of smallest gap; ``count`` keeps the true number.

        Raises:
            ValueError: If ``rows`` is less than 1.
        """
        if rows < 1:
            raise ValueError(f"rows is {rows}, expected at least 1")
        if self.gap.shape[-1] <= rows:
            return self
        keep = deepest(self.gap, self.mask, rows)
        wide = keep[..., None].expand(*keep.shape, 3)
        return ContactSet(
            self.point.gather(-2, wide),
            self.normal.gather(-2, wide),
            self.gap.gather(-1, keep),
            self.velocity.gather(-2, wide),
            self.friction.gather(-1, keep),
            self.link.gather(-1, keep),
            self.kind.gather(-1, keep),
            self.mask.gather(-1, keep),
            self.count,
        )


def cleared(rows: ContactSet) -> ContactSet:
    """The rows with zeros wherever there is none, so that neither values nor gradients of padding reach anything.

    Clearing features after they were computed would not do: the derivative of a NaN is NaN, and 0 · NaN is NaN.
    """
    mask, wide = rows.mask, rows.mask[..., None]
    return rows._replace(
        point=torch.where(wide, rows.point, 0.0),
        normal=torch.where(wide, rows.normal, 0.0),
        gap=torch.where(mask, rows.gap, 0.0),
        velocity=torch.where(wide, rows.velocity, 0.0),
        friction=torch.where(mask, rows.friction, 0.0),
        link=torch.where(mask, rows.link, 0),
        kind=torch.where(mask, rows.kind, 0),
    )


def deepest(gap: Tensor, mask: Tensor, rows: int) -> Tensor:
    """Indices, shape (..., rows), of the rows of smallest gap (..., K) among those that exist."""
    return torch.where(mask, gap, torch.inf).topk(rows, -1, largest=False).indices
