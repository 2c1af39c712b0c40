"""The Legendre basis: closed forms, exact translation, and the shift that holds the tail."""

import pytest
import torch

from nerd_mpc.basis import control_basis
from nerd_mpc.legendre import LegendreBasis
from nerd_mpc.spline import ControlSpline

DT = 0.02


def make(num_knots=5, horizon=26):
    return LegendreBasis(num_knots=num_knots, horizon=horizon, dt=DT)


def random_coefficients(num_knots, nu=3, seed=0):
    return torch.randn(num_knots, nu, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def polynomial(coefficients, time, duration):
    """The same sum at any time, with P_0 .. P_4 written out."""
    x = (2 * time / duration - 1)[:, None]
    modes = [x**0, x, (3 * x**2 - 1) / 2, (5 * x**3 - 3 * x) / 2, (35 * x**4 - 30 * x**2 + 3) / 8]
    return sum(mode * c for mode, c in zip(modes, coefficients, strict=False))


def times(basis):
    return DT * torch.arange(basis.horizon, dtype=torch.float64)


@pytest.mark.parametrize("num_knots", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("horizon", [5, 17, 26])
def test_the_matrix_holds_the_polynomials_as_they_are_written_in_books(num_knots, horizon):
    basis = make(num_knots, horizon)
    c = random_coefficients(num_knots)
    expected = polynomial(c, times(basis), basis.duration)
    torch.testing.assert_close(basis.evaluate(c), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(basis.matrix, basis.evaluate(torch.eye(num_knots)), rtol=0, atol=1e-6)


def test_modes_are_orthogonal_in_time():
    matrix = make(6, 4001).evaluate(torch.eye(6, dtype=torch.float64))
    gram = torch.trapezoid(matrix[:, :, None] * matrix[:, None, :], dx=2 / 4000, dim=0)
    expected = torch.diag(2 / (2 * torch.arange(6, dtype=torch.float64) + 1))
    torch.testing.assert_close(gram, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("elapsed", [0.0, 0.0137, 0.02, 0.3, 0.5, 0.9])
def test_a_translated_plan_is_the_plan_at_later_times_to_the_last_digit(elapsed):
    basis, c = make(), random_coefficients(5)
    moved = basis.evaluate(basis.translate(c, elapsed))
    expected = polynomial(c, times(basis) + elapsed, basis.duration)
    torch.testing.assert_close(moved, expected, rtol=1e-11, atol=1e-11)


def test_two_translations_are_the_translation_by_their_sum():
    basis, c = make(8, 40), random_coefficients(8)
    twice = basis.translate(basis.translate(c, 0.03), 0.05)
    torch.testing.assert_close(twice, basis.translate(c, 0.08), rtol=0, atol=1e-11)


def test_translation_by_half_the_horizon_agrees_with_hand_arithmetic():
    # x becomes x + 1: P_1 = x + 1 = P_1 + P_0 and P_2 = (3 (x + 1)^2 - 1) / 2 = P_2 + 3 P_1 + 3/2 P_0.
    basis = make(3, 11)
    made = basis.translate(torch.eye(3, dtype=torch.float64), basis.duration / 2)
    expected = torch.tensor([[1.0, 1.0, 1.5], [0.0, 1.0, 3.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_knots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("elapsed", [0.0, 0.0137, 0.02, 0.2, 0.49])
def test_a_shift_keeps_the_last_control(num_knots, elapsed):
    basis, c = make(num_knots), random_coefficients(num_knots)
    last = basis.evaluate(basis.shift(c, elapsed))[-1]
    torch.testing.assert_close(last, basis.evaluate(c)[-1], rtol=0, atol=1e-11)


def test_the_shift_of_a_straight_line_agrees_with_hand_arithmetic():
    # Two modes: the slope obeys dc1/ds = -c1 and c0 + c1, the end, stays.
    basis, decay = make(2), 1 - 2 * 0.1 / 0.5 + 0.08 - 0.064 / 6 + 0.0256 / 24  # of exp(-0.4)
    shifted = basis.shift(torch.tensor([[0.2], [0.6]], dtype=torch.float64), 0.1)
    assert shifted[:, 0].tolist() == pytest.approx([0.8 - 0.6 * decay, 0.6 * decay], abs=1e-4)


@pytest.mark.parametrize("num_knots", [2, 4, 6, 8])
def test_two_shifts_are_the_shift_by_their_sum(num_knots):
    basis, c = make(num_knots), random_coefficients(num_knots)
    twice = basis.shift(basis.shift(c, 0.03), 0.11)
    torch.testing.assert_close(twice, basis.shift(c, 0.14), rtol=0, atol=1e-11)


@pytest.mark.parametrize("elapsed", [0.02, 0.1, 0.25])
def test_a_shift_stays_near_the_moved_plan_with_a_held_tail(elapsed):
    basis, c = make(5, 201), random_coefficients(5, nu=50) / torch.arange(1.0, 6.0).double()[:, None]
    time = torch.linspace(0, basis.duration, 201, dtype=torch.float64)
    held = polynomial(c, (time + elapsed).clamp(max=basis.duration), basis.duration)
    error = (basis.evaluate(basis.shift(c, elapsed)) - held).square().mean().sqrt()
    unmoved = (basis.evaluate(c) - held).square().mean().sqrt()
    assert error < 0.12 * held.square().mean().sqrt()
    assert error < 0.8 * unmoved


def test_a_shift_by_nothing_changes_nothing_and_an_old_plan_becomes_its_last_control():
    basis, c = make(), random_coefficients(5)
    torch.testing.assert_close(basis.shift(c, 0.0), c, rtol=0, atol=1e-12)
    for elapsed in (0.5, 7.0):
        expected = basis.hold(basis.evaluate(c)[-1])
        torch.testing.assert_close(basis.shift(c, elapsed), expected, rtol=0, atol=1e-11)


def test_a_shift_errs_less_the_shorter_it_is():
    basis, c = make(), random_coefficients(5)
    errors = [float((basis.shift(c, e) - basis.translate(c, e)).abs().max()) for e in (0.04, 0.02, 0.01)]
    assert errors[0] > 1.3 * errors[1] > 2 * errors[2] > 0


@pytest.mark.parametrize("num_knots", [2, 4, 6, 8, 12])
def test_repeated_shifts_stay_bounded_where_translations_do_not(num_knots):
    basis = make(num_knots)
    shifted = translated = torch.eye(num_knots, dtype=torch.float64)
    for _ in range(1000):
        shifted, translated = basis.shift(shifted, DT), basis.translate(translated, DT)
        assert shifted.abs().max() < 1.2
    assert translated.abs().max() > 10
    torch.testing.assert_close(shifted[0], torch.ones(num_knots).double(), rtol=0, atol=1e-9)


def test_limits_are_the_largest_coefficients_of_a_control_within_one():
    # Mode 1: 3/2 * 1. Mode 2: 5/2 * integral of |P_2| with roots at 1/sqrt 3, which is 8 / (6 sqrt 3).
    limits = make(3).limits
    assert limits.tolist() == pytest.approx([1.0, 1.5, 5 / 2 * 8 / (6 * 3**0.5)], abs=1e-12)
    fine = torch.linspace(-1, 1, 200001, dtype=torch.float64)
    cubic = (5 * fine**3 - 3 * fine) / 2
    assert float(make(4).limits[3]) == pytest.approx(3.5 * float(torch.trapezoid(cubic.abs(), fine)), abs=1e-6)


def test_samples_all_begin_with_the_first_control_and_stay_within_the_limits():
    basis = make(5)
    nominal = basis.clip(random_coefficients(5) * 0.5)
    noise = torch.randn(500, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for sigma in (torch.full((5, 1), 0.7), torch.linspace(2.0, 0.1, 15).reshape(5, 3)):
        samples = basis.disturb(nominal, sigma.double(), noise)
        first = basis.first(samples)
        torch.testing.assert_close(first, basis.first(nominal).expand(500, 3), rtol=0, atol=1e-12)
        assert (samples.abs() <= basis.limits[:, None] + 1e-12).all()
        assert (samples.std(0) > 0.01).all()


def test_small_noise_has_the_covariance_of_the_condition():
    # Sigma - Sigma a a' Sigma / (a' Sigma a) with a = (1, -1, 1).
    basis, sigma = make(3), torch.tensor([0.03, 0.02, 0.01], dtype=torch.float64)
    noise = torch.randn(200_000, 3, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples = basis.disturb(torch.zeros(3, 1, dtype=torch.float64), sigma[:, None], noise)[..., 0]
    sign = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    full = torch.diag(sigma**2)
    expected = full - torch.outer(full @ sign, full @ sign) / (sign @ full @ sign)
    torch.testing.assert_close(torch.cov(samples.T), expected, rtol=0, atol=4e-6)


def test_every_kind_comes_from_one_function():
    assert isinstance(control_basis("legendre", num_knots=4, horizon=9, dt=DT), LegendreBasis)
    for kind in ("zero", "linear", "quadratic", "cubic"):
        assert control_basis(kind, num_knots=4, horizon=9, dt=DT) == ControlSpline(
            kind=kind, num_knots=4, horizon=9, dt=DT
        )


@pytest.mark.parametrize("kind", ["zero", "linear", "quadratic", "cubic", "legendre"])
def test_a_held_control_is_that_control_at_all_times_and_after_every_shift(kind):
    basis = control_basis(kind, num_knots=5, horizon=21, dt=DT)
    control = torch.tensor([0.3, -0.7], dtype=torch.float64)
    knots = basis.hold(control)
    for plan in (knots, basis.shift(knots, 0.013), basis.shift(knots, 3.0)):
        controls = basis.evaluate(plan)
        torch.testing.assert_close(controls, control.expand(21, 2), rtol=0, atol=1e-11)
    torch.testing.assert_close(basis.first(knots), control, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_knots": 0}, "num_knots is 0; expected 1 to horizon = 26"),
        ({"num_knots": 27}, "num_knots is 27; expected 1 to horizon = 26"),
        ({"horizon": 1}, "horizon is 1"),
        ({"dt": 0.0}, "dt is 0.0"),
        ({"dt": float("inf")}, "dt is inf"),
    ],
)
def test_an_impossible_basis_is_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as refused:
        LegendreBasis(**({"num_knots": 5, "horizon": 26, "dt": DT} | change))
    assert "\n" not in str(refused.value)


def test_wrong_coefficients_unknown_kinds_and_negative_times_are_refused():
    basis = make()
    with pytest.raises(ValueError, match=r"knots has shape \(4, 2\)"):
        basis.evaluate(torch.zeros(4, 2))
    for move in (basis.shift, basis.translate):
        with pytest.raises(ValueError, match=r"elapsed is -0\.1"):
            move(torch.zeros(5, 2), -0.1)
    with pytest.raises(ValueError, match="kind is 'sinc'; expected one of zero, linear, quadratic, cubic, legendre"):
        control_basis("sinc", num_knots=4, horizon=9, dt=DT)
