import dataclasses
import math

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from nerd_core.cartpole import CartPole, collect_cartpole
from nerd_core.codec import StateCodec

CART = CartPole()


def states(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_a_still_upright_pole_stays_and_a_leaning_one_falls_the_way_it_leans():
    now = states([0, 0, 0, 0], [0, 0.1, 0, 0], [0, -0.1, 0, 0])
    linear, angular = CART.acceleration(now, torch.zeros(3, dtype=torch.float64))
    assert angular[0] == linear[0] == 0
    assert angular[1] > 0 > angular[2]
    assert linear[1] < 0 < linear[2]  # the falling pole pushes the cart back


def test_accelerations_agree_with_hand_arithmetic():
    # Upright at rest under 100 N: by hand, with l = 0.5, I = 2.5/4 + 2.5/12 + 0.01.
    inertia = 2.5 * 0.25 + 2.5 / 12 + 0.01
    mass, coupling = 52.51, 1.25
    determinant = mass * inertia - coupling**2
    linear, angular = CART.acceleration(states([0, 0, 0, 0]), torch.tensor([100.0]).double())
    torch.testing.assert_close(linear, torch.tensor([inertia * 100 / determinant]).double())
    torch.testing.assert_close(angular, torch.tensor([-coupling * 100 / determinant]).double())


def test_accelerations_satisfy_lagranges_equations():
    # d/dt ∂L/∂q̇ − ∂L/∂q = force, with L from the energy by automatic differentiation.
    draw = torch.Generator().manual_seed(0)
    position = torch.randn(5, 2, generator=draw, dtype=torch.float64)
    velocity = 3 * torch.randn(5, 2, generator=draw, dtype=torch.float64)
    force = 100 * torch.randn(5, generator=draw, dtype=torch.float64)

    def lagrangian(q, v):
        still = torch.cat([q, torch.zeros_like(v)])
        return CART.energy(torch.cat([q, v])) - 2 * CART.energy(still)

    linear, angular = CART.acceleration(torch.cat([position, velocity], -1), force)

    def residual(q, v, a):
        mass = hessian(lambda u: lagrangian(q, u), v)
        slope = jacobian(lambda p: jacobian(lambda u: lagrangian(p, u), v, create_graph=True), q)
        return mass @ a + slope @ v - jacobian(lambda p: lagrangian(p, v), q)

    for i in range(5):
        applied = torch.stack([force[i], torch.zeros((), dtype=torch.float64)])
        found = residual(position[i], velocity[i], torch.stack([linear[i], angular[i]]))
        torch.testing.assert_close(found, applied)


def test_passive_energy_drifts_little_and_less_with_smaller_steps():
    draw = torch.Generator().manual_seed(1)
    start = (2 * torch.rand(64, 4, generator=draw, dtype=torch.float64) - 1) * states([1, 3, 1, 1])

    endless = dataclasses.replace(CART, rail=100.0)  # the rail's damper takes energy out

    def drift(cart):
        now, worst = start, torch.zeros(64, dtype=torch.float64)
        for _ in range(200):
            now = cart.step(now, torch.zeros(64, 1, dtype=torch.float64))
            worst = torch.maximum(worst, (cart.energy(now) - cart.energy(start)).abs())
        return float(worst.max())

    coarse = drift(endless)
    fine = drift(dataclasses.replace(endless, timestep=CART.timestep / 10, substeps=50))
    assert coarse < 0.1 * CART.pole_mass * CART.gravity * CART.pole_length
    assert fine < coarse / 8  # first order in the time step


def test_the_rail_pushes_back_only_beyond_its_ends():
    inside, outside = states([3.9, 0, 1, 0]), states([4.1, 0, 1, 0])
    zero = torch.zeros(1, dtype=torch.float64)
    assert CART.acceleration(inside, zero)[0] == 0
    expected = CART.acceleration(inside, zero - 1e4 * 0.1 - 10)[0]
    torch.testing.assert_close(CART.acceleration(outside, zero)[0], expected)


def test_a_seed_gives_the_same_dataset_and_another_seed_another(tmp_path):
    def record(name, seed):
        path = tmp_path / name
        return collect_cartpole(path, trajectories=4, horizon=3, seed=seed, progress=False).digest

    assert record("a", 0) == record("b", 0) != record("c", 1)


def test_recorded_controls_act_from_their_own_state_to_the_next(tmp_path):
    dataset = collect_cartpole(tmp_path / "d", trajectories=4, horizon=3, progress=False)
    data = dataset.load()
    after = CART.step(data.states[:, :-1].double(), data.controls.double())
    torch.testing.assert_close(after, data.states[:, 1:].double(), atol=1e-5, rtol=0)
    assert data.controls.abs().max() <= CART.max_force


@pytest.mark.parametrize("setting", ["trajectories", "horizon"])
def test_a_count_below_one_is_refused(tmp_path, setting):
    with pytest.raises(ValueError, match=setting):
        collect_cartpole(tmp_path / "d", **{setting: 0})


def test_starts_fill_the_reach_that_was_asked_for(tmp_path):
    data = collect_cartpole(tmp_path / "data", trajectories=200, horizon=1, reach=(3.5, 3.0, 10, 0), progress=False)
    found = data.load().states[:, 0].abs().amax(0)
    asked = torch.tensor([3.5, 3.0, 10, 0])
    assert (found <= asked).all()
    assert (found >= 0.9 * asked).all()


@pytest.mark.parametrize("reach", [(1, 1, 1), (1, 4, 1, 1), (-1, 1, 1, 1), (1, 1, math.nan, 1), (math.inf, 1, 1, 1)])
def test_a_reach_that_no_start_can_have_is_refused(tmp_path, reach):
    with pytest.raises(ValueError, match="reach: got"):
        collect_cartpole(tmp_path / "data", reach=reach, progress=False)
    assert not (tmp_path / "data").exists()


def test_the_affine_error_of_the_teacher_lies_in_the_reference_band():
    # Reference facts, section 9 item 11: E_1 of the best affine map of (x, θ, ẋ, θ̇, F), the raw
    # angle included, is 4.3e-2 ... 4.7e-2 over trajectories of 100 steps; no motion gives 9.0e-2.
    truth, force = CART.record(2048, 100, torch.Generator().manual_seed(0))
    now, after = truth[:, :-1].flatten(0, 1), truth[:, 1:].flatten(0, 1)
    inputs = torch.cat([now, force.flatten(0, 1), torch.ones_like(now[:, :1])], 1)
    moves = StateCodec(CART.robot()).differentiate(after, now)
    error = moves - inputs @ torch.linalg.lstsq(inputs, moves).solution
    sigma = now.std(0)
    assert 4.3e-2 < float((error / sigma).square().mean().sqrt()) < 4.7e-2
    assert 8.8e-2 < float((moves / sigma).square().mean().sqrt()) < 9.2e-2
