"""The DIAL update: weights by hand, invariances, and samples that must not count."""

import math

import pytest
import torch

from nerd_mpc.dial import DialConfig, PlanState, plan, sample_weights

NAN, INF = math.nan, math.inf


def config(**change):
    defaults = {
        "num_samples": 3,
        "horizon": 3,
        "num_knots": 3,
        "iterations": 1,
        "temperature": 1.0,
        "spline": "linear",
    }
    return DialConfig(**(defaults | change))


def plan_with(reward, *, nominal, noise, **change):
    def rollout(controls):
        return reward

    settings = config(num_samples=len(reward), **change)
    return plan(PlanState(nominal), rollout, config=settings, noise=noise)


def test_weights_of_three_samples_agree_with_hand_arithmetic():
    # std of 1, 2, 3 is sqrt(2/3): logits -2, -1, 0 over it; exponentials 0.086336, 0.293834, 1.
    weights, scores, accepted = sample_weights(torch.tensor([1.0, 2.0, 3.0]), 1.0)
    expected = torch.tensor([0.062555, 0.212896, 0.724549], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)
    assert weights.dtype == torch.float64
    assert scores.tolist() == [1.0, 2.0, 3.0]
    assert accepted.all()


def test_plan_moves_to_the_hand_computed_weighted_mean_of_the_samples():
    nominal = torch.tensor([[0.1], [0.2], [-0.3]])
    noise = torch.zeros(1, 3, 3, 1)
    noise[0, 0, :, 0] = torch.tensor([0.5, 0.4, -0.2])
    noise[0, 1, :, 0] = torch.tensor([-0.5, -0.4, 3.0])  # knot 2 is clipped to 1
    noise[0, 2] = 7.0  # the nominal: ignored
    state, info = plan_with(torch.tensor([1.0, 2.0, 3.0]), nominal=nominal, noise=noise)
    w = (0.062555, 0.212896, 0.724549)
    expected = [
        0.1,
        w[0] * 0.6 + w[1] * -0.2 + w[2] * 0.2,
        w[0] * -0.5 + w[1] * 1.0 + w[2] * -0.3,
    ]
    assert state.knots[:, 0].tolist() == pytest.approx(expected, abs=2e-6)
    assert info.effective_samples[0] == pytest.approx(1 / sum(x * x for x in w), abs=1e-4)
    assert (info.best_score, info.nominal_score) == (3.0, 3.0)
    assert info.score_mean[0] == pytest.approx(2.0)
    assert info.score_std[0] == pytest.approx(math.sqrt(2 / 3))
    assert (info.rejected, info.iterations) == (0, 1)


def test_score_is_the_mean_of_the_reward_over_time():
    reward = torch.tensor([[1.0, 3.0], [0.0, 2.0], [5.0, 5.0]])
    _, scores, _ = sample_weights(reward, 1.0)
    assert scores.tolist() == [2.0, 1.0, 5.0]


@pytest.mark.parametrize("scale", [1e6, 1e-6, 3.0])
@pytest.mark.parametrize("offset", [0.0, 100.0, -1e4])
def test_weights_do_not_depend_on_scale_or_offset_of_the_reward(scale, offset):
    generator = torch.Generator().manual_seed(3)
    reward = torch.randn(64, 5, dtype=torch.float64, generator=generator)
    weights, _, _ = sample_weights(reward, 0.05)
    changed, _, _ = sample_weights(scale * (reward + offset), 0.05)
    torch.testing.assert_close(changed, weights, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_costs_a_million_times_larger_or_smaller_give_the_same_plan(scale):
    def rollout(factor):
        return lambda u: -factor * (u - 0.3).square().sum(-1)

    settings = config(num_samples=32, iterations=3, temperature=0.05)
    start = PlanState(torch.zeros(3, 2))
    plans = [
        plan(start, rollout(f), config=settings, noise=torch.Generator().manual_seed(0))[0].knots for f in (1.0, scale)
    ]
    torch.testing.assert_close(plans[1], plans[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -1.7, 3e12])
def test_equal_scores_leave_the_plan_bit_equal(value, dtype):
    nominal = torch.tensor([[0.1], [0.2], [-0.3]])
    noise = torch.randn(1, 7, 3, 1, generator=torch.Generator().manual_seed(0))
    reward = torch.full((7, 3), value, dtype=dtype)
    state, info = plan_with(reward, nominal=nominal, noise=noise)
    assert torch.equal(state.knots, nominal)
    assert info.effective_samples == (1.0,)


def test_scores_that_differ_by_rounding_only_count_as_equal():
    reward = torch.tensor([-1.7, -1.7 * (1 + 2e-7), -1.7])
    weights, _, _ = sample_weights(reward, 0.05)
    assert weights.tolist() == [0.0, 0.0, 1.0]


def test_small_but_real_differences_on_a_large_offset_are_still_told_apart():
    weights, _, _ = sample_weights(torch.tensor([10.001, 10.0, 10.0]), 0.05)
    assert weights[0] > 0.999


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e31, -1e31])
@pytest.mark.parametrize("row", [0, 3])
def test_a_bad_sample_gets_weight_zero_and_changes_nothing_for_the_others(bad, row):
    reward = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    others = [k for k in range(9) if k != row]
    expected, _, _ = sample_weights(reward[others], 0.5)
    reward[row, 2] = bad
    weights, _, accepted = sample_weights(reward, 0.5)
    assert weights[row] == 0.0
    assert accepted.tolist() == [k != row for k in range(9)]
    torch.testing.assert_close(weights[others], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_when_every_sample_is_bad_the_plan_stays(bad):
    nominal = torch.tensor([[0.1], [0.2], [-0.3]])
    noise = torch.randn(1, 4, 3, 1, generator=torch.Generator().manual_seed(0))
    state, info = plan_with(torch.full((4, 3), bad), nominal=nominal, noise=noise)
    assert torch.equal(state.knots, nominal)
    assert info.rejected == 4
    assert math.isnan(info.best_score)
    assert math.isnan(info.score_mean[0])


def test_a_bad_nominal_leaves_the_choice_to_the_others():
    weights, _, _ = sample_weights(torch.tensor([1.0, 2.0, NAN]), 0.05)
    assert weights[2] == 0.0
    assert weights[1] > 0.999
    even, _, _ = sample_weights(torch.tensor([2.0, 2.0, NAN]), 0.05)
    assert even.tolist() == [0.5, 0.5, 0.0]
    only, _, _ = sample_weights(torch.tensor([NAN, 2.0, NAN]), 0.05)
    assert only.tolist() == [0.0, 1.0, 0.0]


def test_a_plan_stays_finite_when_most_samples_diverge():
    def rollout(controls):
        reward = -(controls - 0.1).square().sum(-1)
        reward[controls[:, -1, 0].abs() > 0.2] = NAN
        return reward

    settings = config(num_samples=64, iterations=3, temperature=0.05)
    start = PlanState(torch.zeros(3, 1))
    state, info = plan(start, rollout, config=settings, noise=torch.Generator().manual_seed(0))
    assert torch.isfinite(state.knots).all()
    assert 0 < info.rejected < 3 * 64
    assert math.isfinite(info.best_score)


def test_a_very_low_temperature_does_not_overflow():
    weights, _, _ = sample_weights(torch.tensor([0.0, 1.0, 2.0]), 1e-12)
    assert weights.tolist() == [0.0, 0.0, 1.0]
