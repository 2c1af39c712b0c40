"""The environment is a Gymnasium VectorEnv, by Gymnasium's own checks, spaces and wrappers."""

import dataclasses

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.utils.passive_env_checker import check_action_space, check_obs, check_observation_space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

from nerd_rl import Environment, GymEnv

N = 3


@pytest.fixture
def env(swing_up, cartpole_physics):
    task = dataclasses.replace(swing_up, episode_steps=4)
    found = GymEnv(Environment(task, cartpole_physics("teacher", N)))
    found.action_space.seed(0)
    yield found
    found.close()


def rollout(env, seed, steps=6):
    env.action_space.seed(1)
    observations = [env.reset(seed=seed)[0]]
    for _ in range(steps):
        observations.append(env.step(env.action_space.sample()))
    return observations


def test_spaces_are_those_that_gymnasium_accepts(env):
    assert isinstance(env, VectorEnv)
    check_observation_space(env.single_observation_space)
    check_action_space(env.single_action_space)
    assert env.observation_space == gymnasium.vector.utils.batch_space(env.single_observation_space, N)
    assert env.action_space.shape == (N, 1)


def test_what_reset_and_step_give_has_the_promised_types_and_shapes(env):
    observation, info = env.reset(seed=0)
    check_obs(observation, env.observation_space, "reset")
    assert info == {}
    for _ in range(6):
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        check_obs(observation, env.observation_space, "step")
        assert (reward.dtype, reward.shape) == (np.float64, (N,))
        assert (terminated.dtype, terminated.shape) == (np.bool_, (N,))
        assert (truncated.dtype, truncated.shape) == (np.bool_, (N,))
        assert info["nonfinite"].shape == (N,)


def test_equal_seeds_give_equal_episodes_to_the_bit(env):
    assert data_equivalence(rollout(env, 5), rollout(env, 5), exact=True)
    assert not data_equivalence(rollout(env, 5)[0], rollout(env, 6)[0], exact=True)


def test_a_world_whose_episode_ends_starts_anew_in_the_same_step(env):
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    env.reset(seed=0)
    for t in range(4):
        observation, _, _, truncated, info = env.step(env.action_space.sample())
        assert truncated.all() == (t == 3)
        assert ("final_obs" in info) == (t == 3)
    assert info["_final_obs"].all()
    last = np.stack(list(info["final_obs"]))
    check_obs(last, env.observation_space, "step")
    assert not np.array_equal(last, observation)
    # Hanging again, whatever the last action did.
    assert (observation[:, 2] < -0.9).all()


def test_given_arrays_belong_to_the_caller(env):
    first, _ = env.reset(seed=0)
    kept = first.copy()
    second = env.step(env.action_space.sample())[0]
    second[:] = np.nan
    assert np.array_equal(first, kept)
    assert np.isfinite(env.step(env.action_space.sample())[0]).all()


def test_gymnasiums_own_wrappers_accept_it(env):
    wrapped = DictInfoToList(RecordEpisodeStatistics(env))
    wrapped.reset(seed=0)
    for _ in range(4):
        *_, infos = wrapped.step(np.zeros((N, 1), np.float32))
    assert [int(info["episode"]["l"]) for info in infos] == [4] * N


def test_options_are_refused(env):
    with pytest.raises(ValueError, match="options"):
        env.reset(options={"low": 0.1})
