"""The C MuJoCo thread pool: plain MuJoCo per world, deterministic, with divergence made visible."""

import mujoco
import numpy as np
import pytest
import torch

from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Terrain
from nerd_coupling.worlds import MujocoWorlds

HEIGHTS = [Terrain.platform(h, front=0.3) for h in (0.06, 0.14, 0.22)]


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


@pytest.fixture(scope="module")
def worlds(go2):
    with MujocoWorlds(go2, HEIGHTS, 3, threads=2) as built:
        yield built


def _start(robot, rows):
    state = torch.tensor(robot.home_state).repeat(rows, 1)
    state[:, 0], state[:, 2] = 0.05, 0.42
    return state


def _controls(robot, rows, horizon, seed=0):
    noise = torch.randn(rows, horizon, robot.spec.nu, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(robot.home_ctrl) + 0.3 * noise


def test_a_rollout_is_plain_mujoco_in_each_world_on_its_own_terrain(go2, worlds):
    state, controls = _start(go2, 3), _controls(go2, 3, 8)
    states = worlds.rollout(state, controls)
    assert states.shape == (3, 9, 37)
    assert states.dtype == torch.float32
    assert torch.equal(states[:, 0], state)
    for i, terrain in enumerate(HEIGHTS):
        mj_model = build_model(go2, terrain)
        data = mujoco.MjData(mj_model)
        data.qpos[:], data.qvel[:] = np.split(state[i].double().numpy(), [19])
        for t in range(8):
            data.ctrl[:] = controls[i, t]
            mujoco.mj_step(mj_model, data, nstep=4)
            expected = np.concatenate((data.qpos, data.qvel)).astype(np.float32)
            np.testing.assert_array_equal(states[i, t + 1].numpy(), expected)
    assert not torch.equal(states[0, -1], states[2, -1])


def test_stepping_and_rolling_out_are_the_same(go2, worlds):
    state, controls = _start(go2, 3), _controls(go2, 3, 6)
    worlds.set_state(state)
    stepped = torch.stack([worlds.state, *(worlds.step(controls[:, t]) for t in range(6))], dim=1)
    assert torch.equal(stepped, worlds.rollout(state, controls))


def test_a_rollout_repeats_bit_for_bit_after_a_different_one(go2, worlds):
    state, controls = _start(go2, 3), _controls(go2, 3, 6)
    first = worlds.rollout(state, controls)
    worlds.rollout(state + 0.05, _controls(go2, 3, 6, seed=1))
    assert torch.equal(worlds.rollout(state, controls), first)


def test_a_rollout_leaves_the_worlds_where_they_are(go2, worlds):
    worlds.set_state(_start(go2, 3))
    before = worlds.state
    worlds.rollout(_start(go2, 3) + 0.05, _controls(go2, 3, 2))
    assert torch.equal(worlds.state, before)


def test_setting_a_state_forgets_the_solver_s_warm_start(go2, worlds):
    state, controls = _start(go2, 3), _controls(go2, 3, 4)

    def run():
        worlds.set_state(state)
        return torch.stack([worlds.step(controls[:, t]) for t in range(4)])

    first = run()
    worlds.set_state(state + 0.02)
    worlds.step(controls[:, 3])
    assert torch.equal(run(), first)


def test_rollout_rows_come_in_consecutive_blocks_per_world(go2, worlds):
    state, controls = _start(go2, 6), _controls(go2, 3, 4).repeat_interleave(2, dim=0)
    states = worlds.rollout(state, controls)
    assert torch.equal(states[0::2], states[1::2])
    assert torch.equal(states[0::2], worlds.rollout(state[:3], controls[0::2]))
    with pytest.raises(ValueError, match=r"state has 4 rows.*multiple of nworld = 3"):
        worlds.rollout(state[:4], controls[:4])


def test_a_shared_terrain_takes_any_number_of_rows(go2):
    with MujocoWorlds(go2, HEIGHTS[0], 1, threads=1) as one:
        assert one.rollout(_start(go2, 5), _controls(go2, 5, 2)).shape == (5, 3, 37)


def test_the_number_of_threads_changes_nothing(go2, worlds):
    state, controls = _start(go2, 3), _controls(go2, 3, 5)
    with MujocoWorlds(go2, HEIGHTS, 3, threads=1) as single:
        assert torch.equal(single.rollout(state, controls), worlds.rollout(state, controls))
        single.set_state(state)
        worlds.set_state(state)
        assert torch.equal(single.step(controls[:, 0]), worlds.step(controls[:, 0]))


def test_diverged_rows_become_nan_from_that_step_on_and_leave_the_others_alone(
    go2, worlds, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    state, controls = _start(go2, 3), _controls(go2, 3, 4)
    clean = worlds.rollout(state, controls)
    broken = state.clone()
    broken[1, 25:] = 1e9  # finite, but its acceleration is not one MuJoCo accepts
    states = worlds.rollout(broken, controls)
    assert states[1, 1:].isnan().all()
    assert torch.equal(states[1, 0], broken[1])
    assert torch.equal(states[[0, 2]], clean[[0, 2]])
    worlds.set_state(broken)
    stepped = worlds.step(controls[:, 0])
    assert stepped[1].isnan().all()
    assert torch.equal(stepped[[0, 2]], clean[[0, 2], 1])
    # MuJoCo's own complaint is neither printed nor logged: the NaN rows say it.
    assert list(tmp_path.iterdir()) == []
    assert "WARNING" not in "".join(capfd.readouterr())


def test_resetting_a_nan_world_revives_it_and_leaves_the_others_bit_identical(go2, worlds):
    state, controls = _start(go2, 3), _controls(go2, 3, 4)
    worlds.set_state(state)
    undisturbed = [worlds.step(controls[:, t]) for t in range(4)]

    broken = state.clone()
    broken[1] = torch.nan
    worlds.set_state(broken)
    for t in range(2):
        stepped = worlds.step(controls[:, t])
        assert stepped[1].isnan().all()
        assert torch.equal(stepped[[0, 2]], undisturbed[t][[0, 2]])
    worlds.set_state(state, mask=torch.tensor([False, True, False]))
    for t in range(2):
        stepped = worlds.step(torch.where(torch.tensor([[False], [True], [False]]),
                                          controls[:, t], controls[:, t + 2]))  # fmt: skip
        assert torch.equal(stepped[1], undisturbed[t][1])
        assert torch.equal(stepped[[0, 2]], undisturbed[t + 2][[0, 2]])


def test_shapes_and_counts_that_do_not_fit_are_refused(go2, worlds):
    with pytest.raises(ValueError, match=r"state has shape \(2, 37\), expected \(3, 37\)"):
        worlds.set_state(_start(go2, 2))
    with pytest.raises(ValueError, match=r"control has shape \(3, 11\), expected \(3, 12\)"):
        worlds.step(torch.zeros(3, 11))
    with pytest.raises(ValueError, match=r"mask has shape \(2,\)"):
        worlds.set_state(_start(go2, 3), mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="terrains has 3 entries, expected 1 or nworld = 2"):
        MujocoWorlds(go2, HEIGHTS, 2)
    with pytest.raises(ValueError, match="nworld must be at least 1, got 0"):
        MujocoWorlds(go2, HEIGHTS[0], 0)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        MujocoWorlds(go2, HEIGHTS[0], 1, threads=0)
