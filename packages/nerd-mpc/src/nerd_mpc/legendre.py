"""Legendre control basis: a plan is one polynomial over the horizon, given by a few coefficients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

__all__ = ["LegendreBasis"]

_Map = Literal["evaluate", "translate", "shift"]


@dataclass(frozen=True, kw_only=True)
class LegendreBasis:
    """A control as a sum of K Legendre polynomials over the horizon.

    ``u(t) = sum_n c[n] P_n(x)`` with ``x = 2 t / ((T - 1) dt) - 1``, n = 0 .. K-1. Mode 0 is the mean
    over the horizon, mode 1 its slope, and so on; the modes are orthogonal in time. Where a spline
    keeps knots, this basis keeps coefficients, in the same place and shape. It has no knot that is
    the first control; that control is ``sum_n (-1)^n c[n]``.

    Source: Legendre coefficients as action chunks, FLASH (arXiv:2605.15492); the translation of the
    coefficients is the addition of arguments of a polynomial.
    Chosen here: a coefficient is at most as large as that of some control inside [-1, 1] (``limits``).

    Attributes:
        num_knots: K, number of coefficients, 1 to ``horizon``.
        horizon: T, number of controls, at least 2.
        dt: Control period [s].

    Raises:
        ValueError: If an attribute is outside the ranges above.
    """

    num_knots: int
    horizon: int
    dt: float

    def __post_init__(self) -> None:
        if self.horizon < 2:
            raise ValueError(f"horizon is {self.horizon}; expected an integer >= 2")
        if not 1 <= self.num_knots <= self.horizon:
            raise ValueError(
                f"num_knots is {self.num_knots}; expected 1 to horizon = {self.horizon} legendre coefficients"
            )
        if not (self.dt > 0.0 and math.isfinite(self.dt)):
            raise ValueError(f"dt is {self.dt}; expected a positive number of seconds")

    @property
    def duration(self) -> float:
        """Time from the first to the last control [s]."""
        return (self.horizon - 1) * self.dt

    @property
    def matrix(self) -> Tensor:
        """Maps coefficients to controls, shape (T, K), float32 on the CPU."""
        return _matrix(self, "evaluate", 0.0, torch.float32, torch.device("cpu")).clone()

    @property
    def limits(self) -> Tensor:
        """Largest coefficient of any control inside [-1, 1], shape (K,), float64.

        ``(2n + 1) / 2`` times the integral of ``|P_n|``: 1, 1.5, 1.92, ...
        """
        return torch.tensor(_limits(self.num_knots), dtype=torch.float64)

    def evaluate(self, knots: Tensor) -> Tensor:
        """Evaluate the polynomial at the control times.

        Args:
            knots: Coefficients, shape (..., K, nu), floating point, any device.

        Returns:
            Controls, shape (..., T, nu), not clipped.

        Raises:
            ValueError: If ``knots`` does not have K rows.
        """
        return self._apply("evaluate", 0.0, knots)

    def first(self, knots: Tensor) -> Tensor:
        """The first control, shape (..., nu), not clipped."""
        return self.evaluate(knots)[..., 0, :]

    def hold(self, control: Tensor) -> Tensor:
        """Coefficients (K, nu) of the plan that keeps ``control``, shape (nu,)."""
        knots = control.new_zeros(self.num_knots, len(control))
        knots[0] = control
        return knots

    def clip(self, knots: Tensor) -> Tensor:
        """Coefficients (..., K, nu) within ``limits``."""
        limit = self.limits.to(knots)[:, None]
        return torch.maximum(torch.minimum(knots, limit), -limit)

    def disturb(self, nominal: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        """Samples around a plan that all begin with the plan's first control.

        The step is ``sigma * noise``, conditioned on the first control staying: with ``a[n] = (-1)^n``
        and ``d`` the free step, ``d - S a (a . d) / (a . S a)`` for ``S = diag(sigma^2)``. For a basis with
        knots the same condition pins knot 0. A step that would leave ``limits`` is shortened.

        Args:
            nominal: Coefficients within ``limits``, shape (K, nu).
            sigma: Standard deviations, shape (K, nu) or (K, 1), positive.
            noise: Standard normal, shape (N, K, nu).

        Returns:
            Coefficients, shape (N, K, nu).
        """
        sign = _matrix(self, "evaluate", 0.0, nominal.dtype, nominal.device)[0][:, None]  # a, (K, 1)
        step = sigma * noise
        gain = sigma.square() * sign / sigma.square().sum(0)  # a[n]^2 is 1
        step = step - gain * (sign * step).sum(-2, keepdim=True)
        # Shortening keeps the condition, which clamping each coefficient would break.
        room = (self.limits.to(nominal)[:, None] - step.sign() * nominal).clamp(min=0.0)
        most = torch.where(step == 0.0, math.inf, room / step.abs()).amin(-2, keepdim=True)
        return nominal + most.clamp(max=1.0) * step

    def translate(self, knots: Tensor, elapsed: float) -> Tensor:
        """The same polynomial, seen ``elapsed`` seconds later: exact, also past the old horizon.

        ``P_n(x + delta) = sum_m S[m, n] P_m(x)``, a linear map on the coefficients. Repeated without
        end it lets the controls beyond the old horizon grow like a polynomial: see ``shift``.

        Args:
            knots: Shape (..., K, nu).
            elapsed: Time since the plan was made [s], not negative.

        Returns:
            Coefficients, shape (..., K, nu), not clipped.

        Raises:
            ValueError: If ``elapsed`` is negative or not finite, or ``knots`` lacks K rows.
        """
        return self._apply("translate", _checked_time(elapsed), knots)

    def shift(self, knots: Tensor, elapsed: float) -> Tensor:
        """Move the plan forward with its end held: a linear map on coefficients.

        A plan with a held tail is no polynomial. Chosen here: Lanczos' tau method. The polynomial is
        moved exactly (``translate``) except that its highest mode yields so that the last control
        stays: ``dc/ds = (D - e p^T) c`` over the distance s in x, with D the derivative, e the highest
        mode and ``p[n] = P_n'(1) = n (n + 1) / 2``; the shift is the matrix exponential. Two shifts are
        the shift by their sum, the last control never changes, and repeated shifts stay bounded,
        which ``translate`` does not, nor a least squares fit to the held plan. The price: controls
        inside the old horizon come back approximately, the worse the more the end was moving.
        A plan older than the horizon becomes its last control throughout.

        Source: Gottlieb and Orszag, "Numerical Analysis of Spectral Methods" (1977), for the stability
        of the method.

        Args:
            knots: Shape (..., K, nu).
            elapsed: Time since the plan was made [s], not negative.

        Returns:
            Coefficients, shape (..., K, nu), not clipped.

        Raises:
            ValueError: If ``elapsed`` is negative or not finite, or ``knots`` lacks K rows.
        """
        return self._apply("shift", _checked_time(elapsed), knots)

    def _apply(self, name: _Map, elapsed: float, knots: Tensor) -> Tensor:
        if knots.ndim < 2 or knots.shape[-2] != self.num_knots:
            raise ValueError(f"knots has shape {tuple(knots.shape)}; expected (..., {self.num_knots}, nu)")
        return _matrix(self, name, elapsed, knots.dtype, knots.device) @ knots  # (..., T or K, nu)


def _checked_time(elapsed: float) -> float:
    if not (elapsed >= 0.0 and math.isfinite(elapsed)):
        raise ValueError(f"elapsed is {elapsed}; expected a finite time >= 0 s")
    return float(elapsed)


@lru_cache(maxsize=256)
def _matrix(basis: LegendreBasis, name: _Map, elapsed: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One of the maps, made in float64."""
    # A cached inference tensor could never again take part in a gradient.
    with torch.inference_mode(False), torch.no_grad():
        moved = 2.0 * elapsed / basis.duration
        if name == "evaluate":
            made = _polynomials(torch.linspace(-1.0, 1.0, basis.horizon, dtype=torch.float64), basis.num_knots)
        elif name == "translate":
            made = _translation(basis.num_knots, moved)
        else:
            made = _held(basis.num_knots, moved)
        return made.to(device, dtype)


def _polynomials(x: Tensor, count: int) -> Tensor:
    """P_0 .. P_(count-1) at ``x``, shape (len(x), count), by Bonnet's recursion."""
    columns = [torch.ones_like(x), x]
    for n in range(1, count - 1):
        columns.append(((2 * n + 1) * x * columns[n] - n * columns[n - 1]) / (n + 1))
    return torch.stack(columns[:count], dim=1)


def _quadrature(count: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights, exact to degree 2 count - 1 (Golub and Welsch)."""
    n = torch.arange(1, count, dtype=torch.float64)
    beside = n / (4.0 * n.square() - 1.0).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return nodes, 2.0 * vectors[0].square()


def _translation(count: int, moved: float) -> Tensor:
    """S with ``P_n(x + moved) = sum_m S[m, n] P_m(x)``, upper triangular, shape (K, K)."""
    x, weight = _quadrature(count)
    inverse_norm = (2.0 * torch.arange(count, dtype=torch.float64) + 1.0) / 2.0
    products = (_polynomials(x, count) * weight[:, None]).T @ _polynomials(x + moved, count)
    return (inverse_norm[:, None] * products).triu()


def _held(count: int, moved: float) -> Tensor:
    """The translation whose highest mode keeps the end at rest, shape (K, K)."""
    held = torch.zeros(count, count, dtype=torch.float64)
    if moved >= 2.0:
        held[0] = 1.0  # every mode ends at one
        return held
    order = torch.arange(count, dtype=torch.float64)
    # P_n' = (2n - 1) P_(n-1) + (2n - 5) P_(n-3) + ...
    below = (order[None] - order[:, None] > 0) & ((order[None] - order[:, None]) % 2 == 1)
    generator = torch.where(below, 2.0 * order[:, None] + 1.0, 0.0)
    generator[-1] -= order * (order + 1.0) / 2.0
    return torch.linalg.matrix_exp(moved * generator)


@lru_cache(maxsize=64)
def _limits(count: int) -> tuple[float, ...]:
    limits = []
    for n in range(count):
        roots = _quadrature(n)[0] if n else torch.empty(0, dtype=torch.float64)
        ends = torch.tensor([-1.0], dtype=torch.float64)
        values = _polynomials(torch.cat([ends, roots, -ends]), n + 2)
        # (2n + 1) P_n is the slope of P_(n+1) - P_(n-1).
        integral = values[:, n + 1] - (values[:, n - 1] if n else 0.0)
        limits.append(0.5 * float(integral.diff().abs().sum()))
    return tuple(limits)
