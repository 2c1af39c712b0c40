"""Risk over perturbed models: hand arithmetic, the variational definition, and what it does to a plan."""

import itertools
import math

import pytest
import torch

from nerd_mpc.dial import DialConfig, PlanState, initial_plan, plan
from nerd_mpc.risk import Risk, over_models, under_risk

NAN, INF = math.nan, math.inf
FOUR_MODELS = torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 8.0], [6.0, -4.0]], dtype=torch.float64)


def test_the_three_measures_agree_with_hand_arithmetic():
    assert Risk(measure="mean")(FOUR_MODELS).tolist() == [3.0, 1.0]
    assert Risk(measure="worst")(FOUR_MODELS).tolist() == [1.0, -4.0]
    assert Risk(measure="cvar", tail=0.5)(FOUR_MODELS).tolist() == [1.5, -2.0]
    # 0.6 of four models: two whole ones and 0.4 of the third, over 2.4.
    third = Risk(measure="cvar", tail=0.6)(FOUR_MODELS)
    assert third.tolist() == pytest.approx([(1 + 2 + 0.4 * 3) / 2.4, (-4 + 0 + 0.4 * 0) / 2.4], abs=1e-12)


def test_cvar_runs_from_the_worst_to_the_mean():
    scores = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for tail in (1e-3, 0.1, 1 / 7):
        torch.testing.assert_close(Risk(measure="cvar", tail=tail)(scores), scores.amin(0))
    torch.testing.assert_close(Risk(measure="cvar", tail=1.0)(scores), scores.mean(0))
    ladder = [Risk(measure="cvar", tail=tail)(scores) for tail in (0.1, 0.3, 0.5, 0.8, 1.0)]
    assert all((later >= earlier).all() for earlier, later in itertools.pairwise(ladder))


@pytest.mark.parametrize("tail", [0.1, 0.25, 0.4, 0.77, 1.0])
def test_cvar_is_the_maximum_of_its_variational_form(tail):
    # max over z of z - E[(z - s)+] / tail, attained at one of the scores.
    scores = torch.randn(9, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shortfall = (scores[:, None] - scores[None]).clamp(min=0.0).mean(1)  # (z, N)
    expected = (scores - shortfall / tail).amax(0)
    torch.testing.assert_close(Risk(measure="cvar", tail=tail)(scores), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("measure", ["mean", "worst", "cvar"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e31, -1e31])
def test_a_sample_that_diverges_in_one_model_is_rejected_and_the_others_are_not(measure, bad):
    scores = FOUR_MODELS.clone()
    scores[2, 0] = bad
    reduced = Risk(measure=measure, tail=0.25)(scores)
    assert math.isnan(reduced[0])
    assert reduced[1] == Risk(measure=measure, tail=0.25)(FOUR_MODELS)[1]


@pytest.mark.parametrize("measure", ["mean", "worst", "cvar"])
def test_the_order_of_the_models_does_not_matter_and_one_model_is_itself(measure):
    risk = Risk(measure=measure, tail=0.3)
    torch.testing.assert_close(risk(FOUR_MODELS[[2, 0, 3, 1]]), risk(FOUR_MODELS))
    assert torch.equal(risk(FOUR_MODELS[:1]), FOUR_MODELS[0])


def pushed(push):
    """A control in a wind of unknown strength; overshooting the goal 0.5 costs ten times more."""

    def rollout(controls):
        miss = controls[..., 0] + push - 0.5
        return -torch.where(miss > 0.0, 10.0 * miss, -miss)

    return rollout


def test_a_cautious_plan_keeps_its_distance_and_a_mean_plan_goes_by_the_odds():
    pushes = [0.0, 0.0, 0.0, 0.0, 0.2]
    config = DialConfig(num_samples=256, horizon=4, num_knots=2, iterations=6, spline="linear")
    last = {}
    for name, risk in {
        "mean": Risk(),
        "worst": Risk(measure="worst"),
        "cvar": Risk(measure="cvar", tail=0.2),
        "wide cvar": Risk(measure="cvar", tail=1.0),
    }.items():
        rollout = under_risk(over_models([pushed(push) for push in pushes]), risk)
        start = PlanState(torch.tensor([[0.3], [0.0]]))
        noise = torch.Generator().manual_seed(0)
        last[name] = float(plan(start, rollout, config=config, noise=noise, iterations=12)[0].knots[1])
    # The worst case balances -(0.5 - u) in still air with -10 (u - 0.3) in the wind: u = 0.3182 at the last step.
    assert last["worst"] == last["cvar"]
    assert last["wide cvar"] == pytest.approx(last["mean"], abs=1e-3)
    assert last["worst"] == pytest.approx(0.318, abs=0.03)


def test_models_may_be_scored_in_one_batch_and_with_or_without_time():
    pushes = torch.tensor([0.0, 0.1, 0.3])
    one_by_one = over_models([pushed(float(push)) for push in pushes])

    def batched(controls):  # (M, N, T)
        return pushed(pushes[:, None, None])(controls[None])

    config = DialConfig(num_samples=32, horizon=6, num_knots=3, iterations=2)
    risk = Risk(measure="cvar", tail=0.5)
    plans = [
        plan(initial_plan(config, 1), under_risk(r, risk), config=config, noise=torch.Generator().manual_seed(0))[0]
        for r in (one_by_one, batched, lambda u: batched(u).mean(-1))
    ]
    torch.testing.assert_close(plans[0].knots, plans[1].knots, rtol=0, atol=1e-5)
    torch.testing.assert_close(plans[0].knots, plans[2].knots, rtol=0, atol=1e-5)


def test_one_bad_step_in_one_model_rejects_the_sample_even_if_its_mean_is_finite():
    def rollout(controls):
        reward = torch.zeros(2, *controls.shape[:2])
        reward[1, 0, 1], reward[1, 0, 2] = 2e30, -2e30
        return reward

    reduced = under_risk(rollout, Risk())(torch.zeros(3, 4, 1))
    assert reduced.isnan().tolist() == [True, False, False]


def test_impossible_measures_and_shapes_are_refused_in_one_line():
    with pytest.raises(ValueError, match="measure is 'median'; expected one of mean, worst, cvar"):
        Risk(measure="median")
    for tail in (0.0, -0.1, 1.5, NAN):
        with pytest.raises(ValueError, match="tail is"):
            Risk(measure="cvar", tail=tail)
    with pytest.raises(ValueError, match=r"scores has shape \(3,\); expected \(models >= 1, samples\)"):
        Risk()(torch.zeros(3))
    with pytest.raises(ValueError, match=r"scores has shape \(0, 3\)"):
        Risk()(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="rollouts is empty"):
        over_models([])
    with pytest.raises(ValueError, match=r"rollout returned shape \(5,\)"):
        under_risk(lambda u: torch.zeros(5), Risk())(torch.zeros(5, 4, 1))
    with pytest.raises(ValueError, match=r"rollout returned shape \(4, 5\)"):
        over_models([lambda u: torch.zeros(4, 5)])(torch.zeros(5, 4, 1))
