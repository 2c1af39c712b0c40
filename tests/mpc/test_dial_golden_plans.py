"""The climb's plans as they were first published: same seed, same numbers, whatever is rebuilt around them."""

import pytest
import torch

from nerd_mpc.dial import DialConfig, PlanState, draw_noise, plan, warm_start

# Provenance: printed by this file's `five_decisions` before MPPI, CEM and other bases joined the core.
FINAL_KNOTS = {
    "zero": [
        0.000000000000,
        0.000000000000,
        0.852572586004,
        -0.427713733346,
        -0.734144789693,
        0.251423172112,
        -0.110341426548,
        0.254806261750,
        0.131534589726,
        -0.141421235837,
        0.430949994244,
        -0.271500202665,
    ],
    "linear": [
        0.286466680432,
        -0.166721626822,
        0.249817875392,
        -0.158784278938,
        -0.523819408782,
        0.256695678379,
        -0.074991328192,
        0.127767000250,
        0.236228771638,
        -0.168697258957,
        0.283987259439,
        -0.071299790785,
    ],
    "quadratic": [
        0.440229930604,
        -0.268146313845,
        -0.067408888762,
        -0.054777921008,
        -0.367373750071,
        0.239170306908,
        -0.025109835852,
        0.264970352995,
        0.284262871101,
        -0.426517715518,
        0.497535282842,
        0.065714680453,
    ],
    "cubic": [
        0.387868791397,
        -0.261922872460,
        0.003628722088,
        -0.109543596628,
        -0.392069457668,
        0.344255436082,
        -0.013686735646,
        0.172366241017,
        0.250677967763,
        -0.445583058626,
        0.454533446465,
        0.043454266557,
    ],
}
EFFECTIVE_SAMPLES = {
    "zero": (2.158740140, 1.316339290, 4.106279484, 4.224421129),
    "linear": (1.141202501, 1.238616960, 3.770818573, 3.415905857),
    "quadratic": (1.548176388, 1.304582671, 4.309188868, 3.098719270),
    "cubic": (1.447753633, 1.324658376, 3.805202751, 2.846743792),
}


def unicycle(position, velocity):
    """Reward per step of two unit masses with drag that should reach 0.3 and -0.2."""

    def rollout(controls):
        p = position.expand(len(controls), 2)
        v = velocity.expand(len(controls), 2)
        goal = torch.tensor([0.3, -0.2], dtype=controls.dtype)
        rewards = []
        for t in range(controls.shape[1]):
            v = v + 0.1 * (2.0 * controls[:, t] - v * v.abs())
            p = p + 0.1 * v
            rewards.append(-(p - goal).square().sum(-1) - 0.02 * controls[:, t].square().sum(-1))
        return torch.stack(rewards, dim=1)

    return rollout


def five_decisions(spline, dtype):
    """Knots and record of the fifth decision of a receding horizon that starts from rest."""
    config = DialConfig(num_samples=64, horizon=26, num_knots=6, iterations=4, temperature=0.05, spline=spline, dt=0.1)
    generator = torch.Generator().manual_seed(7)
    state = PlanState(torch.zeros(6, 2, dtype=dtype))
    p, v = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)
    for decision in range(5):
        n = config.iterations if decision else config.first_iterations
        noise = draw_noise(config, generator, n, 2)
        state, info = plan(state, unicycle(p, v), config=config, noise=noise, iterations=n)
        v = v + 0.1 * (2.0 * state.knots[0] - v * v.abs())
        p = p + 0.1 * v
        last, state = state, warm_start(state, config)
    return last.knots, info


@pytest.mark.parametrize("spline", ["zero", "linear", "quadratic", "cubic"])
def test_five_decisions_end_at_the_recorded_plan(spline):
    # In float64, so that another processor's rounding can't hide a changed formula.
    knots, info = five_decisions(spline, torch.float64)
    recorded = torch.tensor(FINAL_KNOTS[spline], dtype=torch.float64)
    torch.testing.assert_close(knots.flatten(), recorded, rtol=0, atol=1e-9)
    assert info.effective_samples == pytest.approx(EFFECTIVE_SAMPLES[spline], rel=1e-6)
    assert info.iterations == 4


def test_single_precision_stays_with_double_precision():
    knots, _ = five_decisions("quadratic", torch.float32)
    recorded = torch.tensor(FINAL_KNOTS["quadratic"]).reshape(6, 2)
    torch.testing.assert_close(knots, recorded, rtol=0, atol=1e-3)
