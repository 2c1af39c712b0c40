"""Ant run: NeRD's reward, observation and end."""

import math

import pytest
import torch

from nerd_rl import Moment
from nerd_rl.ant import ant_run


@pytest.fixture(scope="module")
def task():
    return ant_run()


def moment(state):
    n = len(state)
    return Moment(state, state, *[torch.zeros(n, 8)] * 3, torch.zeros(n, 0), torch.zeros(n))


def test_it_is_rewarded_for_speed_along_x_uprightness_and_heading(task):
    state = torch.tensor(task.robot.home_state).repeat(2, 1)
    state[:, 15] = 1.5  # v_x, world
    state[1, 3:7] = torch.tensor([math.cos(0.5), 0.0, 0.0, math.sin(0.5)])  # turned by 1 rad
    found = sum(task.reward(moment(state)).values())
    assert found.tolist() == pytest.approx([1.5 + 0.1 + 1.0, 1.5 + 0.1 + math.cos(1.0)])


def test_it_sees_nerds_29_numbers(task):
    state = torch.tensor(task.robot.home_state)[None]
    found = task.observe(moment(state))
    assert found.shape == (1, 5 + 3 + 3 + 8 + 8 + 2)
    assert float(found[0, 0]) == pytest.approx(0.385)
    assert found[0, -2:].tolist() == [1.0, 1.0]


def test_it_ends_below_30_centimetres(task):
    state = torch.tensor(task.robot.home_state).repeat(2, 1)
    state[:, 2] = torch.tensor([0.299, 0.301])
    assert task.terminated(moment(state)).tolist() == [True, False]


def test_starts_are_above_the_ground(task):
    states = task.start(torch.rand(50, task.start_draws, generator=torch.Generator().manual_seed(0)))
    assert not task.terminated(moment(states)).any()
    assert (states[:, 7:15] - torch.tensor(task.robot.home_qpos[7:])).abs().max() <= 0.1
