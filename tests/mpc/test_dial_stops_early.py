"""Deadline and convergence: refinement ends early with the best plan so far."""

import math

import pytest
import torch

from nerd_mpc.cem import CemConfig
from nerd_mpc.dial import DialConfig, PlanState, draw_noise, initial_plan, plan
from nerd_mpc.mppi import MppiConfig
from nerd_mpc.predictive_sampling import PredictiveSamplingConfig

CONFIGS = [DialConfig, MppiConfig, CemConfig, PredictiveSamplingConfig]
SHORT = {"num_samples": 32, "horizon": 9, "num_knots": 4, "iterations": 6}


def towards(goal):
    return lambda controls: -(controls - goal).square().sum(-1)


def stop_after(iterations):
    """A deadline that passes once so many iterations are done."""
    asked = iter([False] * iterations)
    return lambda: next(asked, True)


def deteriorating(last_good):
    """Scores in which every plan is worth less from one iteration to the next, after ``last_good``."""
    calls = []

    def rollout(controls):
        calls.append(None)
        return towards(0.3)(controls) - 100.0 * max(0, len(calls) - last_good)

    return rollout


@pytest.mark.parametrize("config_class", CONFIGS)
@pytest.mark.parametrize("done", [1, 2, 5])
def test_a_deadline_returns_the_plan_refined_so_far(config_class, done):
    config = config_class(**SHORT)
    noise = draw_noise(config, torch.Generator().manual_seed(0), 6, 2)
    start = initial_plan(config, 2)
    state, info = plan(start, towards(0.3), config=config, noise=noise, deadline=stop_after(done))
    expected, _ = plan(start, towards(0.3), config=config, noise=noise, iterations=done)
    if config_class is DialConfig or config_class is PredictiveSamplingConfig or done == 1:
        assert torch.equal(state.knots, expected.knots)  # scores rose: the newest is the best
    assert info.iterations == len(info.effective_samples) == done
    assert info.nominal_score >= info.nominal[0]


@pytest.mark.parametrize("config_class", CONFIGS)
def test_a_plan_that_turned_out_worse_is_not_returned_at_the_deadline(config_class):
    config = config_class(**SHORT)
    noise = draw_noise(config, torch.Generator().manual_seed(0), 6, 2)
    start = PlanState(torch.full((4, 2), 0.1))
    state, info = plan(start, deteriorating(3), config=config, noise=noise, deadline=stop_after(5))
    best = info.nominal.index(max(info.nominal))
    assert best < 3
    expected, _ = plan(start, towards(0.3), config=config, noise=noise, iterations=best) if best else (start, None)
    torch.testing.assert_close(state.knots, expected.knots, rtol=0, atol=0)
    assert info.iterations == 5


def test_a_nominal_that_was_rejected_is_not_returned_at_the_deadline():
    config = MppiConfig(**SHORT)
    calls = []

    def rollout(controls):
        calls.append(None)
        reward = towards(0.3)(controls)
        if len(calls) == 2:
            reward[-1] = math.nan
        return reward

    start = PlanState(torch.full((4, 1), 0.1))
    state, _ = plan(start, rollout, config=config, noise=torch.Generator().manual_seed(0), deadline=stop_after(2))
    assert torch.equal(state.knots, start.knots)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_a_converged_plan_stops_and_says_after_how_many_iterations(config_class):
    # The start is the optimum, so nothing can be gained.
    config = config_class(**SHORT, min_gain=0.01)
    start = PlanState(torch.full((4, 1), 0.3))
    state, info = plan(start, towards(0.3), config=config, noise=torch.Generator().manual_seed(0))
    assert info.iterations == 2
    assert torch.equal(state.knots, start.knots)


def test_a_plan_that_still_gains_goes_on():
    config = PredictiveSamplingConfig(**SHORT, min_gain=0.0, noise_scale=0.1)
    start = PlanState(torch.full((4, 1), -0.9))
    _, info = plan(start, towards(0.9), config=config, noise=torch.Generator().manual_seed(0))
    assert info.iterations == 6
    assert all(later > earlier for earlier, later in zip(info.nominal, info.nominal[1:], strict=False))


def test_without_a_least_gain_every_iteration_is_run():
    config = DialConfig(**SHORT)
    _, info = plan(
        PlanState(torch.full((4, 1), 0.3)), towards(0.3), config=config, noise=torch.Generator().manual_seed(0)
    )
    assert info.iterations == 6


def test_the_gain_is_counted_in_standard_deviations_of_the_first_scores():
    counts = []
    for factor in (1e-3, 1.0, 1e5):
        config = DialConfig(**SHORT, min_gain=0.05)
        _, info = plan(
            initial_plan(config, 1),
            lambda controls, factor=factor: factor * towards(0.3)(controls) + 7 * factor,
            config=config,
            noise=torch.Generator().manual_seed(1),
        )
        counts.append(info.iterations)
        gains = [b - a for a, b in zip(info.nominal, info.nominal[1:], strict=False)]
        assert all(gain > 0.05 * info.score_std[0] for gain in gains[:-1])
        assert gains[-1] <= 0.05 * info.score_std[0] or info.iterations == 6
    assert counts[0] == counts[1] == counts[2] < 6


@pytest.mark.parametrize("config_class", CONFIGS)
def test_the_best_single_sample_comes_with_its_score(config_class):
    config = config_class(**SHORT)
    _, info = plan(initial_plan(config, 2), towards(0.3), config=config, noise=torch.Generator().manual_seed(0))
    controls = config.control_spline.evaluate(info.best_knots[None]).clamp(-1, 1)
    assert float(towards(0.3)(controls).mean()) == pytest.approx(info.best_score, rel=1e-5)
    assert info.best_score == max(info.best)


def test_without_an_accepted_sample_the_best_one_is_the_plan_that_was_given():
    config = DialConfig(**SHORT)
    start = PlanState(torch.full((4, 1), 0.2))
    _, info = plan(
        start, lambda u: torch.full(u.shape[:2], math.nan), config=config, noise=torch.Generator().manual_seed(0)
    )
    assert torch.equal(info.best_knots, start.knots)
