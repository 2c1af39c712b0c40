"""States across the bridge to Newton, with C MuJoCo as the oracle for poses and velocities."""

from dataclasses import replace

import mujoco
import newton
import numpy as np
import pytest
import torch
import warp as wp

from nerd_coupling.newton_robot import add_robot, find_robot
from nerd_coupling.robots import load_robot

WORLDS = 3
OFFSET = "0.21 -0.17 0.13"  # centre of mass of the base, far from its origin [m]


@pytest.fixture(scope="module")
def robot():
    """Go2 whose base's mass lies far from its origin."""
    go2 = load_robot("go2")
    return replace(
        go2, mjcf=go2.mjcf.replace('pos="0.021112 0 -0.005366" mass="6.921"', f'pos="{OFFSET}" mass="6.921"')
    )


@pytest.fixture(scope="module")
def placed(robot):
    one = newton.ModelBuilder()
    add_robot(one, robot)
    builder = newton.ModelBuilder()
    builder.replicate(one, WORLDS)
    builder.add_ground_plane()
    return find_robot(builder.finalize(device="cpu"), robot)


def states(robot, rows=WORLDS):
    """Turned, the first by 90 degrees about the vertical, and moving in every coordinate."""
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(rows, robot.spec.state_size, generator=generator)
    state[:, 7:19] = torch.tensor(robot.home_qpos)[7:] + 0.3 * state[:, 7:19]
    state[0, 3:7] = torch.tensor([0.5**0.5, 0.0, 0.0, 0.5**0.5])
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    return state


def mujocos_bodies(robot, state):
    """Poses (links, 7), x y z and quaternion x y z w, and velocities of the centres of mass and rates, (links, 6)."""
    model = mujoco.MjModel.from_xml_string(robot.mjcf)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = np.split(state.double().numpy(), [model.nq])
    mujoco.mj_forward(model, data)
    pose, twist = np.zeros((len(robot.spec.bodies), 7)), np.zeros((len(robot.spec.bodies), 6))
    for n, body in enumerate(robot.spec.bodies):
        i = model.body(body.name).id
        jacobian = np.zeros((2, 3, model.nv))
        mujoco.mj_jacBodyCom(model, data, jacobian[0], jacobian[1], i)
        pose[n] = [*data.xpos[i], *data.xquat[i, [1, 2, 3, 0]]]
        twist[n] = (jacobian @ data.qvel).ravel()
    return pose, twist


def test_newtons_bodies_move_as_mujocos_where_the_mass_is_off_centre(robot, placed):
    state, there = states(robot), placed.model.state()
    placed.write(state, there)
    pose = there.body_q.numpy().reshape(WORLDS, -1, 7)
    twist = there.body_qd.numpy().reshape(WORLDS, -1, 6)
    for world in range(WORLDS):
        links = placed.placement.links[world] - placed.placement.links[world, 0]
        wanted_pose, wanted_twist = mujocos_bodies(robot, state[world])
        got = pose[world, links]
        got[:, 3:] *= np.sign((got[:, 3:] * wanted_pose[:, 3:]).sum(-1, keepdims=True))
        np.testing.assert_allclose(got, wanted_pose, atol=2e-6)
        # Rates of some rad/s over levers of half a metre, float32.
        np.testing.assert_allclose(twist[world, links], wanted_twist, atol=2e-5)


def test_a_round_trip_through_newton_gives_mujocos_state_back(robot, placed):
    state, there = states(robot), placed.model.state()
    placed.write(state, there)
    torch.testing.assert_close(placed.read(there), state, atol=2e-6, rtol=1e-6)
    again = placed.model.state()
    placed.write(placed.read(there), again)
    torch.testing.assert_close(placed.read(again), state, atol=4e-6, rtol=1e-6)


def test_newton_holds_the_velocity_of_the_centre_of_mass_along_world_axes(robot, placed):
    # Turned by 90 degrees about z and spinning about z: the centre of mass at R c moves by ω × R c, by hand.
    state = torch.zeros(WORLDS, robot.spec.state_size)
    state[:, 3] = state[:, 6] = 0.5**0.5
    state[:, 19 + 5] = 2.0
    there = placed.model.state()
    placed.write(state, there)
    linear = there.joint_qd.numpy().reshape(WORLDS, -1)[0, :6]
    x, y, _ = (float(v) for v in OFFSET.split())
    np.testing.assert_allclose(linear, [-2 * x, 2 * -y, 0.0, 0.0, 0.0, 2.0], atol=1e-6)


@pytest.mark.slow  # compiles MuJoCo Warp for this model
def test_newtons_own_mujoco_solver_reads_the_state_as_mujoco_has_it(robot, placed):
    state, there = states(robot), placed.model.state()
    placed.write(state, there)
    after, dt = placed.model.state(), 1e-6
    solver = newton.solvers.SolverMuJoCo(placed.model, use_mujoco_contacts=True, njmax=200, nconmax=100)
    solver.step(there, after, placed.model.control(), None, dt)
    spec = robot.spec
    # Within a microsecond nothing moves further than its speed times that; a frame mixed up is off by 0.1 and more.
    torch.testing.assert_close(wp.to_torch(solver.mjw_data.qpos), state[:, : spec.nq], atol=1e-4, rtol=0)
    torch.testing.assert_close(wp.to_torch(solver.mjw_data.qvel)[:, :6], state[:, spec.nq :][:, :6], atol=5e-2, rtol=0)


def test_only_the_chosen_worlds_are_written(robot, placed):
    there = placed.model.state()
    before = placed.read(there)
    state = states(robot)
    placed.write(state, there, torch.tensor([False, True, False]))
    assert torch.equal(placed.read(there)[[0, 2]], before[[0, 2]])
    torch.testing.assert_close(placed.read(there)[1], state[1], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("way", ["strided", "transposed", "expanded"])
def test_tensors_of_any_layout_are_written_as_contiguous_ones(robot, placed, way):
    state = states(robot)
    if way == "strided":
        wide = torch.full((2 * WORLDS, 2 * robot.spec.state_size), torch.nan)
        wide[::2, ::2] = state
        given = wide[::2, ::2]
    elif way == "transposed":
        given = state.T.contiguous().T
    else:
        state = state[:1].repeat(WORLDS, 1)
        given = state[:1].expand(WORLDS, -1)
    assert not given.is_contiguous()
    plain, other = placed.model.state(), placed.model.state()
    placed.write(state, plain)
    placed.write(given, other)
    for name in ("joint_q", "joint_qd", "body_q", "body_qd"):
        assert np.array_equal(getattr(plain, name).numpy(), getattr(other, name).numpy()), name


def test_newton_arrays_with_strides_are_read_and_written_as_contiguous_ones(robot, placed):
    state, plain, strided = states(robot), placed.model.state(), placed.model.state()
    for name in ("joint_q", "joint_qd"):
        count = len(getattr(strided, name))
        setattr(strided, name, wp.from_torch(torch.zeros(count, 3))[:, 1])
        assert not getattr(strided, name).is_contiguous
    for there in (plain, strided):
        placed.write(state, there)
    assert torch.equal(placed.read(strided), placed.read(plain))
    assert np.array_equal(strided.body_qd.numpy(), plain.body_qd.numpy())


def test_arrays_of_another_model_are_refused(robot, placed):
    there = placed.model.state()
    there.joint_q = wp.zeros(7, dtype=float, device="cpu")
    with pytest.raises(ValueError, match=r"joint_q has shape \(7,\).*expected \(57,\)"):
        placed.read(there)
    with pytest.raises(ValueError, match="state has shape"):
        placed.write(states(robot)[:2], placed.model.state())
