"""MPPI, CEM and predictive sampling on the planner's one loop: by hand, to the optimum, on bad scores."""

import math

import pytest
import torch

from nerd_mpc.cem import CemConfig
from nerd_mpc.dial import (
    DialConfig,
    PlannerConfig,
    PlanState,
    draw_noise,
    first_control,
    hold_plan,
    initial_plan,
    plan,
    warm_start,
)
from nerd_mpc.mppi import MppiConfig
from nerd_mpc.predictive_sampling import PredictiveSamplingConfig
from nerd_mpc.weights import best_weight, elite_weights, softmax_weights

NAN, INF = math.nan, math.inf
CONFIGS = {
    "dial": DialConfig,
    "mppi": MppiConfig,
    "cem": CemConfig,
    "predictive sampling": PredictiveSamplingConfig,
}
DT, FORCE, EFFORT = 0.1, 2.0, 0.02
BASES = ["zero", "linear", "quadratic", "cubic", "legendre"]


def residuals(controls, position, velocity):
    """What a unit mass should bring to zero on its way to rest at the origin: (N, T, 1) to (N, T, 3)."""
    p = torch.full_like(controls[:, 0, 0], position)
    v = torch.full_like(p, velocity)
    out = []
    for t in range(controls.shape[1]):
        u = controls[:, t, 0]
        p, v = p + DT * v, v + DT * FORCE * u
        out.append(torch.stack([p, 0.1**0.5 * v, EFFORT**0.5 * u], -1))
    return torch.stack(out, dim=1)


def double_integrator(position, velocity):
    return lambda controls: -residuals(controls, position, velocity).square().sum(-1)


def best_plan(config, position):
    """Optimal knots and their score by linear least squares, among plans that begin with control zero."""
    basis = config.control_spline
    first = basis.first(torch.eye(config.num_knots, dtype=torch.float64))[None]  # (1, K)
    free = torch.linalg.svd(first).Vh[1:].T  # what leaves the first control alone, (K, K - 1)
    offset = residuals(torch.zeros(1, config.horizon, 1, dtype=torch.float64), position, 0.0)
    jacobian = (residuals(basis.evaluate(free.T[:, :, None]), position, 0.0) - offset).flatten(1).T
    knots = free @ torch.linalg.lstsq(jacobian, -offset.reshape(-1, 1)).solution
    return knots, score(config, knots, double_integrator(position, 0.0))


def score(config, knots, rollout):
    return float(rollout(config.control_spline.evaluate(knots[None])).mean())


def two_samples(config_class, reward, **change):
    """One iteration with the nominal at (0.1, 0.2, -0.3) and one sample 0.4, -0.2 away in knots 1 and 2."""
    settings = {"num_samples": 2, "horizon": 3, "num_knots": 3, "iterations": 1, "noise_scale": 0.5, "spline": "linear"}
    config = config_class(**(settings | change))
    noise = torch.zeros(1, 2, 3, 1)
    noise[0, 0, :, 0] = torch.tensor([9.0, 0.8, -0.4])  # times 0.5; knot 0 is pinned
    nominal = PlanState(torch.tensor([[0.1], [0.2], [-0.3]]))
    return plan(nominal, lambda controls: torch.tensor(reward), config=config, noise=noise)


def test_mppi_moves_by_the_hand_computed_softmax_of_two_samples():
    # Two scores stand two standard deviations apart: the weights are 1 and exp(-2 / temperature).
    state, info = two_samples(MppiConfig, [1.0, 0.0], temperature=2.0)
    w = 1 / (1 + math.exp(-1.0))
    assert state.knots[:, 0].tolist() == pytest.approx([0.1, 0.2 + 0.4 * w, -0.3 - 0.2 * w], abs=1e-6)
    assert info.effective_samples[0] == pytest.approx(1 / (w * w + (1 - w) * (1 - w)), abs=1e-6)


def test_predictive_sampling_takes_the_better_of_two_samples():
    state, info = two_samples(PredictiveSamplingConfig, [1.0, 0.0])
    assert state.knots[:, 0].tolist() == pytest.approx([0.1, 0.6, -0.5], abs=1e-6)
    assert info.effective_samples == (1.0,)
    state, _ = two_samples(PredictiveSamplingConfig, [0.0, 1.0])
    assert torch.equal(state.knots, torch.tensor([[0.1], [0.2], [-0.3]]))


def test_cem_moves_to_the_mean_of_the_elites():
    state, info = two_samples(CemConfig, [1.0, 0.0], num_elites=2)
    assert state.knots[:, 0].tolist() == pytest.approx([0.1, 0.4, -0.4], abs=1e-6)
    assert info.effective_samples[0] == pytest.approx(2.0)


def test_cem_draws_next_with_the_elites_spread_but_never_below_the_floor():
    config = CemConfig(num_samples=3, horizon=3, num_knots=3, num_elites=2, noise_floor=0.1, spline="linear")
    samples = torch.tensor([[0.0, 0.4, 0.2], [0.0, 0.2, 0.2], [0.0, -0.9, 0.9]])[:, :, None]
    weights = config.weigh(torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64))
    assert weights.tolist() == [0.5, 0.5, 0.0]
    spread = config.next_spread(torch.full((3, 1), 0.5), samples, weights)
    # Half the distance of two elites: 0, 0.1 and 0 (floor 0.1).
    torch.testing.assert_close(spread, torch.tensor([[0.1], [0.1], [0.1]]))
    wide = config.next_spread(torch.full((3, 1), 0.5), 3 * samples, weights)
    torch.testing.assert_close(wide, torch.tensor([[0.1], [0.3], [0.1]]))
    nothing_known = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    kept = config.next_spread(torch.full((3, 1), 0.5), samples, nothing_known)
    torch.testing.assert_close(kept, torch.full((3, 1), 0.5))


def test_the_second_iteration_of_cem_is_drawn_with_that_spread():
    config = CemConfig(num_samples=2048, horizon=9, num_knots=3, num_elites=200, iterations=2, spline="linear")
    _, info = plan(
        initial_plan(config, 1),
        lambda u: -(u[:, -1, 0] - 0.4).abs(),  # only the last knot matters
        config=config,
        noise=torch.Generator().manual_seed(0),
        keep_samples=True,
    )
    spread = info.sampled_knots[:-1, :, 0].std(0)
    assert spread[0] == 0.0
    assert float(spread[1]) == pytest.approx(0.45, abs=0.05)  # 0.5, a little less by clipping
    assert float(spread[2]) < 0.1


def test_rules_on_three_standings():
    standing = torch.tensor([-1.0, 0.0, -INF], dtype=torch.float64)
    assert elite_weights(standing, 3).tolist() == [0.5, 0.5, 0.0]
    assert elite_weights(standing, 2).tolist() == [0.5, 0.5, 0.0]
    assert best_weight(standing).tolist() == [0.0, 1.0, 0.0]
    assert best_weight(torch.tensor([0.0, -1.0, 0.0])).tolist() == [0.0, 0.0, 1.0]  # none beats the nominal
    assert softmax_weights(standing, 1.0).tolist() == pytest.approx([0.268941, 0.731059, 0.0], abs=1e-6)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_planner_in_every_basis_approaches_the_least_squares_optimum(name, basis):
    change = {"noise_scale": 0.3} if name == "mppi" else {}
    config = CONFIGS[name](num_samples=256, horizon=26, num_knots=6, dt=0.1, spline=basis, **change)
    rollout = double_integrator(0.4, 0.0)
    optimum_knots, optimum = best_plan(config, 0.4)
    assert config.control_spline.evaluate(optimum_knots).abs().max() < 1.0  # the bounds do not act
    start, generator = initial_plan(config, 1), torch.Generator().manual_seed(0)
    state, info = plan(start, rollout, config=config, noise=generator, iterations=24)
    before, after = score(config, start.knots, rollout), score(config, state.knots, rollout)
    assert before < after <= optimum + 1e-6
    assert optimum - after < 0.05 * (optimum - before)
    assert float(first_control(state, config)) == pytest.approx(0.0, abs=1e-5)
    assert info.iterations == 24


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("basis", ["linear", "quadratic", "cubic", "legendre"])
def test_a_receding_horizon_brings_a_mass_to_rest_in_every_planner_and_basis(name, basis):
    change = {"noise_scale": 0.3} if name == "dial" else {}
    config = CONFIGS[name](num_samples=96, horizon=20, num_knots=5, iterations=2, dt=0.1, spline=basis, **change)
    generator = torch.Generator().manual_seed(1)
    p, v, state = 0.4, 0.0, initial_plan(config, 1)
    for decision in range(50):
        u = float(first_control(state, config))
        p, v = p + 0.1 * v, v + 0.2 * u
        n = config.iterations if decision else config.first_iterations
        state = warm_start(state, config)
        committed = first_control(state, config)
        state, _ = plan(state, double_integrator(p, v), config=config, noise=generator, iterations=n)
        torch.testing.assert_close(first_control(state, config), committed, rtol=0, atol=1e-5)
    assert abs(p) < 0.08
    assert abs(v) < 0.1


def broken(kind):
    def rollout(controls):
        reward = -(controls - 0.3).square().sum(-1)
        if kind == "times a million":
            reward *= 1e6
        elif kind == "all equal":
            reward[:] = -3.7
        elif kind == "one NaN":
            reward[1, 2] = NAN
        elif kind == "all NaN":
            reward[:] = NAN
        elif kind == "one -inf":
            reward[0, 0] = -INF
        elif kind == "nominal NaN":
            reward[-1] = NAN
        elif kind == "all but one overflow":
            reward[1:] = 3e38
        return reward

    return rollout


@pytest.mark.parametrize("basis", ["quadratic", "legendre"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "kind",
    ["times a million", "all equal", "one NaN", "all NaN", "one -inf", "nominal NaN", "all but one overflow"],
)
def test_whatever_the_scores_are_the_plan_is_finite_and_in_range(kind, name, basis):
    config = (
        CONFIGS[name](num_samples=16, horizon=9, num_knots=4, iterations=3, spline=basis)
        if name != "cem"
        else (CemConfig(num_samples=16, horizon=9, num_knots=4, iterations=3, num_elites=4, spline=basis))
    )
    start = hold_plan(config, torch.tensor([0.2, -0.1]))
    state, info = plan(start, broken(kind), config=config, noise=torch.Generator().manual_seed(0))
    assert torch.isfinite(state.knots).all()
    assert config.control_spline.evaluate(info.best_knots).isfinite().all()
    torch.testing.assert_close(first_control(state, config), torch.tensor([0.2, -0.1]), rtol=0, atol=1e-5)
    torch.testing.assert_close(state.knots, config.control_spline.clip(state.knots), rtol=0, atol=0)
    stays = kind in ("all equal", "all NaN")
    assert torch.equal(state.knots, start.knots) == stays
    rejected = {"one NaN": 3, "one -inf": 3, "nominal NaN": 3, "all NaN": 48, "all but one overflow": 45}
    assert info.rejected == rejected.get(kind, 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_costs_a_million_times_larger_give_the_same_plan(name):
    config = CONFIGS[name](num_samples=64, horizon=9, num_knots=4, iterations=3)
    noise = draw_noise(config, torch.Generator().manual_seed(0), 3, 2)

    def knots(factor):
        def rollout(controls):
            return -factor * (controls - 0.3).square().sum(-1)

        return plan(initial_plan(config, 2), rollout, config=config, noise=noise)[0].knots

    torch.testing.assert_close(knots(1e6), knots(1.0), rtol=0, atol=2e-5)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_seed_gives_the_same_plan_and_another_seed_another(name, basis):
    config = CONFIGS[name](num_samples=32, horizon=12, num_knots=4, spline=basis)

    def knots(seed):
        rollout, noise = double_integrator(0.5, 0.2), torch.Generator().manual_seed(seed)
        return plan(initial_plan(config, 1), rollout, config=config, noise=noise)[0].knots

    assert torch.equal(knots(4), knots(4))
    assert not torch.equal(knots(4), knots(5))


def test_mppi_is_dial_without_annealing():
    shared = {"num_samples": 64, "horizon": 12, "num_knots": 4, "iterations": 3, "noise_scale": 0.4, "temperature": 0.1}
    plans = [
        plan(initial_plan(c, 1), double_integrator(0.5, 0.0), config=c, noise=torch.Generator().manual_seed(0))[0].knots
        for c in (MppiConfig(**shared), DialConfig(**shared, anneal_iteration=1.0))
    ]
    assert torch.equal(*plans)


def test_predictive_sampling_never_loses_score_and_returns_its_best_sample():
    config = PredictiveSamplingConfig(num_samples=32, horizon=20, num_knots=5, iterations=8, dt=0.1)
    rollout = double_integrator(0.5, 0.0)
    state, info = plan(initial_plan(config, 1), rollout, config=config, noise=torch.Generator().manual_seed(3))
    assert list(info.best) == sorted(info.best)
    assert list(info.nominal[1:]) == pytest.approx(info.best[:-1], rel=1e-6)
    torch.testing.assert_close(info.best_knots, state.knots, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0; expected an integer >= 2"),
        ({"num_samples": -5}, "num_samples is -5"),
        ({"num_samples": 2.5}, r"num_samples is 2\.5"),
        ({"horizon": 4}, "num_knots is 6; expected 3 to horizon = 4"),
        ({"horizon": 4, "spline": "legendre"}, "num_knots is 6; expected 1 to horizon = 4"),
        ({"spline": "sinc"}, "kind is 'sinc'"),
        ({"iterations": 0}, "iterations is 0"),
        ({"noise_scale": -1.0}, r"noise_scale is -1\.0"),
        ({"noise_scale": NAN}, "noise_scale is nan"),
        ({"min_gain": -0.1}, r"min_gain is -0\.1"),
        ({"dt": 0.0}, r"dt is 0\.0"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(name, change, message):
    with pytest.raises(ValueError, match=message) as refused:
        CONFIGS[name](**change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MppiConfig, {"temperature": 0.0}, r"temperature is 0\.0"),
        (CemConfig, {"num_elites": 1}, "num_elites is 1; expected an integer from 2 to num_samples = 256"),
        (CemConfig, {"num_elites": 300}, "num_elites is 300"),
        (CemConfig, {"noise_floor": 0.0}, r"noise_floor is 0\.0"),
        (CemConfig, {"noise_floor": 0.7}, r"noise_floor is 0\.7; expected at most noise_scale = 0\.5"),
    ],
)
def test_a_planners_own_settings_are_refused_by_name(config, change, message):
    with pytest.raises(ValueError, match=message):
        config(**change)


def test_a_config_that_names_no_planner_says_so():
    config = PlannerConfig(num_samples=4, horizon=9, num_knots=4)
    with pytest.raises(NotImplementedError, match="PlannerConfig does not say how to weigh"):
        plan(initial_plan(config, 1), lambda u: u[..., 0], config=config, noise=torch.Generator())
