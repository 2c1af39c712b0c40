"""Control splines: a few knots become one control per period, by a matrix computed once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

SplineKind = Literal["zero", "linear", "quadratic", "cubic"]

# A position this close below a knot counts as that knot. Positions are in knot intervals, so a
# rounding error of a few 1e-16 must not make a zero-order hold switch one control period late.
_SNAP = 1e-9
_MIN_KNOTS: dict[str, int] = {"zero": 1, "linear": 2, "quadratic": 3, "cubic": 2}


@dataclass(frozen=True, kw_only=True)
class ControlSpline:
    """Interpolates K knots, evenly spaced over the horizon, at the T control times.

    Control times are ``t * dt`` for t = 0 .. T-1; knot k lies at ``k / (K-1) * (T-1) * dt``. The
    first and last control are therefore the first and last knot, for every kind. With the
    position s of a time counted in knot intervals (s = 0 .. K-1), the interpolants are:

    * ``zero``: the newest knot at or before s (the last knot acts on the last control only). A shift
      by less than a knot interval moves nothing, so a plan that is shifted every period wants
      one knot per control (K = T).
    * ``linear``: straight lines between knots.
    * ``quadratic``: piecewise parabolas, continuous with their slope, whose breaks lie midway
      between knots at 1.5, 2.5 .. K-2.5; the two outermost midpoints carry no break ("not a
      knot"), so K = 3 is one parabola. Reproduces parabolas. It is the degree-2 interpolating
      spline of FITPACK, the one DIAL-MPC uses (arXiv:2409.15610, reference code).
    * ``cubic``: natural cubic spline, breaks at the knots, zero second derivative at both ends.
      Reproduces straight lines.

    Quadratic and cubic splines may leave [-1, 1] between knots that do not: clip the result.

    Attributes:
        kind: Interpolant, one of the four above.
        num_knots: K. At least 1 (zero), 2 (linear, cubic) or 3 (quadratic), at most ``horizon``.
        horizon: T, number of controls.
        dt: Control period [s].

    Raises:
        ValueError: If an attribute is outside the ranges above.
    """

    kind: SplineKind = "quadratic"
    num_knots: int
    horizon: int
    dt: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(SplineKind):
            raise ValueError(f"kind is {self.kind!r}; expected one of {get_args(SplineKind)}")
        least = _MIN_KNOTS[self.kind]
        if not least <= self.num_knots <= self.horizon:
            raise ValueError(
                f"num_knots is {self.num_knots}; expected {least} to horizon = {self.horizon} for a {self.kind} spline"
            )
        if not (self.dt > 0.0 and math.isfinite(self.dt)):
            raise ValueError(f"dt is {self.dt}; expected a positive number of seconds")

    @property
    def duration(self) -> float:
        """Time from the first to the last knot [s]."""
        return (self.horizon - 1) * self.dt

    @property
    def knot_times(self) -> Tensor:
        """Knot times [s], shape (K,), float64."""
        return torch.tensor(_knot_positions(self), dtype=torch.float64) * _interval(self)

    @property
    def matrix(self) -> Tensor:
        """Maps knots to controls, shape (T, K), float32 on the CPU. Rows sum to one."""
        return _weights(self, None, torch.float32, torch.device("cpu")).clone()

    def evaluate(self, knots: Tensor) -> Tensor:
        """Evaluate the spline at the control times.

        Args:
            knots: Shape (..., K, nu), floating point, any device.

        Returns:
            Controls, shape (..., T, nu), not clipped.

        Raises:
            ValueError: If ``knots`` does not have K rows.
        """
        return self._apply(None, knots)

    def first(self, knots: Tensor) -> Tensor:
        """The first control, which is knot 0, shape (..., nu)."""
        return knots[..., 0, :]

    def hold(self, control: Tensor) -> Tensor:
        """Knots (K, nu) of the plan that keeps ``control``, shape (nu,)."""
        return control.repeat(self.num_knots, 1)

    def clip(self, knots: Tensor) -> Tensor:
        """Knots (..., K, nu) in [-1, 1]."""
        return knots.clamp(-1.0, 1.0)

    def disturb(self, nominal: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        """Samples around a plan that all keep its knot 0, the first control.

        Args:
            nominal: Knots in [-1, 1], shape (K, nu).
            sigma: Standard deviations, shape (K, nu) or (K, 1).
            noise: Standard normal, shape (N, K, nu).

        Returns:
            Knots in [-1, 1], shape (N, K, nu).
        """
        step = sigma * noise
        step[:, 0] = 0.0
        return self.clip(nominal + step)

    def shift(self, knots: Tensor, elapsed: float) -> Tensor:
        """Move the plan forward: the spline's values at the knot times plus ``elapsed``.

        Beyond the last knot the plan is held at its last value, never extrapolated. The new
        spline equals the old one, moved, at the knot times; between them it interpolates anew.

        Args:
            knots: Shape (..., K, nu).
            elapsed: Time since the plan was made [s], not negative. A plan older than the
                horizon becomes its last value throughout.

        Returns:
            Knots, shape (..., K, nu), not clipped.

        Raises:
            ValueError: If ``elapsed`` is negative or not finite, or ``knots`` lacks K rows.
        """
        if not (elapsed >= 0.0 and math.isfinite(elapsed)):
            raise ValueError(f"elapsed is {elapsed}; expected a finite time >= 0 s")
        return self._apply(float(elapsed), knots)

    def _apply(self, elapsed: float | None, knots: Tensor) -> Tensor:
        if knots.ndim < 2 or knots.shape[-2] != self.num_knots:
            raise ValueError(f"knots has shape {tuple(knots.shape)}; expected (..., {self.num_knots}, nu)")
        return _weights(self, elapsed, knots.dtype, knots.device) @ knots  # (..., T or K, nu)


def _interval(spline: ControlSpline) -> float:
    """Time between knots [s]; a single knot has no interval and any length will do."""
    return spline.duration / (spline.num_knots - 1) if spline.num_knots > 1 else spline.dt


def _knot_positions(spline: ControlSpline) -> list[float]:
    return [float(k) for k in range(spline.num_knots)]


def _control_positions(spline: ControlSpline) -> list[float]:
    # Integer arithmetic first: dt would only add rounding.
    intervals, steps = spline.num_knots - 1, max(spline.horizon - 1, 1)
    return [t * intervals / steps for t in range(spline.horizon)]


@lru_cache(maxsize=256)
def _weights(spline: ControlSpline, elapsed: float | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The map of ``evaluate`` (``elapsed`` None) or of ``shift``, solved in float64."""
    if elapsed is None:
        positions = _control_positions(spline)
    else:
        last = float(spline.num_knots - 1)
        moved = elapsed / _interval(spline)
        positions = [min(s + moved, last) for s in _knot_positions(spline)]
    # A cached inference tensor could never again take part in a gradient.
    with torch.inference_mode(False), torch.no_grad():
        points = torch.tensor(positions, dtype=torch.float64)
        return _interpolation(spline.kind, spline.num_knots, points).to(device, dtype)


def _interpolation(kind: str, num_knots: int, points: Tensor) -> Tensor:
    """Weights of the knots at ``points`` (in knot intervals), shape (P, K), float64."""
    knots = torch.arange(num_knots, dtype=torch.float64)
    if kind == "zero":
        return (torch.floor(points + _SNAP)[:, None] == knots).double()
    if kind == "linear":
        return (1.0 - (points[:, None] - knots).abs()).clamp(min=0.0)
    basis = _quadratic_basis if kind == "quadratic" else _natural_cubic_basis
    # Coefficients c = V^-1 y with V the basis at the knots, hence weights = basis(points) V^-1.
    weights = torch.linalg.solve(basis(num_knots, knots), basis(num_knots, points), left=False)
    return weights / weights.sum(dim=1, keepdim=True)  # the last rounding of the partition of unity


def _quadratic_basis(num_knots: int, s: Tensor) -> Tensor:
    """1, s, s^2 and a truncated square at each of the K - 3 breaks, shape (P, K)."""
    # Centred and scaled, or the powers of a long plan would cost digits.
    half = (num_knots - 1) / 2.0
    x = (s - half) / half
    breaks = (torch.arange(1, num_knots - 2, dtype=torch.float64) + 0.5 - half) / half
    truncated = (x[:, None] - breaks).clamp(min=0.0).square()
    return torch.cat([torch.ones_like(x)[:, None], x[:, None], x.square()[:, None], truncated], 1)


def _natural_cubic_basis(num_knots: int, s: Tensor) -> Tensor:
    """1, s and K - 2 truncated cubics combined so that both ends are natural, shape (P, K).

    With d_k(s) = ((s - k)_+^3 - (s - K + 1)_+^3) / (K - 1 - k), the combination d_k - d_(K-2) has
    no second derivative outside the knots (Hastie, Tibshirani, Friedman, eq. 5.4).
    """
    last = num_knots - 1
    k = torch.arange(last, dtype=torch.float64)
    cubes = (s[:, None] - k).clamp(min=0.0).pow(3)  # (P, K-1)
    end = (s[:, None] - last).clamp(min=0.0).pow(3)  # (P, 1)
    d = (cubes - end) / (last - k)
    return torch.cat([torch.ones_like(s)[:, None], s[:, None], d[:, :-1] - d[:, -1:]], dim=1)
