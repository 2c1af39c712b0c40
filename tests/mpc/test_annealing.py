"""Noise tables of DIAL-MPC: golden values for every shipped setting, and the two forms."""

import math
from dataclasses import fields

import pytest
import torch

from nerd_mpc.dial_config import DialConfig, dial_preset, dial_presets

# Provenance: examples/*.yaml of LeCAR-Lab/dial-mpc at 871c84f. Columns: rollouts (samples and the
# nominal), controls, knots, iterations, temperature, and by hand horizon_factor^(K-1), the
# standard deviation of knot 1, and trajectory_factor^(n-1), ^9.
SHIPPED = {
    "unitree_go2_trot": (2049, 17, 5, 2, 0.05, 0.6561, 0.729, 0.5, 0.001953125),
    "unitree_go2_seq_jump": (2049, 21, 6, 2, 0.05, 0.59049, 0.6561, 0.5, 0.001953125),
    "unitree_go2_crate_climb": (2049, 26, 6, 4, 0.05, 1.0, 1.0, 0.125, 0.001953125),
    "unitree_h1_jog": (2049, 26, 6, 4, 0.05, 1.0, 1.0, 0.125, 0.001953125),
    "unitree_h1_loco": (2049, 21, 6, 1, 0.05, 0.59049, 0.6561, 1.0, 5.12e-7),
    "unitree_h1_push_crate": (2049, 25, 7, 4, 0.05, 0.531441, 0.59049, 0.125, 0.001953125),
    "allegro_reorient": (2049, 21, 5, 2, 0.05, 1.0, 1.0, 0.5, 0.001953125),
    "go2_trot_deploy": (2049, 17, 5, 1, 0.05, 0.6561, 0.729, 1.0, 0.001953125),
    "go2_seq_jump_deploy": (2049, 21, 6, 1, 0.1, 0.59049, 0.6561, 1.0, 0.001953125),
    "h1_loco_deploy": (3001, 21, 6, 1, 0.04, 0.7737809375, 0.81450625, 1.0, 5.12e-7),
}
STEP_EVALUATIONS = {  # rollouts * controls * iterations
    "unitree_go2_trot": 69_666,
    "unitree_go2_seq_jump": 86_058,
    "unitree_go2_crate_climb": 213_096,
    "unitree_h1_jog": 213_096,
    "unitree_h1_loco": 43_029,
    "unitree_h1_push_crate": 204_900,
    "allegro_reorient": 86_058,
    "go2_trot_deploy": 34_833,
    "go2_seq_jump_deploy": 43_029,
    "h1_loco_deploy": 63_021,
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_settings_give_their_golden_noise_table(name):
    samples, horizon, knots, n, temperature, first, second, last_row, tenth_row = SHIPPED[name]
    config = dial_preset(name)
    assert (config.num_samples, config.horizon, config.num_knots) == (samples, horizon, knots)
    assert (config.iterations, config.first_iterations) == (n, 10)
    assert (config.temperature, config.noise_scale, config.dt) == (temperature, 1.0, 0.02)
    assert config.spline == "quadratic"
    assert samples * horizon * n == STEP_EVALUATIONS[name]

    table = config.noise_table()
    assert table.shape == (n, knots)
    assert table.dtype == torch.float32
    assert table[0, 0].item() == pytest.approx(first, rel=1e-6)
    assert table[0, 1].item() == pytest.approx(second, rel=1e-6)
    assert table[0, -1].item() == 1.0
    assert table[-1, -1].item() == pytest.approx(last_row, rel=1e-6)
    assert table[-1, 0].item() == pytest.approx(first * last_row, rel=1e-6)

    first_decision = config.noise_table(config.first_iterations)
    assert first_decision.shape == (10, knots)
    assert first_decision[-1, -1].item() == pytest.approx(tenth_row, rel=1e-6)
    torch.testing.assert_close(first_decision[:n], table)  # a factor does not depend on n


def test_horizon_factor_of_nine_tenths_gives_the_published_row():
    row = dial_preset("unitree_go2_seq_jump").noise_table()[0]
    expected = torch.tensor([0.59049, 0.6561, 0.729, 0.81, 0.9, 1.0])
    torch.testing.assert_close(row, expected)


def test_noise_scale_multiplies_the_table():
    table = DialConfig(noise_scale=0.25, iterations=2).noise_table()
    torch.testing.assert_close(table, torch.tensor([[0.25] * 6, [0.125] * 6]))


def test_beta_form_agrees_with_hand_arithmetic():
    config = DialConfig(
        annealing="beta",
        anneal_iteration=0.5,
        anneal_horizon=1.0,
        noise_scale=2.0,
        num_knots=3,
        iterations=2,
    )
    # exponents -(i / (0.5 * 2)) - (2 - h) / (1.0 * 2)
    expected = [[2 * math.exp(-i - (2 - h) / 2) for h in range(3)] for i in range(2)]
    torch.testing.assert_close(config.noise_table(), torch.tensor(expected))


@pytest.mark.parametrize(("n", "factor", "beta"), [(4, 0.5, 0.361), (2, 0.5, 0.721), (10, 0.5, 0.144)])
def test_iteration_factor_becomes_the_published_beta(n, factor, beta):
    config = DialConfig(iterations=n, anneal_iteration=factor).to_annealing("beta")
    assert config.anneal_iteration == pytest.approx(beta, abs=5e-4)
    assert config.anneal_horizon == math.inf  # factor 1: every knot alike


@pytest.mark.parametrize(("knots", "factor", "beta"), [(6, 0.9, 1.90), (5, 0.9, 2.37), (6, 0.95, 3.90)])
def test_horizon_factor_becomes_the_published_beta(knots, factor, beta):
    config = DialConfig(num_knots=knots, anneal_horizon=factor).to_annealing("beta")
    assert config.anneal_horizon == pytest.approx(beta, abs=5e-3)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("iterations", [None, 10])
def test_both_forms_give_one_table_and_convert_back(name, iterations):
    factor = dial_preset(name)
    beta = factor.to_annealing("beta", iterations)
    torch.testing.assert_close(beta.noise_table(iterations), factor.noise_table(iterations))
    back = beta.to_annealing("factor", iterations)
    for field in fields(factor):
        assert getattr(back, field.name) == pytest.approx(getattr(factor, field.name)), field.name
    assert factor.to_annealing("factor") is factor


def test_beta_form_ends_at_the_same_noise_scale_whatever_the_number_of_iterations():
    config = DialConfig(annealing="beta", anneal_iteration=0.4, anneal_horizon=1.0)
    ends = [config.noise_table(n)[-1, -1].item() for n in (50, 500)]
    assert ends[1] == pytest.approx(math.exp(-1 / 0.4), rel=0.01)
    assert ends[0] == pytest.approx(ends[1], rel=0.06)


def test_climbing_presets_differ_from_the_shipped_climb_in_samples_only():
    paper = dial_preset("climb-paper")
    assert paper == dial_preset("unitree_go2_crate_climb")
    for name, samples in (("climb-cpu", 256), ("climb-smoke", 128)):
        config = dial_preset(name)
        assert config.num_samples == samples
        assert torch.equal(config.noise_table(), paper.noise_table())


def test_an_unknown_preset_names_close_ones():
    with pytest.raises(ValueError, match="climb-cpu"):
        dial_preset("climb-cpus")
    assert set(SHIPPED) < set(dial_presets())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_samples", 1),
        ("num_samples", 12.5),
        ("horizon", 1),
        ("num_knots", 27),
        ("num_knots", 1),
        ("iterations", 0),
        ("first_iterations", -1),
        ("temperature", 0.0),
        ("noise_scale", math.inf),
        ("anneal_iteration", 0.0),
        ("anneal_iteration", 1.5),
        ("anneal_horizon", math.nan),
        ("annealing", "cosine"),
        ("dt", -0.02),
    ],
)
def test_an_impossible_config_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        DialConfig(**{field: value})
