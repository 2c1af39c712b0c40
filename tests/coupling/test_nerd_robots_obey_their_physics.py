"""CartPole, double pendulum and Franka: masses, forces and time steps are those their files promise."""

import math

import mujoco
import numpy as np
import pytest
import torch

from nerd_core.cartpole import CartPole
from nerd_coupling.grounds import nerd_ground, nerd_grounds
from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Terrain
from nerd_coupling.worlds import MujocoWorlds


def stepped(robot, terrain, state, control):
    """One model step of C MuJoCo in float64."""
    mj_model = build_model(robot, terrain)
    data = mujoco.MjData(mj_model)
    rows = []
    for row, effort in zip(state.numpy(), control.numpy(), strict=True):
        mujoco.mj_resetData(mj_model, data)
        data.qpos[:], data.qvel[:] = np.split(row, [robot.spec.nq])
        data.ctrl[:] = effort
        mujoco.mj_step(mj_model, data, nstep=robot.spec.substeps)
        rows.append(np.concatenate((data.qpos, data.qvel)))
    return torch.from_numpy(np.stack(rows))


def uniform(rows, reach, seed=0):
    reach = torch.tensor(reach, dtype=torch.float64)
    share = torch.rand(rows, len(reach), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (2 * share - 1) * reach


def test_cartpole_is_the_robot_of_nerd_core():
    assert load_robot("cartpole").spec == CartPole().robot()
    assert load_robot("cartpole").spec.digest() == CartPole().robot().digest()


def test_a_cartpole_step_within_the_rail_equals_nerd_cores_teacher():
    robot, teacher = load_robot("cartpole"), CartPole()
    state = uniform(200, [3.5, math.pi, 10.0, 10.0])
    force = uniform(200, [1500.0], seed=1)
    inside = (state[:, 0] + state[:, 2] * robot.spec.dt).abs() < 3.9
    after = stepped(robot, Terrain(), state[inside], force[inside])
    # The same equations and the same semi-implicit Euler steps: rounding is all that differs.
    after[:, 1] = torch.remainder(after[:, 1] + math.pi, 2 * math.pi) - math.pi
    torch.testing.assert_close(after, teacher.step(state[inside], force[inside]), rtol=0, atol=1e-11)
    assert inside.sum() > 150


def test_beyond_the_rail_a_spring_pushes_as_in_nerd_cores_teacher_and_never_pulls():
    robot, teacher = load_robot("cartpole"), CartPole()
    state = torch.tensor([[4.2, 0.3, 1.0, -2.0], [-4.1, 2.0, -6.0, 3.0], [4.3, -1.0, -2.0, 0.0]], dtype=torch.float64)
    force = torch.tensor([[200.0], [-1500.0], [0.0]], dtype=torch.float64)
    after = stepped(robot, Terrain(), state, force)
    true = teacher.step(state, force)
    free = teacher.step(state - torch.tensor([1.0, 0, 0, 0]) * state[:, :1].sign() * 3, force)
    # At its least impedance the limit has 0.005 kg of inertia of its own, a ten-thousandth of the cart's.
    assert (after - true).abs().max() < 2e-4
    assert (true - free)[:, 2].abs().min() > 0.2  # the spring matters here
    # Leaving the spring fast the teacher's damper pulls; a limit lets go.
    leaving = torch.tensor([[4.001, 0.0, -9.0, 0.0]], dtype=torch.float64)
    none = torch.zeros(1, 1, dtype=torch.float64)
    gone = leaving - torch.tensor([[2.0, 0, 0, 0]])
    there, here = (stepped(robot, Terrain(), start, none)[0, 2] for start in (leaving, gone))
    assert float((there - here).abs()) < 1e-3


def test_the_pendulums_links_are_capsules_of_density_500():
    mj_model = build_model(load_robot("double-pendulum"), Terrain())
    r, length = 0.1, 1.5
    tube, ball = 500 * math.pi * r**2 * length, 500 * 4 / 3 * math.pi * r**3
    along = (tube / 2 + ball * 2 / 5) * r**2
    across = tube * (r**2 / 4 + length**2 / 12) + ball * (2 / 5 * r**2 + 3 / 8 * r * length + length**2 / 4)
    for name in ("link1", "link2"):
        link = mj_model.body(name)
        assert float(link.mass[0]) == pytest.approx(tube + ball, rel=1e-12)
        # NeRD adds 0.1 kg m² to each link.
        np.testing.assert_allclose(sorted(link.inertia), sorted([along + 0.1, across + 0.1, across + 0.1]), rtol=1e-12)


# Angles [rad] at which the far end of link 2, at 0.05 m, lies 0.05 m inside the level ground.
TOUCHING = (-1.0, -math.asin((2 - 1.5 * math.sin(1.0) - 0.05) / 1.5) + 1.0)


def contact(qvel, terrain=None):
    """Force on the pendulum [N], velocity and acceleration of the touching point; all along x, y, z."""
    robot = load_robot("double-pendulum")
    mj_model = build_model(robot, terrain or nerd_ground("c1"))
    data = mujoco.MjData(mj_model)
    data.qpos[:], data.qvel[:] = TOUCHING, qvel
    mujoco.mj_forward(mj_model, data)
    (one,) = data.contact
    assert one.dist == pytest.approx(-0.05, abs=1e-9)
    force = np.zeros(6)
    mujoco.mj_contactForce(mj_model, data, 0, force)
    world = one.frame.reshape(3, 3).T @ force[:3]
    if mj_model.geom(int(one.geom[0])).name != "floor":
        world = -world
    jacobian = np.zeros((3, 2))
    mujoco.mj_jac(mj_model, data, jacobian, None, one.pos, mj_model.body("link2").id)
    point, step = jacobian @ data.qvel, 1e-6
    data.qpos[:] += step * data.qvel
    mujoco.mj_kinematics(mj_model, data)
    mujoco.mj_comPos(mj_model, data)
    later = np.zeros((3, 2))
    mujoco.mj_jac(mj_model, data, later, None, one.pos + step * point, mj_model.body("link2").id)
    acceleration = jacobian @ data.qacc + (later - jacobian) @ data.qvel / step
    return world, point, acceleration


def test_the_ground_pushes_the_pendulum_with_nerds_spring_and_damper():
    for qvel in ((0.0, 0.0), (-0.3, 0.1), (-1.0, -2.0), (0.2, 0.0)):
        (_, _, normal), (_, _, speed), _ = contact(qvel)
        expected = max(0.0, 1e4 * 0.05 - 1e3 * speed)
        # The convex friction cone adds μ · 2e3 N s/m / 200 of the sliding speed: 5 N s/m.
        assert normal == pytest.approx(expected, rel=0.02, abs=15)


def test_friction_is_coulombs_when_fast_and_viscous_below():
    (sideways, _, normal), (slide, _, _), _ = contact((-1.5, 0.5))
    assert abs(slide) > 1.0
    assert sideways == pytest.approx(-math.copysign(0.5 * normal, slide), rel=1e-3)
    (sideways, _, normal), (slide, _, _), (rate, _, _) = contact((-0.02, 0.01))
    assert abs(sideways) < 0.5 * normal
    # 2e3 N s/m of damping, and a virtual mass of impratio · d / invweight0 = 200 · 1e-4 / 0.010928 kg.
    assert sideways == pytest.approx(-2e3 * slide - 200 * 1e-4 / 0.01092791 * rate, rel=0.02)
    (sideways, _, normal), _, _ = contact((-1.5, 0.5), Terrain(floor_friction=0.9))
    assert abs(sideways) == pytest.approx(0.9 * normal, rel=1e-3)


def test_nerds_grounds_are_the_published_ones_turned_to_z_up():
    assert nerd_grounds() == ("none", "c1", "c2", "c3", "c4", "c5", "c6")
    heights = {"none": -15.5, "c1": 0.0, "c3": 0.5, "c4": -0.5, "c5": -0.3}
    for name, height in heights.items():
        ground = nerd_ground(name)
        assert ground.floor_normal == pytest.approx((0, 0, 1))
        assert ground.floor_offset == pytest.approx(height)
    # c6: the vertical turned by π/8 about x leans towards NeRD's +z, our -y.
    assert nerd_ground("c6").floor_normal == pytest.approx((0, -math.sin(math.pi / 8), math.cos(math.pi / 8)))
    # c2: Rz Ry Rx (0, 1, 0) by matrices, then x, y, z -> x, -z, y; the plane holds the point 0.2 m up.
    a, b, c = math.pi / 8, math.pi / 16, math.pi / 16
    rx = np.array([[1, 0, 0], [0, math.cos(a), -math.sin(a)], [0, math.sin(a), math.cos(a)]])
    ry = np.array([[math.cos(b), 0, math.sin(b)], [0, 1, 0], [-math.sin(b), 0, math.cos(b)]])
    rz = np.array([[math.cos(c), -math.sin(c), 0], [math.sin(c), math.cos(c), 0], [0, 0, 1]])
    x, y, z = rz @ ry @ rx @ [0, 1, 0]
    ground = nerd_ground("c2")
    assert ground.floor_normal == pytest.approx((x, -z, y))
    assert ground.floor_offset == pytest.approx(0.2 * y)
    with pytest.raises(ValueError, match=r"ground 'c7': expected one of none, c1"):
        nerd_ground("c7")


def test_the_pendulum_keeps_its_energy_out_of_reach_of_the_ground():
    robot = load_robot("double-pendulum")
    mj_model = build_model(robot, nerd_ground("none"))
    mj_model.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_ENERGY
    mj_model.opt.timestep = 1e-4
    data = mujoco.MjData(mj_model)
    data.qpos[:] = 0.4, 1.0
    mujoco.mj_forward(mj_model, data)
    before = data.energy.sum()
    mujoco.mj_step(mj_model, data, nstep=3000)
    mujoco.mj_forward(mj_model, data)
    # Semi-implicit Euler at a tenth of a millisecond; kinetic energies are hundreds of joules.
    assert data.energy[1] > 100
    assert data.energy.sum() == pytest.approx(before, abs=1.0)


def test_franka_weighs_what_the_published_description_says_and_feels_no_gravity():
    robot = load_robot("franka")
    mj_model = build_model(robot, Terrain())
    # Panda, mujoco_menagerie: 17.4519 kg less the 0.629769 kg of the base link, which never moves.
    assert mj_model.body_mass.sum() == pytest.approx(17.451901 - 0.629769, abs=1e-6)
    spec = robot.spec
    assert (spec.nq, spec.nv, spec.nu, spec.substeps) == (7, 7, 7, 9)
    assert spec.dt == pytest.approx(1 / 120)
    assert all(joint.continuous for joint in spec.joints)
    assert spec.effort_limit == (100.0,) * 4 + (20.0,) * 3
    with MujocoWorlds(robot, Terrain(), 1, threads=1) as worlds:
        still = worlds.state
        assert torch.equal(worlds.step(torch.zeros(1, 7)), still)


def test_frankas_hand_hangs_where_the_published_lengths_put_it():
    mj_model = build_model(load_robot("franka"), Terrain())
    data = mujoco.MjData(mj_model)
    mujoco.mj_kinematics(mj_model, data)
    # At zero angles: 0.333 + 0.316 + 0.384 m up the arm, 0.088 m forward, then 0.107 m down to the flange.
    np.testing.assert_allclose(data.body("hand").xpos, [0.088, 0, 0.333 + 0.316 + 0.384 - 0.107], atol=1e-12)
