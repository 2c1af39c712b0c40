"""The platform task: when a robot has climbed, what it is paid for, and what is refused."""

import math

import mujoco
import numpy as np
import pytest
import torch

from nerd_core.rotation import rotvec_to_quat
from nerd_coupling.robots import build_model
from nerd_mpc.platform import GO2_RANGE, TERRAINS, ClimbJudge, Outcome, PlatformTask, terrain_height

FRONT, BACK, SIDE = 0.99, 1.61, 0.46  # [m] the deck's footprint
MIRRORED = [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]  # joints of the other side


@pytest.fixture(scope="module")
def task(go2):
    return PlatformTask(go2, 0.181)


def posed(task, *, roll=0.0, yaw=0.0, thigh=None):
    """A robot whose lowest foot centre is 2.1 cm above the deck, somewhere in x and y."""
    state = torch.tensor(task.robot.home_state)
    if thigh is not None:
        state[7:19] = torch.tensor([0.0, thigh, -2 * thigh]).repeat(4)
    turned = rotvec_to_quat(torch.tensor([0.0, 0.0, yaw]))
    rolled = rotvec_to_quat(torch.tensor([roll, 0.0, 0.0]))
    assert yaw == 0.0 or roll == 0.0
    state[3:7] = turned if roll == 0.0 else rolled
    state[2] += task.height + 0.021 - task.points_world(state)[:4, 2].min()
    return state


def centred(task, state):
    """The same robot with its feet around the middle of the deck."""
    state = state.clone()
    state[:2] += torch.tensor([(FRONT + BACK) / 2, 0.0]) - task.points_world(state)[:4, :2].mean(0)
    return state


@pytest.fixture(scope="module")
def standing(task):
    return centred(task, posed(task))


@pytest.fixture(scope="module")
def waiting(task):
    return torch.tensor(task.robot.home_state)


def judged(task, states, **options):
    judge = ClimbJudge(task)
    for state in states:
        judge.update(state, **options)
    return judge


def test_25_decisions_on_the_deck_are_a_climb_and_24_are_not(task, standing, waiting):
    short = judged(task, [waiting] * 3 + [standing] * 24)
    assert (short.outcome, short.held, short.time_to_top) == (None, 24, None)
    whole = judged(task, [waiting] * 3 + [standing] * 25)
    assert (whole.outcome, whole.held, whole.time_to_top) == (Outcome.CLIMBED, 25, 4)


def test_a_hold_that_is_interrupted_begins_anew(task, standing, waiting):
    judge = judged(task, [standing] * 24 + [waiting] + [standing] * 24)
    assert (judge.outcome, judge.held, judge.longest_hold) == (None, 24, 24)
    assert judge.update(standing) is Outcome.CLIMBED
    assert judge.time_to_top == 26


def test_a_climb_in_the_last_decision_counts_and_one_decision_later_does_not(task, standing, waiting):
    assert judged(task, [waiting] * 125 + [standing] * 25).outcome is Outcome.CLIMBED
    late = judged(task, [waiting] * 126 + [standing] * 24)
    assert (late.outcome, late.longest_hold) == (Outcome.OFF_DECK, 24)


@pytest.mark.parametrize(("outside", "feet"), [(0.01, 4), (0.03, 3)])
def test_a_foot_may_overhang_the_edge_by_two_centimetres(task, outside, feet):
    state = centred(task, posed(task, yaw=0.3))  # turned, so that one foot is ahead of the others
    for axis, sign, edge in ((0, -1, FRONT), (0, 1, BACK), (1, -1, -SIDE), (1, 1, SIDE)):
        moved = state.clone()
        places = task.points_world(state)[:4, axis]
        moved[axis] += edge + sign * outside - (sign * (sign * places).max())
        assert int(task.on_deck(moved).sum()) == feet
        assert bool(task.standing_on_deck(moved)) == (feet == 4)


def test_a_foot_below_the_deck_is_not_on_it(task, standing):
    sunk = standing.clone()
    sunk[2] -= 0.022
    assert not bool(task.standing_on_deck(sunk))
    assert int(task.on_deck(sunk).sum()) < 4


def test_a_robot_that_lies_on_the_deck_does_not_stand(task):
    for thigh, stands in ((1.15, True), (1.3, False)):
        crouched = centred(task, posed(task, thigh=thigh))
        assert bool(task.on_deck(crouched).all())
        assert bool(crouched[2] > task.height + 0.15) == stands
        assert bool(task.standing_on_deck(crouched)) == stands


def test_a_tilted_robot_does_not_stand(task):
    for roll, stands in ((0.6, True), (0.7, False)):
        assert (math.cos(roll) > 0.8) == stands
        tilted = centred(task, posed(task, roll=roll))
        assert bool(task.on_deck(tilted).all())
        assert bool(task.standing_on_deck(tilted)) == stands


def test_what_is_not_finite_ends_the_episode(task, standing):
    for index, value in ((0, math.nan), (30, math.inf)):
        broken = standing.clone()
        broken[index] = value
        assert not bool(task.standing_on_deck(broken))
        judge = judged(task, [standing] * 24 + [broken])
        assert (judge.outcome, judge.decisions) == (Outcome.NON_FINITE, 25)


def test_sinking_in_by_more_than_three_centimetres_is_no_climb(task, standing):
    assert judged(task, [standing] * 25, penetration=0.029).outcome is Outcome.CLIMBED
    judge = judged(task, [standing] * 24)
    assert judge.update(standing, penetration=0.031) is Outcome.PENETRATION


def test_a_robot_on_its_back_fell(task, waiting):
    over = waiting.clone()
    over[3:7] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert judged(task, [waiting, over]).outcome is Outcome.FELL


def test_three_seconds_without_a_climb_are_a_timeout_or_a_fall_from_the_deck(task, standing, waiting):
    assert judged(task, [waiting] * 149).outcome is None
    assert judged(task, [waiting] * 150).outcome is Outcome.TIMEOUT
    assert judged(task, [waiting] * 10 + [standing] + [waiting] * 139).outcome is Outcome.OFF_DECK


def test_feet_and_head_are_where_mujoco_has_its_sites(go2, task):
    generator = torch.Generator().manual_seed(3)
    state = torch.tensor(go2.home_state) + 0.3 * torch.randn(8, 37, generator=generator)
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    mj_model = build_model(go2, task.terrain)
    data = mujoco.MjData(mj_model)
    points = task.points_world(state)
    assert points.shape == (8, 5, 3)
    for row, found in zip(state, points, strict=True):
        data.qpos[:] = row[:19].double().numpy()
        mujoco.mj_kinematics(mj_model, data)
        expected = np.stack([data.site(name).xpos for name in (*go2.foot_sites, "head")])
        np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


def test_controls_and_actions_are_each_other_s_inverse(task):
    action = 2 * torch.rand(7, 5, 12, generator=torch.Generator().manual_seed(0)) - 1
    torch.testing.assert_close(task.to_action(task.to_control(action)), action, atol=1e-6, rtol=0)
    ones = torch.ones(12)
    torch.testing.assert_close(task.to_control(ones), GO2_RANGE[:, 1])
    torch.testing.assert_close(task.to_control(-ones), GO2_RANGE[:, 0])
    assert torch.equal(task.to_action(GO2_RANGE[:, 1] + 1), ones)
    home = torch.tensor(task.robot.home_ctrl)
    torch.testing.assert_close(task.to_control(task.to_action(home)), home)  # standing is within reach


def test_standing_on_the_deck_pays_more_than_leaning_over_it_and_that_pays_more_than_waiting(task, standing, waiting):
    leaning = waiting.clone()
    leaning[0] = 0.6  # the head is over the deck, the feet are before it
    fore_feet = standing.clone()
    fore_feet[0] = 1.05  # at the same height, with the rear feet behind the edge
    rewards = task.reward(torch.stack([waiting, leaning, fore_feet, standing])).tolist()
    assert rewards == sorted(rewards)
    assert len(set(rewards)) == 4


def test_on_the_deck_every_disturbance_costs(task, standing):
    best = standing.clone()
    best[0] += task.target[0] - task.points_world(standing)[-1, 0]
    reward = float(task.reward(best))
    for index, change in ((1, 0.1), (19, 1.0), (28, 5.0), (8, 0.4), (2, -0.08)):
        worse = best.clone()
        worse[index] += change
        assert float(task.reward(worse)) < reward, index


def test_left_and_right_are_paid_alike(task):
    generator = torch.Generator().manual_seed(1)
    state = torch.tensor(task.robot.home_state) + 0.1 * torch.randn(6, 37, generator=generator)
    state[:, 0] += torch.linspace(0.0, 1.4, 6)
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    signs = torch.tensor([-1.0, 1.0, 1.0]).repeat(4)
    other = state.clone()
    other[:, [1, 4, 6, 20, 22, 24]] *= -1  # y, x and z of the quaternion, v_y, ω_x, ω_z
    other[:, 7:19] = state[:, 7:19][:, MIRRORED] * signs
    other[:, 25:] = state[:, 25:][:, MIRRORED] * signs
    torch.testing.assert_close(task.reward(other), task.reward(state), atol=1e-5, rtol=1e-5)


def test_rewards_of_a_batch_are_those_of_its_rows(task, standing, waiting):
    batch = torch.stack([standing, waiting]).expand(3, 2, 37)
    assert task.reward(batch).shape == (3, 2)
    torch.testing.assert_close(task.reward(batch)[1, 1], task.reward(waiting))


def test_a_goal_that_is_passed_replaces_the_task_s_own(go2, task, standing):
    low = PlatformTask(go2, 0.06)
    states = torch.stack([standing, torch.tensor(go2.home_state)])
    assert torch.equal(task.reward(states, task.goal), task.reward(states))
    assert torch.equal(task.reward(states, low.goal), low.reward(states))
    assert not torch.equal(low.reward(states), task.reward(states))


def test_named_terrains_are_heights_and_t4_is_the_default():
    assert terrain_height(None, None) == TERRAINS["T4"] == 0.181
    assert [terrain_height(name, None) for name in TERRAINS] == list(TERRAINS.values())
    assert terrain_height(None, 0.12) == 0.12


@pytest.mark.parametrize(
    ("terrain", "height", "words"),
    [
        ("T7", None, r"--terrain is 'T7'.*did you mean T"),
        ("t4", None, r"--terrain is 't4'.*did you mean T4"),
        ("", None, r"--terrain is ''"),
        ("stairs", None, r"T1, T2, T3, T4, T5, T6"),
        (None, math.nan, r"--height is nan m"),
        (None, 0.0, r"--height is 0 m"),
        (None, -0.1, r"--height is -0.1 m"),
        (None, 5.0, r"--height is 5 m.*at most 0.35"),
        (None, math.inf, r"--height is inf m"),
        ("T4", 0.1, r"both given"),
    ],
)
def test_unknown_terrains_and_impossible_heights_are_refused(terrain, height, words):
    with pytest.raises(ValueError, match=words):
        terrain_height(terrain, height)


@pytest.mark.parametrize("height", [math.nan, 0.0, 5.0])
def test_a_task_refuses_impossible_decks(go2, height):
    with pytest.raises(ValueError, match="height is"):
        PlatformTask(go2, height)
