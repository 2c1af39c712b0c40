"""Fixed bases and tilted planes: kinematics and contact rows against C MuJoCo on the same states."""

import math

import mujoco
import numpy as np
import pytest
import torch

from nerd_contact import (
    ContactEncoderConfig,
    ContactSetEncoder,
    FixedContactConfig,
    FixedContactFeatures,
    Kinematics,
    PrimitiveCollider,
)
from nerd_coupling.grounds import random_grounds
from nerd_coupling.robots import build_model, load_robot, set_terrain
from nerd_coupling.terrain import Terrain, scene


def states(spec, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(count, spec.state_size, dtype=torch.float64, generator=generator)


def placed(mj_model, data, row):
    data.qpos[:], data.qvel[:] = np.split(row.numpy(), [mj_model.nq])
    mujoco.mj_forward(mj_model, data)


@pytest.mark.parametrize("name", ["cartpole", "double-pendulum", "franka"])
def test_link_poses_and_velocities_of_a_fixed_base_equal_mujocos(name):
    robot = load_robot(name)
    mj_model = build_model(robot, Terrain())
    data = mujoco.MjData(mj_model)
    state = states(robot.spec, 30)
    motion = Kinematics(robot.spec)(state)
    ids = [mj_model.body(body.name).id for body in robot.spec.bodies]
    for n, row in enumerate(state):
        placed(mj_model, data, row)
        np.testing.assert_allclose(motion.pos[n], data.xpos[ids], atol=1e-12)
        np.testing.assert_allclose(motion.mat[n].reshape(-1, 9), data.xmat[ids], atol=1e-12)
        for k, body in enumerate(ids):
            twist = np.zeros(6)
            mujoco.mj_objectVelocity(mj_model, data, mujoco.mjtObj.mjOBJ_XBODY, body, twist, 0)
            np.testing.assert_allclose(motion.angvel[n, k], twist[:3], atol=1e-11)
            np.testing.assert_allclose(motion.linvel[n, k], twist[3:], atol=1e-11)


@pytest.fixture(scope="module")
def pendulum():
    return load_robot("double-pendulum")


@pytest.fixture(scope="module")
def grounds(pendulum):
    """States over random planes, shifted so that many ends are near or inside."""
    state = states(pendulum.spec, 200, seed=1)
    planes = random_grounds(pendulum, state, torch.Generator().manual_seed(2))
    return state, [
        Terrain(floor_friction=0.5, floor_normal=plane.floor_normal, floor_offset=plane.floor_offset + shift)
        for plane, shift in zip(planes, np.linspace(0.0, 1.5, 200).astype(np.float32).tolist(), strict=True)
    ]


def test_rows_of_capsule_ends_on_tilted_planes_are_mujocos_contacts(pendulum, grounds):
    state, planes = grounds
    margin = 0.4
    rows = PrimitiveCollider(pendulum.spec, pendulum.fixed_points, margin=margin)(
        state, {k: v.double() for k, v in scene(planes, num_boxes=0).items()}
    )
    mj_model = build_model(pendulum, planes[0])
    mj_model.pair_margin[:], mj_model.pair_gap[:] = 0.0, margin
    data = mujoco.MjData(mj_model)
    compared = 0
    for n, (row, plane) in enumerate(zip(state, planes, strict=True)):
        set_terrain(mj_model, plane)
        placed(mj_model, data, row)
        listed = {}
        for contact in data.contact:
            names = [mj_model.geom(int(g)).name for g in contact.geom]
            sign = 1.0 if names[0] == "floor" else -1.0
            normal = sign * contact.frame[:3]
            np.testing.assert_allclose(normal, plane.floor_normal, atol=1e-7)
            # MuJoCo reports the middle between the surfaces; a row holds the robot's own surface.
            listed.setdefault(names[sign > 0].split("_")[0], []).append(
                (contact.dist, contact.pos + normal * contact.dist / 2)
            )
        for k, probe in enumerate(pendulum.fixed_points):
            geom = probe.name.split("_")[0]
            near = [c for c in listed.get(geom, []) if np.linalg.norm(c[1] - rows.point[n, k].numpy()) < 1e-5]
            assert bool(rows.mask[n, k]) == bool(near)
            if near:
                compared += 1
                # Planes are float32; the normal's length differs from 1 by that.
                assert float(rows.gap[n, k]) == pytest.approx(near[0][0], abs=1e-6)
                np.testing.assert_allclose(rows.normal[n, k], plane.floor_normal, atol=1e-7)
    assert compared > 200


def test_a_plane_of_height_zero_reads_as_no_plane_at_all(pendulum):
    state = states(pendulum.spec, 50)
    collider = PrimitiveCollider(pendulum.spec, pendulum.probes, margin=2.0)
    level = {"friction": torch.full((50, 1), 0.5, dtype=torch.float64)}
    told = {k: v.double() for k, v in scene([Terrain(floor_friction=0.5)] * 50, num_boxes=0).items()}
    assert sorted(told) == ["friction", "plane_normal", "plane_offset"]
    for one, other in zip(collider(state, level), collider(state, told), strict=True):
        assert torch.equal(one, other)


def test_a_floating_robot_sees_a_tilted_plane_in_its_own_frame():
    robot = load_robot("go2")
    state = torch.randn(20, robot.spec.state_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    collider = PrimitiveCollider(robot.spec, robot.probes, margin=10.0, ground_only=True)
    level = collider(state, {"friction": torch.ones(20, 1, dtype=torch.float64)})
    # Turn the world by a right angle about y: the plane z = 0 becomes x = 0, and nothing changes in the base frame.
    turned = state.clone()
    turned[:, 0], turned[:, 2] = state[:, 2], -state[:, 0]
    half = math.sqrt(0.5)
    w, x, y, z = state[:, 3:7].unbind(-1)
    turned[:, 3:7] = torch.stack([half * (w - y), half * (x + z), half * (y + w), half * (z - x)], -1)
    nq = robot.spec.nq
    turned[:, nq], turned[:, nq + 2] = state[:, nq + 2], -state[:, nq]
    wall = {
        "friction": torch.ones(20, 1, dtype=torch.float64),
        "plane_normal": torch.tensor([[1.0, 0, 0]], dtype=torch.float64).expand(20, 3),
        "plane_offset": torch.zeros(20, dtype=torch.float64),
    }
    for one, other in zip(level, collider(turned, wall), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_set_and_fixed_points_both_see_the_tilt(pendulum):
    state = states(pendulum.spec, 1).float().expand(2, -1)
    level = {"friction": torch.full((1, 1), 0.5)}
    height = float(PrimitiveCollider(pendulum.spec, pendulum.fixed_points, margin=9.0)(state[:1], level).gap.min())
    # The same height above two planes of different tilt.
    tilted = (0.6, 0.0, 0.8)
    where = scene([Terrain(floor_normal=tilted)], num_boxes=0)
    other = float(PrimitiveCollider(pendulum.spec, pendulum.fixed_points, margin=9.0)(state[:1], where).gap.min())
    planes = [
        Terrain(floor_friction=0.5, floor_offset=height - 0.05),
        Terrain(floor_friction=0.5, floor_normal=tilted, floor_offset=other - 0.05),
    ]
    where = scene(planes, num_boxes=0)
    points = pendulum.fixed_points
    for features in (
        ContactSetEncoder(ContactEncoderConfig(margin=0.4), pendulum.spec, pendulum.probes),
        FixedContactFeatures(FixedContactConfig(margin=0.4), pendulum.spec, points),
    ):
        with torch.no_grad():
            out = features(features.observe(state, where))
        assert out.shape == (2, features.out_size)
        assert (out[0] - out[1]).abs().max() > 1e-3


def test_gradients_reach_the_joints_through_a_tilted_plane(pendulum, grounds):
    state, planes = grounds
    where = {k: v.double() for k, v in scene(planes[:3], num_boxes=0).items()}
    collider = PrimitiveCollider(pendulum.spec, pendulum.fixed_points, margin=9.0)
    assert torch.autograd.gradcheck(lambda s: collider(s, where).gap, (state[:3].clone().requires_grad_(True),))


def test_a_plane_moved_in_a_model_equals_a_plane_compiled_there(pendulum, grounds):
    state, planes = grounds
    moved = build_model(pendulum, Terrain(floor_friction=0.5))
    for row, plane in list(zip(state, planes, strict=True))[150:170]:
        set_terrain(moved, plane)
        spec = mujoco.MjSpec.from_string(pendulum.mjcf)
        floor = spec.geom("floor")
        floor.pos = [c * plane.floor_offset for c in plane.floor_normal]
        floor.quat = plane.floor_quaternion
        fresh = spec.compile()
        found = []
        for mj_model in (moved, fresh):
            data = mujoco.MjData(mj_model)
            placed(mj_model, data, row)
            found.append((data.contact.dist.copy(), data.contact.pos.copy(), data.qacc.copy()))
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12)
    # And back again: the level ground is z = 0 once more.
    set_terrain(moved, Terrain(floor_friction=0.5))
    data = mujoco.MjData(moved)
    mujoco.mj_kinematics(moved, data)
    np.testing.assert_array_equal(data.geom("floor").xpos, np.zeros(3))
    np.testing.assert_array_equal(data.geom("floor").xmat, np.eye(3).ravel())


@pytest.mark.parametrize("normal", [(0.0, 0.0, -1.0), (0.6, 0.0, 0.8), (0.0, -1.0, 0.0), (-0.48, 0.6, -0.64)])
def test_the_quaternion_of_a_plane_turns_z_onto_its_normal(normal):
    turned = np.zeros(3)
    mujoco.mju_rotVecQuat(turned, np.array([0.0, 0.0, 1.0]), np.array(Terrain(floor_normal=normal).floor_quaternion))
    np.testing.assert_allclose(turned, normal, atol=1e-12)


def test_a_normal_that_is_no_unit_vector_is_refused():
    with pytest.raises(ValueError, match="floor_normal must be three numbers of length 1"):
        Terrain(floor_normal=(0.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="floor_offset must be a finite distance"):
        Terrain(floor_offset=float("nan"))
