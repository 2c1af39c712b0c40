"""Control bases: how a few numbers per control become one control per period."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from nerd_mpc.legendre import LegendreBasis
from nerd_mpc.spline import ControlSpline, SplineKind

__all__ = ["BasisKind", "ControlBasis", "control_basis"]

BasisKind: TypeAlias = SplineKind | Literal["legendre"]
ControlBasis: TypeAlias = ControlSpline | LegendreBasis

_SPLINES: tuple[SplineKind, ...] = get_args(SplineKind)


def control_basis(kind: BasisKind, *, num_knots: int, horizon: int, dt: float) -> ControlBasis:
    """The basis of that kind.

    All share ``evaluate``, ``shift``, ``first``, ``hold``, ``clip``, ``disturb`` and ``matrix``.

    Args:
        kind: ``zero``, ``linear``, ``quadratic`` or ``cubic`` (knots), or ``legendre`` (coefficients
            of one polynomial piece).
        num_knots: K, knots or coefficients.
        horizon: T, number of controls.
        dt: Control period [s].

    Raises:
        ValueError: If the kind is unknown, K too small for it or larger than T, or dt not positive.
    """
    if kind == "legendre":
        return LegendreBasis(num_knots=num_knots, horizon=horizon, dt=dt)
    if kind not in _SPLINES:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join((*_SPLINES, 'legendre'))}")
    return ControlSpline(kind=kind, num_knots=num_knots, horizon=horizon, dt=dt)
