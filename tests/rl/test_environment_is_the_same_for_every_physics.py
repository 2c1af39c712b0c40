"""Episodes, rewards and observations depend on states alone; only the step differs between physics."""

import dataclasses
import math

import pytest
import torch

from nerd_rl import Environment
from nerd_rl.physics import PHYSICS

N, STEPS = 5, 12


def short(task):
    """Episodes that end within a test."""
    return dataclasses.replace(task, episode_steps=5)


def actions(seed=3):
    return 2 * torch.rand(STEPS, N, 1, generator=torch.Generator().manual_seed(seed)) - 1


def run(environment):
    return [environment.step(action) for action in actions()]


@pytest.mark.parametrize("name", PHYSICS)
def test_the_same_states_give_the_same_rewards_and_observations(name, swing_up, cartpole_physics, played):
    environment = Environment(short(swing_up), cartpole_physics(name, N), seed=7)
    found = run(environment)
    replay = played(swing_up.robot.spec, torch.stack([step.state for step in found]))
    assert any(step.truncated.any() for step in found)
    for step, again in zip(found, run(Environment(short(swing_up), replay, seed=7)), strict=True):
        for field in ("observation", "final_observation", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(step, field), getattr(again, field)), field


@pytest.mark.parametrize("name", PHYSICS[1:])
def test_equal_seeds_give_equal_starts_in_every_physics(name, swing_up, cartpole_physics):
    teacher = Environment(swing_up, cartpole_physics("teacher", N), seed=4)
    other = Environment(swing_up, cartpole_physics(name, N), seed=4)
    assert torch.equal(teacher.observation, other.observation)
    assert not torch.equal(teacher.observation, Environment(swing_up, cartpole_physics(name, N), seed=5).observation)


@pytest.mark.parametrize("name", ["mujoco", "mjwarp"])
def test_the_engines_move_the_cart_as_the_teacher_does(name, swing_up, cartpole_physics):
    # One equation of motion, three programs: they differ by the rounding of a few steps, angles by whole turns.
    teacher = run(Environment(swing_up, cartpole_physics("teacher", N), seed=1))[-1]
    engine = run(Environment(swing_up, cartpole_physics(name, N), seed=1))[-1]
    torch.testing.assert_close(engine.observation, teacher.observation, atol=2e-3, rtol=0)


def test_the_swing_up_reward_is_nerds(swing_up, played):
    state = torch.tensor([[1.0, math.pi / 2, 2.0, 3.0], [0.0, 2 * math.pi, 0.0, 0.0]])
    environment = Environment(swing_up, played(swing_up.robot.spec, state[None]))
    found = environment.step(torch.zeros(2, 1))
    by_hand = 5 - (math.pi / 2) ** 2 - 0.05 * 1 - 0.1 * 9 - 0.1 * 4
    torch.testing.assert_close(found.reward, torch.tensor([by_hand, 5.0]))


@pytest.mark.parametrize("place", [(4.1, 0, 0, 0), (0, 0, -10.1, 0), (0, 0, 0, 10.1)])
def test_swing_up_ends_beyond_nerds_bounds(place, swing_up, played):
    inside = [0.97 * value for value in place]
    states = torch.tensor([place, inside], dtype=torch.float32)
    found = Environment(swing_up, played(swing_up.robot.spec, states[None])).step(torch.zeros(2, 1))
    assert found.terminated.tolist() == [True, False]
    assert not found.truncated.any()


def test_an_episode_is_cut_off_after_its_steps_and_not_before(swing_up, cartpole_physics):
    found = run(Environment(short(swing_up), cartpole_physics("teacher", N)))
    assert [bool(step.truncated.all()) for step in found] == [t % 5 == 4 for t in range(STEPS)]


def test_controls_stay_within_the_robots_range(swing_up, played):
    replay = played(swing_up.robot.spec, torch.zeros(1, 2, 4))
    environment = Environment(dataclasses.replace(swing_up, action_offset=(1000.0,)), replay)
    environment.step(torch.tensor([[50.0], [-50.0]]))
    assert environment.now.action.flatten().tolist() == [1.0, -1.0]
    assert environment.now.control.flatten().tolist() == [1500.0, -500.0]


def test_another_robot_is_refused_with_what_differs(go2_task, cartpole_physics):
    with pytest.raises(ValueError, match=r"another robot than task go2-velocity: .*name: cartpole here, go2 there"):
        Environment(go2_task, cartpole_physics("teacher", 2))


@pytest.mark.parametrize(
    ("action", "words"), [(torch.zeros(2, 2), "shape"), (torch.tensor([[0.0], [math.nan]]), "finite")]
)
def test_a_wrong_action_is_refused(action, words, swing_up, cartpole_physics):
    environment = Environment(swing_up, cartpole_physics("teacher", 2))
    with pytest.raises(ValueError, match=words):
        environment.step(action)
