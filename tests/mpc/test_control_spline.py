"""Control splines: what they reproduce, hand-computed values, and the exact time shift."""

import pytest
import torch

from nerd_mpc.spline import ControlSpline

KINDS = ("zero", "linear", "quadratic", "cubic")


def make(kind, num_knots=6, horizon=26, dt=0.02):
    return ControlSpline(kind=kind, num_knots=num_knots, horizon=horizon, dt=dt)


def control_times(spline):
    return torch.arange(spline.horizon, dtype=torch.float64) * spline.dt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_knots", "horizon"), [(3, 3), (5, 17), (6, 26), (6, 21), (12, 40)])
def test_knots_are_a_partition_of_unity_and_constants_come_back(kind, num_knots, horizon):
    spline = make(kind, num_knots, horizon)
    assert spline.matrix.shape == (horizon, num_knots)
    assert spline.matrix.dtype == torch.float32
    torch.testing.assert_close(spline.matrix.sum(1), torch.ones(horizon), rtol=0, atol=3e-7)
    knots = torch.full((num_knots, 2), 0.37, dtype=torch.float64)
    constant = torch.full((horizon, 2), 0.37, dtype=torch.float64)
    torch.testing.assert_close(spline.evaluate(knots), constant, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "degree"), [("zero", 0), ("linear", 1), ("quadratic", 2), ("cubic", 1)])
@pytest.mark.parametrize(("num_knots", "horizon"), [(3, 9), (5, 17), (6, 26), (7, 25), (12, 40)])
def test_each_kind_reproduces_the_polynomials_it_promises(kind, degree, num_knots, horizon):
    spline = make(kind, num_knots, horizon)
    for power in range(degree + 1):
        expected = (control_times(spline) - 0.11)[:, None] ** power
        knots = (spline.knot_times - 0.11)[:, None] ** power
        torch.testing.assert_close(spline.evaluate(knots), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_controls_at_knot_times_are_the_knots(kind):
    spline = make(kind)
    knots = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(spline.evaluate(knots)[:, ::5], knots, rtol=0, atol=1e-12)
    torch.testing.assert_close(spline.knot_times, 0.1 * torch.arange(6.0, dtype=torch.float64))


def test_quadratic_spline_of_four_knots_agrees_with_hand_arithmetic():
    # One break, at 1.5. Zero at 0, 1 and 2, one at 3: a s(s-1) + b (s-1.5)^2 beyond the break with
    # 2a + b/4 = 0 and 6a + 9b/4 = 1, hence a = -1/12 and b = 2/3.
    controls = make("quadratic", 4, 7).evaluate(torch.tensor([[0.0], [0.0], [0.0], [1.0]]))
    expected = torch.tensor([0.0, 1 / 48, 0.0, -1 / 16, 0.0, 17 / 48, 1.0])
    torch.testing.assert_close(controls[:, 0], expected, rtol=0, atol=1e-6)


def test_natural_cubic_spline_of_three_knots_agrees_with_hand_arithmetic():
    # Second derivative at the middle knot -3, at the ends 0: s - (s^3 - s)/2 on the first interval.
    controls = make("cubic", 3, 5).evaluate(torch.tensor([[0.0], [1.0], [0.0]]))
    expected = torch.tensor([0.0, 11 / 16, 1.0, 11 / 16, 0.0])
    torch.testing.assert_close(controls[:, 0], expected, rtol=0, atol=1e-6)


def test_zero_order_hold_keeps_each_knot_until_the_next():
    controls = make("zero", 3, 7).evaluate(torch.tensor([[1.0], [2.0], [3.0]]))
    assert controls[:, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1, 3, 5, 12, 15, 24, 25, 26, 400])
def test_shift_gives_the_controls_at_the_later_times_and_holds_the_tail(kind, steps):
    spline = make(kind)
    knots = torch.randn(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    controls = spline.evaluate(knots)
    # Knots lie on every fifth control, so a shift by whole periods lands on controls.
    later = [min(5 * k + steps, 25) for k in range(6)]
    torch.testing.assert_close(spline.shift(knots, steps * 0.02), controls[later], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "degree"), [("linear", 1), ("quadratic", 2), ("cubic", 1)])
def test_shifted_polynomial_is_the_polynomial_at_later_times_inside_the_horizon(kind, degree):
    spline, elapsed = make(kind), 0.0137
    knots = (spline.knot_times[:, None] - 0.2) ** degree
    shifted = spline.shift(knots, elapsed)
    expected = (spline.knot_times[:-1, None] + elapsed - 0.2) ** degree
    torch.testing.assert_close(shifted[:-1], expected, rtol=0, atol=1e-12)
    assert float(shifted[-1]) == pytest.approx(float(knots[-1]), abs=1e-12)


def test_shifting_by_one_interval_moves_every_knot_one_place():
    knots = torch.arange(12.0).reshape(6, 2)
    for kind in KINDS:
        shifted = make(kind).shift(knots, 0.1)
        torch.testing.assert_close(shifted, knots[[1, 2, 3, 4, 5, 5]], rtol=0, atol=1e-5)


def test_a_gradient_flows_to_the_knots_even_after_use_in_inference_mode():
    spline = make("quadratic", 5, 33)
    with torch.inference_mode():
        spline.evaluate(torch.zeros(5, 1))
    knots = torch.zeros(5, 1, requires_grad=True)
    spline.evaluate(knots).sum().backward()
    torch.testing.assert_close(knots.grad, spline.matrix.sum(0)[:, None])


def test_writing_into_the_matrix_does_not_change_the_spline():
    spline = make("linear")
    spline.matrix.zero_()
    assert float(spline.evaluate(torch.ones(6, 1)).min()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kind": "sinc"}, "kind"),
        ({"kind": "quadratic", "num_knots": 2}, "num_knots"),
        ({"num_knots": 30}, "num_knots"),
        ({"dt": 0.0}, "dt"),
        ({"dt": float("nan")}, "dt"),
    ],
)
def test_an_impossible_spline_is_refused_by_name(change, word):
    with pytest.raises(ValueError, match=word):
        make(**({"kind": "linear"} | change))


def test_wrong_knots_and_negative_time_are_refused():
    spline = make("linear")
    with pytest.raises(ValueError, match="knots has shape"):
        spline.evaluate(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="elapsed"):
        spline.shift(torch.zeros(6, 2), -0.01)
