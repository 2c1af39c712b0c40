"""Velocity tracking: its terms by hand, its end, its commands and pushes; turning the world changes nothing."""

import dataclasses
import math

import pytest
import torch

from nerd_core.rotation import quat_multiply, rotate
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain
from nerd_rl import Environment, LearnedPhysics, Moment
from nerd_rl.velocity import VelocityWeights, anymal_velocity, velocity_tracking

TILT = 0.3


@pytest.fixture
def moment(go2_task):
    """One world: rolled by 0.3 rad, moving and turning, one joint off its target."""
    spec, robot = go2_task.robot.spec, go2_task.robot
    state = torch.tensor(robot.home_state)[None].clone()
    before = state.clone()
    state[0, 3:7] = torch.tensor([math.cos(TILT / 2), math.sin(TILT / 2), 0.0, 0.0])
    velocity = torch.tensor([0.5, -0.25, 0.125])  # base frame
    state[0, spec.nq : spec.nq + 3] = rotate(state[:, 3:7], velocity[None])[0]
    state[0, spec.nq + 3 : spec.nq + 6] = torch.tensor([0.1, 0.2, 0.3])
    state[0, 7] = 0.1  # first hip
    state[0, spec.nq + 6] = 2.0
    control = torch.tensor(robot.home_ctrl)[None]
    action, last = torch.full((1, 12), 0.5), torch.zeros(1, 12)
    command = torch.tensor([[1.0, 0.0, 0.5]])
    return Moment(state, before, control, action, last, command, torch.ones(1, dtype=torch.int64))


def test_every_term_is_what_hand_arithmetic_gives(go2_task, moment):
    found = {name: float(term) / 0.02 for name, term in go2_task.reward(moment).items()}
    effort = 40 * (0.0 - 0.1) - 1 * 2.0
    expected = {
        "linear": 1.5 * math.exp(-(0.5**2 + 0.25**2) / 0.25),
        "yaw": 0.75 * math.exp(-(0.2**2) / 0.25),
        "vertical": -2 * 0.125**2,
        "roll_pitch": -0.05 * (0.1**2 + 0.2**2),
        "effort": -2e-4 * effort**2,
        "acceleration": -2.5e-7 * (2.0 / 0.02) ** 2,
        "action_rate": -0.01 * 12 * 0.25,
        "tilt": -2.5 * math.sin(TILT) ** 2,
    }
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_effort_of_a_servo_is_clipped(go2_task, moment):
    far = moment._replace(control=moment.control + torch.tensor([10.0] + [0.0] * 11))
    assert float(go2_task.reward(far)["effort"]) == pytest.approx(-2e-4 * 0.02 * 23.7**2, rel=1e-5)


def test_observations_are_in_the_order_of_their_names(go2_task, moment):
    found = dict(zip(go2_task.observation_scales, go2_task.observe(moment)[0].tolist(), strict=True))
    assert found["base velocity x [m/s]"] == pytest.approx(0.5, abs=1e-6)
    assert found["base velocity z [m/s]"] == pytest.approx(0.125, abs=1e-6)
    assert found["base angular velocity y [rad/s]"] == pytest.approx(0.2)
    assert found["gravity y"] == pytest.approx(-math.sin(TILT), abs=1e-6)
    assert found["command yaw [rad/s]"] == 0.5
    assert found["FR_hip_joint from home [rad]"] == pytest.approx(0.1)
    assert found["FR_thigh_joint from home [rad]"] == 0.0
    assert found["FR_hip_joint velocity [rad/s]"] == 2.0
    assert found["RL_calf_joint last action"] == 0.5


def test_moving_and_turning_the_world_changes_nothing(go2_task, moment):
    yaw = torch.tensor([[math.cos(0.6), 0.0, 0.0, math.sin(0.6)]])
    nq = go2_task.robot.spec.nq

    def moved(state):
        state = state.clone()
        state[:, :2] += 3.0
        state[:, 3:7] = quat_multiply(yaw, state[:, 3:7])
        state[:, nq : nq + 3] = rotate(yaw, state[:, nq : nq + 3])
        return state

    elsewhere = moment._replace(state=moved(moment.state), before=moved(moment.before))
    torch.testing.assert_close(go2_task.observe(elsewhere), go2_task.observe(moment), rtol=0, atol=1e-5)
    for name, term in go2_task.reward(moment).items():
        torch.testing.assert_close(go2_task.reward(elsewhere)[name], term, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", ["go2", "anymal"])
def test_it_ends_when_the_base_touches_the_ground(task, go2_task):
    task = go2_task if task == "go2" else anymal_velocity()
    state = torch.tensor(task.robot.home_state).repeat(3, 1)
    lowest = min(p.pos[2] - p.radius for p in task.robot.probes if p.body == 0)
    state[1, 2] = -lowest + 0.009
    state[2, 2] = -lowest + 0.011
    now = Moment(state, state, *[torch.zeros(3, 12)] * 3, torch.zeros(3, 3), torch.zeros(3))
    assert task.terminated(now).tolist() == [False, True, False]
    on_its_back = state[:1].clone()
    on_its_back[0, 2], on_its_back[0, 3:7] = 0.06, torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert bool(task.terminated(now._replace(state=on_its_back)))


def test_starts_are_upright_above_the_ground_and_face_all_ways(go2_task):
    states = go2_task.start(torch.rand(400, go2_task.start_draws, generator=torch.Generator().manual_seed(0)))
    now = Moment(states, states, *[torch.zeros(400, 12)] * 3, torch.zeros(400, 3), torch.zeros(400))
    assert not go2_task.terminated(now).any()
    torch.testing.assert_close(states[:, 3:7].norm(dim=-1), torch.ones(400))
    forward = rotate(states[:, 3:7], torch.tensor([1.0, 0.0, 0.0]).expand(400, 3))
    assert (forward[:, :2].mean(0).abs() < 0.15).all()
    assert forward[:, 2].abs().max() < 1e-6


def test_two_in_a_hundred_commands_are_to_stand(go2_task):
    commands = go2_task.command(torch.rand(5000, 4, generator=torch.Generator().manual_seed(0)))
    assert commands.abs().max() <= 1.0
    assert 0.01 < float((commands == 0).all(-1).float().mean()) < 0.03


def test_pushes_and_commands_come_in_their_time_and_a_push_empties_the_history(go2_task, go2_model, played):
    task = dataclasses.replace(go2_task, push_steps=2, command_steps=3)
    still = torch.tensor(task.robot.home_state).repeat(7, 2, 1)
    replay = played(task.robot.spec, still)
    environment = Environment(task, replay)
    asked, velocities = [environment.now.command], []
    for _ in range(6):
        environment.step(torch.zeros(2, 12))
        asked.append(environment.now.command)
        velocities.append(environment.now.state[:, 19:21].abs().sum())
    changed = [not torch.equal(a, b) for a, b in zip(asked[1:], asked[:-1], strict=True)]
    assert changed == [False, False, True, False, False, True]
    assert [bool(v > 0) for v in velocities] == [False, True] * 3
    # The first reset is the environment's own.
    assert len(replay.resets) == 1 + 3
    assert all(mask.all() for mask in replay.resets)


def test_a_learned_model_with_contacts_can_be_its_physics(go2_task, go2_model):
    environment = Environment(go2_task, LearnedPhysics(go2_model, Terrain(), 3, compiled=False))
    for _ in range(3):
        found = environment.step(torch.zeros(3, 12))
    assert found.observation.shape == (3, 48)
    assert found.observation.isfinite().all()


def test_only_legged_robots_with_servos_are_accepted():
    with pytest.raises(ValueError, match="robot is ant, expected a floating base with a position servo"):
        velocity_tracking(load_robot("ant"), weights=VelocityWeights(), action_scale=0.25, ppo=None)
