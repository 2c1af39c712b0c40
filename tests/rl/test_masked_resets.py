"""A reset clears the history of its world and of no other; a world that breaks down is started anew alone."""

import dataclasses
import math

import pytest
import torch

from nerd_coupling.terrain import Terrain
from nerd_rl import Environment, LearnedPhysics
from nerd_rl.physics import PHYSICS

N = 4
MASK = torch.tensor([True, False, True, False])


def pushed(physics, steps, seed=0):
    """Some steps under random controls."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor(physics.robot.ctrl_range).unbind(-1)
    for _ in range(steps):
        state = physics.step(low + (high - low) * torch.rand(N, physics.robot.nu, generator=generator))
    return state


@pytest.mark.parametrize("name", PHYSICS)
def test_a_reset_world_is_a_fresh_one_and_the_others_go_on(name, cartpole_physics):
    start = torch.tensor([0.1, 2.0, 0.3, -0.4]) * torch.arange(1, N + 1)[:, None] / N
    everywhere = torch.ones(N, dtype=torch.bool)
    physics, untouched, fresh = (cartpole_physics(name, N) for _ in range(3))
    for each in (physics, untouched, fresh):
        each.reset(start, everywhere)
    assert torch.equal(pushed(physics, 5), pushed(untouched, 5))
    physics.reset(start, MASK)
    found, went_on, anew = (pushed(each, 4, seed=1) for each in (physics, untouched, fresh))
    # A ring of keys stands elsewhere after some steps, so its sums may round otherwise than a new one's.
    torch.testing.assert_close(found[MASK], anew[MASK], rtol=0, atol=1e-6 if name == "nerd" else 0.0)
    assert torch.equal(found[~MASK], went_on[~MASK])
    assert not torch.equal(went_on[MASK], anew[MASK])


@pytest.mark.parametrize("kind", ["nerd", "nerd-baseline"])
def test_a_step_that_owns_its_cache_is_reset_and_restored_like_the_plain_one(kind, cartpole_physics, monkeypatch):
    # Without a compiler the same function runs on the same views of the same rings.
    monkeypatch.setattr("nerd_core.streaming.can_compile", lambda: False)
    plain = cartpole_physics(kind, N)
    fast, other = (cartpole_physics(kind, N, compiled=True) for _ in range(2))
    start = torch.tensor([0.1, 2.0, 0.3, -0.4]).repeat(N, 1)
    for t in range(7):
        mask = torch.tensor([t == 0, t in (0, 3), t in (0, 4, 5), True])
        for each in (plain, fast):
            each.reset(start, mask)
        expected, found = (pushed(each, 1, seed=t) for each in (plain, fast))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    pushed(other, 2)
    other.restore({name: value.clone() for name, value in fast.memory().items()})
    assert torch.equal(pushed(other, 3), pushed(fast, 3))


def test_history_is_what_a_reset_clears(cartpole_physics):
    # Same state, same control: only what was seen before can make the difference.
    physics, fresh = cartpole_physics("nerd", N), cartpole_physics("nerd", N)
    everywhere = torch.ones(N, dtype=torch.bool)
    physics.reset(torch.full((N, 4), 0.2), everywhere)
    state = pushed(physics, 3)
    fresh.reset(state, everywhere)
    force = torch.full((N, 1), 300.0)
    remembering, forgetful = physics.step(force), fresh.step(force)
    assert not torch.allclose(remembering, forgetful, rtol=0, atol=1e-4)
    assert math.isfinite(float(remembering.sum()))


def test_contacts_are_those_of_the_state_after_a_reset(go2_model, go2_task):
    # In the air nothing is touched: what a reset puts on the ground must feel it at once.
    home = torch.tensor(go2_task.robot.home_state).repeat(N, 1)
    aloft = home.clone()
    aloft[:, 2] = 5.0
    everywhere = torch.ones(N, dtype=torch.bool)
    physics, fresh = (LearnedPhysics(go2_model, Terrain(), N, compiled=False) for _ in range(2))
    control = torch.tensor(go2_task.robot.home_ctrl).repeat(N, 1)
    physics.reset(aloft, everywhere)
    physics.step(control)
    physics.reset(home, MASK)
    fresh.reset(home, everywhere)
    found, grounded = physics.step(control), fresh.step(control)
    assert torch.equal(found[MASK], grounded[MASK])
    fresh.reset(aloft, everywhere)
    change = (fresh.step(control) - aloft)[:, 7:19] - (grounded - home)[:, 7:19]
    assert change.abs().max() > 1e-4


@pytest.mark.parametrize("name", PHYSICS)
def test_a_world_that_is_not_finite_is_started_anew_and_counted_and_the_others_do_not_notice(
    name, swing_up, cartpole_physics
):
    environments = [Environment(swing_up, cartpole_physics(name, N), seed=2) for _ in range(2)]
    force = torch.tensor([[0.3], [-0.2], [0.1], [0.5]])
    for environment in environments:
        for _ in range(3):
            environment.step(force)
    broken, whole = environments
    sick = torch.tensor([False, True, False, False])
    broken.physics.reset(torch.full((N, 4), math.nan), sick)
    found, expected = broken.step(force), whole.step(force)
    assert found.nonfinite.tolist() == sick.tolist()
    assert found.terminated[1]
    assert not found.truncated[1]
    assert found.reward[1] == 0.0
    assert broken.nonfinite == 1
    assert whole.nonfinite == 0
    assert broken.now.steps.tolist() == [4, 0, 4, 4]
    for _ in range(6):
        for field in ("observation", "reward", "terminated", "state"):
            assert torch.equal(getattr(found, field)[~sick], getattr(expected, field)[~sick]), field
        assert found.observation.isfinite().all()
        assert found.final_observation.isfinite().all()
        found, expected = broken.step(force), whole.step(force)
    assert broken.nonfinite == 1


def test_a_state_out_of_all_bounds_counts_as_not_finite(swing_up, played):
    states = torch.tensor([[0.0, 0, 0, 0], [2e5, 0, 0, 0]])
    environment = Environment(swing_up, played(swing_up.robot.spec, states[None]))
    assert environment.step(torch.zeros(2, 1)).nonfinite.tolist() == [False, True]


def test_an_ended_episode_forgets_its_actions_and_shows_its_last_observation(swing_up, cartpole_physics):
    environment = Environment(dataclasses.replace(swing_up, episode_steps=3), cartpole_physics("teacher", N))
    for _ in range(3):
        found = environment.step(torch.ones(N, 1))
    assert found.truncated.all()
    assert not environment.now.action.any()
    assert not environment.now.last_action.any()
    assert not torch.equal(found.final_observation, found.observation)
    assert torch.equal(found.observation, environment.observation)


def test_states_far_from_the_recorded_ones_are_flagged_and_counted(swing_up, cartpole_physics):
    environment = Environment(swing_up, cartpole_physics("nerd", N))
    stats = environment.physics._stats
    environment.step(torch.zeros(N, 1))
    assert environment.outside == 0
    # Token: x, sin θ, cos θ, ẋ, θ̇, force.
    far = torch.zeros(N, 4)
    far[0, 2], far[1, 2] = stats.mean[3] + 5.1 * stats.std[3], stats.mean[3] + 4.9 * stats.std[3]
    environment.physics.reset(far, torch.ones(N, dtype=torch.bool))
    environment.step(torch.zeros(N, 1))
    assert environment.physics.outside().tolist() == [True, False, False, False]
    assert environment.outside == 1
