"""The planner as a whole, on dynamics of two lines: what it samples, solves, and survives."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import nerd_mpc.dial
from nerd_mpc.dial import (
    DialConfig,
    PlanState,
    dial_preset,
    draw_noise,
    initial_plan,
    plan,
    warm_start,
)

DT, FORCE, EFFORT = 0.1, 2.0, 0.02
PLANNER_MODULES = (
    "basis",
    "cem",
    "dial",
    "dial_config",
    "legendre",
    "mppi",
    "planner_config",
    "predictive_sampling",
    "risk",
    "spline",
    "weights",
)


def double_integrator(position, velocity):
    """Reward per step of a unit mass that should come to rest at the origin."""

    def rollout(controls):
        p = torch.full_like(controls[:, 0, 0], position)
        v = torch.full_like(p, velocity)
        rewards = []
        for t in range(controls.shape[1]):
            u = controls[:, t, 0]
            p, v = p + DT * v, v + DT * FORCE * u
            rewards.append(-(p.square() + 0.1 * v.square() + EFFORT * u.square()))
        return torch.stack(rewards, dim=1)

    return rollout


def best_knots(config, position, velocity, pinned=0.0):
    """Optimum over all knots but the pinned first, by linear least squares (no bounds)."""
    base = torch.zeros(config.num_knots, config.num_knots, 1, dtype=torch.float64)
    base[:, 0] = pinned
    base[range(1, config.num_knots), range(1, config.num_knots)] = 1.0

    def residuals(knots):  # (N, K, 1) -> (N, 3 T)
        u = config.control_spline.evaluate(knots)[..., 0]
        p = torch.full_like(u[:, 0], position)
        v = torch.full_like(p, velocity)
        out = []
        for t in range(u.shape[1]):
            p, v = p + DT * v, v + DT * FORCE * u[:, t]
            out += [p, 0.1**0.5 * v, EFFORT**0.5 * u[:, t]]
        return torch.stack(out, dim=1)

    rows = residuals(base)
    offset, jacobian = rows[0], (rows[1:] - rows[0]).T
    solution = torch.linalg.lstsq(jacobian, -offset[:, None]).solution
    knots = torch.cat([base[0, :1], solution])
    return knots, -float((residuals(knots[None]) ** 2).sum()) / config.horizon


def closed_loop(config, decide, decisions=60):
    """Run the loop of DIAL-MPC from rest at 0.4; returns total cost and the last state.

    The control in force was planned before this state was seen: one period of latency.
    """
    p, v, total = 0.4, 0.0, 0.0
    state = initial_plan(config, 1)
    for decision in range(decisions):
        u = float(state.knots[0, 0])
        p, v = p + DT * v, v + DT * FORCE * u
        total += p * p + 0.1 * v * v + EFFORT * u * u
        state = decide(decision, warm_start(state, config), p, v)
    return total, p, v


def settings(**change):
    defaults = {"num_samples": 128, "horizon": 26, "num_knots": 6, "dt": DT, "temperature": 0.05}
    return DialConfig(**(defaults | change))


def score(config, knots, rollout):
    controls = config.control_spline.evaluate(knots[None]).clamp(-1, 1)
    return float(rollout(controls).mean())


@pytest.mark.parametrize("spline", ["zero", "linear", "quadratic", "cubic"])
def test_first_decision_comes_close_to_the_least_squares_optimum(spline):
    config = settings(spline=spline, num_samples=256)
    rollout = double_integrator(0.4, 0.0)
    optimum_knots, optimum = best_knots(config, 0.4, 0.0)
    assert optimum_knots.abs().max() < 1.0  # the bounds do not act, so the oracle is the optimum
    start = initial_plan(config, 1)
    state, _ = plan(start, rollout, config=config, noise=torch.Generator().manual_seed(0), iterations=10)
    before, after = score(config, start.knots, rollout), score(config, state.knots, rollout)
    assert before < after <= optimum + 1e-6
    assert optimum - after < 0.02 * (optimum - before)


def test_receding_horizon_does_as_well_as_the_exact_optimum_would():
    config = settings()
    generator = torch.Generator().manual_seed(1)

    def sampled(decision, state, p, v):
        n = config.first_iterations if decision == 0 else config.iterations
        rollout = double_integrator(p, v)
        return plan(state, rollout, config=config, noise=generator, iterations=n)[0]

    def exact(decision, state, p, v):
        return PlanState(best_knots(config, p, v, float(state.knots[0, 0]))[0].float())

    total, p, v = closed_loop(config, sampled)
    optimum, _, _ = closed_loop(config, exact)
    at_rest, _, _ = closed_loop(config, lambda decision, state, p, v: initial_plan(config, 1))
    assert optimum < 0.3 * at_rest
    assert total == pytest.approx(optimum, rel=0.08)
    assert abs(p) < 0.06
    assert abs(v) < 0.08


def test_knot_zero_never_moves_and_the_plan_stays_in_bounds():
    config = settings(iterations=6)
    knots = torch.linspace(-0.9, 0.9, 18).reshape(6, 3)
    seen = []

    def rollout(controls):
        seen.append(controls)
        return controls.sum(-1)

    state, info = plan(
        PlanState(knots),
        rollout,
        config=config,
        noise=torch.Generator().manual_seed(0),
        keep_samples=True,
    )
    assert torch.equal(state.knots[0], knots[0])
    assert not torch.equal(state.knots[1:], knots[1:])
    assert state.knots.abs().max() <= 1.0
    assert info.sampled_knots.shape == (128, 6, 3)
    for controls in seen:
        assert controls.shape == (128, 26, 3)
        assert controls.abs().max() <= 1.0
        torch.testing.assert_close(controls[:, 0], knots[0].expand(128, 3))


def test_the_last_sample_of_every_iteration_is_the_nominal_plan():
    config, rollout = settings(iterations=3), double_integrator(0.5, 0.0)
    noise = draw_noise(config, torch.Generator().manual_seed(0), 3, 1)
    lasts = []

    def watch(controls):
        lasts.append(controls[-1])
        return rollout(controls)

    _, info = plan(initial_plan(config, 1), watch, config=config, noise=noise)
    # The nominal before iteration i is what a decision stopped after i iterations returns.
    for i, last in enumerate(lasts):
        asked = iter([False] * i + [True])
        state, _ = plan(
            initial_plan(config, 1),
            rollout,
            config=config,
            noise=noise,
            deadline=lambda asked=asked: next(asked),
        )
        expected = config.control_spline.evaluate(state.knots).clamp(-1, 1)
        torch.testing.assert_close(last, expected, rtol=0, atol=1e-6)
        assert info.nominal[i] == pytest.approx(score(config, state.knots, rollout), rel=1e-5)


def test_samples_spread_as_the_noise_table_says():
    config = settings(num_samples=4096, noise_scale=0.1, anneal_horizon=0.9, iterations=2)
    _, info = plan(
        initial_plan(config, 2),
        lambda u: torch.zeros(u.shape[:2]),  # ties: the nominal stays at zero
        config=config,
        noise=torch.Generator().manual_seed(0),
        keep_samples=True,
    )
    spread = info.sampled_knots[:-1].std(dim=(0, 2))
    assert spread[0] == 0.0
    torch.testing.assert_close(spread[1:], config.noise_table()[1, 1:], rtol=0.05, atol=0)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    config, rollout = settings(), double_integrator(0.5, 0.2)

    def knots(noise):
        return plan(initial_plan(config, 1), rollout, config=config, noise=noise)[0].knots

    first = knots(torch.Generator().manual_seed(4))
    assert torch.equal(first, knots(torch.Generator().manual_seed(4)))
    assert torch.equal(first, knots(draw_noise(config, torch.Generator().manual_seed(4), 4, 1)))
    assert not torch.equal(first, knots(torch.Generator().manual_seed(5)))


def test_planning_changes_neither_its_noise_nor_its_start():
    config = settings()
    noise = draw_noise(config, torch.Generator().manual_seed(0), 4, 1)
    start, noise_before = initial_plan(config, 1), noise.clone()
    plan(start, double_integrator(1.0, 0.0), config=config, noise=noise)
    assert torch.equal(noise, noise_before)
    assert torch.equal(start.knots, torch.zeros(6, 1))


def test_a_deadline_stops_early_with_the_plan_so_far():
    config, rollout = settings(), double_integrator(1.0, 0.0)
    noise = draw_noise(config, torch.Generator().manual_seed(0), 4, 1)
    asked = iter([False, False, True])
    state, info = plan(initial_plan(config, 1), rollout, config=config, noise=noise, deadline=lambda: next(asked))
    assert info.iterations == len(info.best) == len(info.effective_samples) == 2
    assert torch.isfinite(state.knots).all()
    assert info.weights.shape == (128,)


def test_a_deadline_already_past_returns_the_plan_it_was_given():
    config = settings()
    start = PlanState(torch.full((6, 1), 0.25))

    def never(controls):
        raise AssertionError("no rollout was due")

    state, info = plan(start, never, config=config, noise=torch.Generator(), deadline=lambda: True)
    assert torch.equal(state.knots, start.knots)
    assert (info.iterations, info.weights, info.sampled_knots) == (0, None, None)
    assert info.best_score != info.best_score
    assert info.nominal_score != info.nominal_score


def test_warm_start_moves_the_plan_by_one_period_and_stays_in_bounds():
    config = settings()
    knots = torch.tensor([[0.0], [1.0], [1.0], [-1.0], [1.0], [1.0]])  # overshoots 1 in between
    shifted = warm_start(PlanState(knots), config).knots
    controls = config.control_spline.evaluate(knots)
    torch.testing.assert_close(shifted, controls[[1, 6, 11, 16, 21, 25]].clamp(-1, 1))
    assert shifted.abs().max() <= 1.0
    twice = warm_start(PlanState(knots), config, elapsed=2 * DT).knots
    torch.testing.assert_close(twice, controls[[2, 7, 12, 17, 22, 25]].clamp(-1, 1))


def test_scores_may_come_without_a_time_axis():
    config, rollout = settings(), double_integrator(0.5, 0.0)
    noise = draw_noise(config, torch.Generator().manual_seed(0), 4, 1)
    start = initial_plan(config, 1)
    with_time, _ = plan(start, rollout, config=config, noise=noise)
    without, _ = plan(start, lambda u: rollout(u).double().mean(1), config=config, noise=noise)
    torch.testing.assert_close(with_time.knots, without.knots, rtol=0, atol=1e-5)


def test_wrong_shapes_and_broken_plans_are_refused_by_name():
    config = settings()
    generator, zero = torch.Generator(), initial_plan(config, 1)

    def rollout(controls):
        return controls[..., 0]

    with pytest.raises(ValueError, match=r"plan_state\.knots has shape"):
        plan(PlanState(torch.zeros(5, 1)), rollout, config=config, noise=generator)
    with pytest.raises(ValueError, match="finite"):
        plan(PlanState(torch.full((6, 1), float("nan"))), rollout, config=config, noise=generator)
    with pytest.raises(ValueError, match="noise has shape"):
        plan(zero, rollout, config=config, noise=torch.zeros(4, 128, 6, 2))
    with pytest.raises(ValueError, match="noise has shape"):
        plan(zero, rollout, config=config, noise=torch.zeros(3, 128, 6, 1))
    with pytest.raises(ValueError, match="iterations"):
        plan(zero, rollout, config=config, noise=generator, iterations=0)
    with pytest.raises(ValueError, match="rollout returned shape"):
        plan(zero, lambda u: u, config=config, noise=generator)


@pytest.mark.gpu
def test_the_gpu_makes_the_plan_of_the_cpu():
    config, rollout = dial_preset("climb-cpu"), double_integrator(0.5, 0.0)
    noise = draw_noise(config, torch.Generator().manual_seed(0), 4, 1)
    cpu, _ = plan(initial_plan(config, 1), rollout, config=config, noise=noise)
    gpu, _ = plan(initial_plan(config, 1, device="cuda"), rollout, config=config, noise=noise)
    assert gpu.knots.is_cuda
    torch.testing.assert_close(gpu.knots.cpu(), cpu.knots, rtol=0, atol=1e-3)


def test_the_planner_imports_torch_and_the_standard_library_only():
    folder = Path(nerd_mpc.dial.__file__).parent
    for name in PLANNER_MODULES:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module]
            else:
                continue
            for module in modules:
                known = module in {f"nerd_mpc.{name}" for name in PLANNER_MODULES}
                assert known or module.split(".")[0] in {"torch", *sys.stdlib_module_names}, module
