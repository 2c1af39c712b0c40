"""The ten published settings of DIAL-MPC, number for number, in both forms of the annealing table."""

import math
from dataclasses import replace

import pytest
import torch

from nerd_mpc.dial import dial_preset

# Provenance: examples/*.yaml of LeCAR-Lab/dial-mpc at 871c84f: Ndiffuse, Hnode, horizon_diffuse_factor,
# traj_diffuse_factor; then the two betas, by hand: -1 / (n ln traj_factor) and -1 / (Hnode ln horizon_factor).
PUBLISHED = {
    "unitree_go2_trot": (2, 4, 0.9, 0.5, 0.72135, 2.37281),
    "unitree_go2_seq_jump": (2, 5, 0.9, 0.5, 0.72135, 1.89824),
    "unitree_go2_crate_climb": (4, 5, 1.0, 0.5, 0.36067, math.inf),
    "unitree_h1_jog": (4, 5, 1.0, 0.5, 0.36067, math.inf),
    "unitree_h1_loco": (1, 5, 0.9, 0.2, 0.62133, 1.89824),
    "unitree_h1_push_crate": (4, 6, 0.9, 0.5, 0.36067, 1.58187),
    "allegro_reorient": (2, 4, 1.0, 0.5, 0.72135, math.inf),
    "go2_trot_deploy": (1, 4, 0.9, 0.5, 1.44270, 2.37281),
    "go2_seq_jump_deploy": (1, 5, 0.9, 0.5, 1.44270, 1.89824),
    "h1_loco_deploy": (1, 5, 0.95, 0.2, 0.62133, 3.89915),
}
# sigma of the first iteration, knot by knot.
FIRST_ROWS = {
    (4, 0.9): [0.6561, 0.729, 0.81, 0.9, 1.0],
    (5, 0.9): [0.59049, 0.6561, 0.729, 0.81, 0.9, 1.0],
    (6, 0.9): [0.531441, 0.59049, 0.6561, 0.729, 0.81, 0.9, 1.0],
    (5, 0.95): [0.7737809375, 0.81450625, 0.857375, 0.9025, 0.95, 1.0],
    (4, 1.0): [1.0] * 5,
    (5, 1.0): [1.0] * 6,
}
# sigma of the last knot, iteration by iteration: the ten refinements of the first decision.
HALVING = [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.001953125]
FIFTHS = [1.0, 0.2, 0.04, 0.008, 0.0016, 0.00032, 0.000064, 0.0000128, 0.00000256, 0.000000512]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_entry_of_the_table_is_the_published_one(name):
    n, last, horizon_factor, factor, _, _ = PUBLISHED[name]
    columns = HALVING if factor == 0.5 else FIFTHS
    expected = torch.outer(torch.tensor(columns), torch.tensor(FIRST_ROWS[last, horizon_factor]))
    config = dial_preset(name)
    torch.testing.assert_close(config.noise_table(), expected[:n], rtol=1e-6, atol=0)
    torch.testing.assert_close(config.noise_table(10), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_two_betas_are_the_published_ones_and_give_the_same_table(name):
    n, last, horizon_factor, factor, beta_iteration, beta_horizon = PUBLISHED[name]
    beta = dial_preset(name).to_annealing("beta")
    assert beta.anneal_iteration == pytest.approx(beta_iteration, abs=1e-5)
    assert beta.anneal_horizon == pytest.approx(beta_horizon, abs=1e-5)
    columns = HALVING if factor == 0.5 else FIFTHS
    expected = torch.outer(torch.tensor(columns[:n]), torch.tensor(FIRST_ROWS[last, horizon_factor]))
    torch.testing.assert_close(beta.noise_table(), expected, rtol=1e-5, atol=0)


def test_the_modes_of_a_legendre_basis_decay_from_the_mean_upwards():
    config = replace(dial_preset("unitree_go2_seq_jump"), spline="legendre")
    torch.testing.assert_close(config.noise_table()[0], torch.tensor([1.0, 0.9, 0.81, 0.729, 0.6561, 0.59049]))
