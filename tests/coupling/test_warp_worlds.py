"""MuJoCo Warp worlds against C MuJoCo, and their isolation from each other."""

import pytest
import torch

from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain
from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_coupling.worlds import MujocoWorlds

HEIGHTS = [Terrain.platform(h, front=0.3) for h in (0.06, 0.14, 0.22)]


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


@pytest.fixture(scope="module")
def worlds(go2):
    # One set of worlds for the module: compiling the kernels takes half a minute when uncached.
    return MjWarpWorlds(go2, HEIGHTS, 3)


def _start(robot, rows=3):
    state = torch.tensor(robot.home_state).repeat(rows, 1)
    state[:, 0], state[:, 2] = 0.05, 0.42
    return state


def _controls(robot, horizon, rows=3, seed=0):
    noise = torch.randn(rows, 1, robot.spec.nu, generator=torch.Generator().manual_seed(seed))
    return (torch.tensor(robot.home_ctrl) + 0.2 * noise).repeat(1, horizon, 1)


def test_warp_and_c_mujoco_agree_over_a_short_horizon_on_every_terrain(go2, worlds):
    state, controls = _start(go2), _controls(go2, 10)
    warp = worlds.rollout(state, controls)
    with MujocoWorlds(go2, HEIGHTS, 3, threads=1) as reference:
        exact = reference.rollout(state, controls)
    # The robot drops onto three different decks within these 0.2 s (40 physics steps). float32
    # against float64 with velocities of order 10 rad/s: rounding 1e-6, times about 100 for contacts
    # that open or close at slightly different instants. A wrong terrain or gain is off by > 1.
    torch.testing.assert_close(warp, exact, atol=1e-3, rtol=1e-4)
    assert (exact[0, -1] - exact[2, -1]).abs().max() > 0.1
    assert not worlds.overflow.any()


def test_a_rollout_repeats_bit_for_bit_after_a_different_one(go2, worlds):
    state, controls = _start(go2), _controls(go2, 5)
    first = worlds.rollout(state, controls)
    worlds.rollout(state + 0.03, _controls(go2, 5, seed=1))
    assert torch.equal(worlds.rollout(state, controls), first)


def test_a_rollout_equals_stepping_and_leaves_the_worlds_where_they_are(go2, worlds):
    state, controls = _start(go2), _controls(go2, 5)
    worlds.set_state(state)
    stepped = [worlds.state, worlds.step(controls[:, 0])]
    rolled = worlds.rollout(state, controls)
    stepped += [worlds.step(controls[:, t]) for t in range(1, 5)]
    assert torch.equal(torch.stack(stepped, dim=1), rolled)


def test_the_captured_step_equals_the_plain_one_bit_for_bit(go2, worlds):
    state, controls = _start(go2), _controls(go2, 5)
    plain = MjWarpWorlds(go2, HEIGHTS, 3, use_graph=False)
    assert torch.equal(worlds.rollout(state, controls), plain.rollout(state, controls))


def test_views_share_memory_with_the_simulator(go2, worlds):
    worlds.set_state(_start(go2))
    worlds.qpos[1, 2] = 0.5
    assert worlds.warp_data.qpos.numpy()[1, 2] == 0.5
    assert worlds.state[1, 2] == 0.5


def test_resetting_a_nan_world_revives_it_and_leaves_the_others_bit_identical(go2, worlds):
    state, controls = _start(go2), _controls(go2, 6)
    worlds.set_state(state)
    undisturbed = [worlds.step(controls[:, t]) for t in range(6)]

    broken = state.clone()
    broken[1] = torch.nan
    worlds.set_state(broken)
    for t in range(3):
        stepped = worlds.step(controls[:, t])
        assert stepped[1].isnan().all()
        assert torch.equal(stepped[[0, 2]], undisturbed[t][[0, 2]])
    worlds.set_state(state, mask=torch.tensor([False, True, False]))
    for t in range(3):  # the controls are constant in time
        stepped = worlds.step(controls[:, t])
        assert torch.equal(stepped[1], undisturbed[t][1])
        assert torch.equal(stepped[[0, 2]], undisturbed[t + 3][[0, 2]])


def test_a_world_that_blows_up_turns_into_nan(go2, worlds):
    state = _start(go2)
    state[1, 25:] = 1e12
    worlds.set_state(state)
    stepped = worlds.step(_controls(go2, 1)[:, 0])
    assert stepped[1].isnan().all()
    assert stepped[[0, 2]].isfinite().all()


def test_dropped_contacts_are_reported_until_the_state_is_set_again(go2):
    lying = _start(go2, rows=2)
    lying[:, 2] = 0.02  # trunk, shins and feet all in the ground
    cramped = MjWarpWorlds(go2, Terrain(), 2, njmax=8)
    cramped.set_state(lying)
    assert not cramped.overflow.any()
    standing = _start(go2, rows=2)
    standing[:, 2] = 1.0
    cramped.set_state(standing, mask=torch.tensor([False, True]))
    cramped.step(torch.tensor(go2.home_ctrl).repeat(2, 1))
    assert cramped.overflow.tolist() == [True, False]
    cramped.set_state(standing)
    assert not cramped.overflow.any()
    states = cramped.rollout(torch.stack([lying[0], standing[0]]), _controls(go2, 2, rows=2))
    assert states[0, 1:].isnan().all()
    assert states[1].isfinite().all()
    assert not cramped.overflow.any()


def test_the_terrain_may_be_shared(go2):
    shared = MjWarpWorlds(go2, HEIGHTS[1], 2)
    state, controls = _start(go2, rows=2), _controls(go2, 4, rows=2)
    with MujocoWorlds(go2, HEIGHTS[1], 2, threads=1) as reference:
        exact = reference.rollout(state, controls)
    torch.testing.assert_close(shared.rollout(state, controls), exact, atol=1e-3, rtol=1e-4)


def test_what_does_not_fit_is_refused(go2, worlds):
    with pytest.raises(ValueError, match=r"state has shape \(2, 37\), expected \(3, 37\)"):
        worlds.rollout(_start(go2, rows=2), _controls(go2, 2, rows=2))
    with pytest.raises(ValueError, match=r"control has shape \(3, 11\), expected \(3, 12\)"):
        worlds.step(torch.zeros(3, 11))
    with pytest.raises(ValueError, match="terrains has 3 entries, expected 1 or nworld = 2"):
        MjWarpWorlds(go2, HEIGHTS, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is missing")
def test_a_missing_cuda_device_is_refused_before_anything_is_built(go2):
    with pytest.raises(ValueError, match="device is 'cuda:0', but no CUDA device is available"):
        MjWarpWorlds(go2, Terrain(), 1, device="cuda:0")


@pytest.mark.gpu
def test_the_captured_graph_agrees_with_c_mujoco(go2):
    on_gpu = MjWarpWorlds(go2, HEIGHTS, 3, device="cuda:0")
    state, controls = _start(go2), _controls(go2, 10)
    with MujocoWorlds(go2, HEIGHTS, 3, threads=1) as reference:
        exact = reference.rollout(state, controls)
    torch.testing.assert_close(on_gpu.rollout(state, controls).cpu(), exact, atol=1e-3, rtol=1e-4)
