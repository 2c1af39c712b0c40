"""The environment is a VecEnv of rsl_rl, and rsl_rl's own runner learns in it."""

import dataclasses

import pytest
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from nerd_rl import Environment, PpoConfig, rsl_env

N = 4


@pytest.fixture
def env(swing_up, cartpole_physics):
    ppo = dataclasses.replace(swing_up.ppo, steps=3, epochs=1, mini_batches=2, hidden=(8,))
    task = dataclasses.replace(swing_up, episode_steps=5, ppo=ppo)
    return rsl_env(Environment(task, cartpole_physics("nerd", N)))


def test_it_has_what_rsl_rl_asks_for(env):
    assert isinstance(env, VecEnv)
    assert (env.num_envs, env.num_actions, env.max_episode_length) == (N, 1, 5)
    assert env.episode_length_buf.tolist() == [0] * N
    observations = env.get_observations()
    assert isinstance(observations, TensorDict)
    assert observations.batch_size == torch.Size([N])
    assert observations["policy"].shape == (N, 5)
    assert env.cfg["name"] == "cartpole-swing-up"


def test_only_what_was_cut_off_is_a_time_out(env, swing_up, played):
    states = torch.zeros(5, 2, 4)
    states[4, 1, 0] = 4.5  # off the rail in its last step
    environment = Environment(dataclasses.replace(swing_up, episode_steps=5), played(swing_up.robot.spec, states))
    env = rsl_env(environment)
    for _ in range(5):
        observations, rewards, dones, extras = env.step(torch.zeros(2, 1))
    assert dones.tolist() == [1, 1]
    assert extras["time_outs"].tolist() == [True, False]
    assert rewards.shape == (2,)
    assert torch.equal(observations["policy"], env.get_observations()["policy"])


def test_the_log_names_every_term_and_what_went_wrong(env):
    *_, extras = env.step(torch.zeros(N, 1))
    names = {"alive", "angle", "position", "rate", "speed"}
    assert set(extras["log"]) == {f"Reward/{name}" for name in names} | {
        "Physics/nonfinite",
        "Physics/outside_recorded",
    }


def test_episode_lengths_can_be_spread(env):
    env.episode_length_buf = torch.tensor([4, 0, 3, 0])
    *_, dones, _ = env.step(torch.zeros(N, 1))
    assert dones.tolist() == [1, 0, 0, 0]


def test_rsl_rls_own_runner_learns_in_it(env, capsys):
    torch.manual_seed(0)
    runner = OnPolicyRunner(env, env_settings(env), log_dir=None)
    before = [p.clone() for p in runner.alg.get_policy().parameters()]
    runner.learn(2, init_at_random_ep_len=True)
    after = runner.alg.get_policy().parameters()
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    capsys.readouterr()


def env_settings(env):
    return PpoConfig(**env.cfg["ppo"]).rsl_settings()
