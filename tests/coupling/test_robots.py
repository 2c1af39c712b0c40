"""The shipped Go2: what it weighs, how it stands, and that nothing of it is typed twice."""

import mujoco
import numpy as np
import pytest

from nerd_core.robot import RobotSpec
from nerd_coupling.robots import build_model, load_robot, probes, robot_spec, set_terrain
from nerd_coupling.terrain import Box, Terrain

STAIRS = Terrain(
    boxes=(
        Box(center=(0.7, 0.0, -0.42), half_size=(0.3, 0.4, 0.5), yaw=0.3, friction=1.1),
        Box(center=(1.2, 0.1, -0.3), half_size=(0.25, 0.5, 0.5)),
    ),
    floor_friction=0.9,
)


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


def _array_fields(mj_model):
    names = (n for n in dir(mj_model) if not n.startswith("_"))
    values = {n: getattr(mj_model, n) for n in names}
    return {n: v for n, v in values.items() if isinstance(v, np.ndarray)}


def _settle(mj_model, robot, seconds=2.0):
    data = mujoco.MjData(mj_model)
    data.qpos[:], data.ctrl[:] = robot.home_qpos, robot.home_ctrl
    mujoco.mj_step(mj_model, data, nstep=round(seconds / mj_model.opt.timestep))
    mujoco.mj_forward(mj_model, data)
    return data


def test_the_robot_weighs_what_the_published_description_says(go2):
    mj_model = build_model(go2, STAIRS, num_boxes=2)
    # 15.206 kg: Unitree Go2, as published in MuJoCo Menagerie; ground bodies weigh nothing.
    assert mj_model.body_mass.sum() == pytest.approx(15.206, abs=1e-3)
    assert mj_model.body_mass[mj_model.body("box0").id] == 0.0


def test_left_and_right_mirror_each_other(go2):
    mj_model = build_model(go2, Terrain())
    flip = np.array([1.0, -1.0, 1.0])
    for right in ("FR", "RR"):
        left = right[0] + "L"
        for link in ("hip", "thigh", "calf"):
            a, b = mj_model.body(f"{right}_{link}"), mj_model.body(f"{left}_{link}")
            assert a.mass == pytest.approx(b.mass)
            np.testing.assert_allclose(a.pos * flip, b.pos, atol=1e-12)
            np.testing.assert_allclose(a.ipos * flip, b.ipos, atol=1e-12)
            np.testing.assert_allclose(a.inertia, b.inertia, rtol=1e-5)
            ja, jb = (mj_model.joint(f"{side}_{link}_joint") for side in (right, left))
            np.testing.assert_array_equal(ja.axis, jb.axis)
            np.testing.assert_array_equal(ja.range, jb.range)
        feet = [mj_model.geom(f"{side}_foot") for side in (right, left)]
        np.testing.assert_array_equal(feet[0].pos * flip, feet[1].pos)
        np.testing.assert_array_equal(feet[0].size, feet[1].size)


def test_the_home_pose_settles_at_the_height_its_kinematics_give(go2):
    mj_model = build_model(go2, Terrain())
    data = _settle(mj_model, go2, seconds=4.0)  # the servos creep to rest, by half every 0.6 s
    # Thigh and shank of 0.213 m at 0.9 rad from vertical, plus the foot radius: the height that
    # stiff servos would hold. With kp 40 the legs give way by a few centimetres and no more.
    stiff = 2 * 0.213 * np.cos(0.9) + 0.0175
    assert stiff - 0.06 < data.qpos[2] < stiff + 0.005
    assert data.xmat[1, 8] > 0.99  # upright
    assert np.abs(data.qvel).max() < 0.01


def test_each_foot_touches_the_plane(go2):
    mj_model = build_model(go2, Terrain())
    data = _settle(mj_model, go2)
    floor = mj_model.geom("floor").id
    touching = {mj_model.geom(max(pair)).name for pair in data.contact.geom if floor in pair} | {
        mj_model.geom(min(pair)).name for pair in data.contact.geom if floor in pair
    }
    assert touching - {"floor"} == set(go2.foot_geoms)


def test_torque_limits_are_on(go2):
    mj_model = build_model(go2, Terrain())
    data = mujoco.MjData(mj_model)
    data.qpos[:] = go2.home_qpos
    data.ctrl[:] = mj_model.actuator_ctrlrange[:, 1]
    data.qvel[6:] = -60.0  # far enough from the target that every servo saturates
    mujoco.mj_forward(mj_model, data)
    # Manufacturer's limits: hip and thigh 23.7 N m, calf 45.43 N m.
    np.testing.assert_allclose(data.actuator_force, [23.7, 23.7, 45.43] * 4)
    assert go2.spec.effort_limit == (23.7, 23.7, 45.43) * 4


def test_the_spec_is_read_from_the_model_and_the_ground_does_not_change_it(go2):
    spec = go2.spec
    assert (spec.nq, spec.nv, spec.nu, spec.dt) == (19, 18, 12, 0.02)
    assert spec.kp == (40.0,) * 12
    assert spec.kd == (1.0,) * 12
    assert spec.bodies[0].name == "base"
    assert [spec.bodies[j.body].name for j in spec.joints[:3]] == ["FR_hip", "FR_thigh", "FR_calf"]
    on_stairs = build_model(go2, STAIRS, num_boxes=2)
    assert robot_spec(on_stairs, name="go2", substeps=4).differences(spec) == []
    assert RobotSpec.from_json(spec.to_json()) == spec


def test_a_model_moved_to_another_terrain_equals_a_fresh_one(go2):
    moved = build_model(go2, Terrain.platform(0.1), num_boxes=2)
    set_terrain(moved, STAIRS)
    fresh = build_model(go2, STAIRS, num_boxes=2)
    # A truly fresh compile, boxes written into the description: build_model itself moves boxes.
    spec = mujoco.MjSpec.from_string(go2.mjcf)
    ground = {"contype": 1, "conaffinity": 1}
    spec.worldbody.add_geom(
        name="floor",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[0, 0, 1],
        friction=[0.9, 0.02, 0.01],
        **ground,
    )
    for i, box in enumerate(STAIRS.boxes):
        body = spec.worldbody.add_body(
            name=f"box{i}",
            pos=box.center,
            quat=box.quaternion,
            explicitinertial=True,
            mass=0.0,
            ipos=[0.0, 0.0, 0.0],
            inertia=[0.0, 0.0, 0.0],
        )
        body.add_geom(
            name=f"box{i}",
            type=mujoco.mjtGeom.mjGEOM_BOX,
            size=box.half_size,
            friction=[box.friction, 0.02, 0.01],
            mass=0,
            **ground,
        )
    compiled = spec.compile()
    reference = _array_fields(compiled)
    for mj_model in (moved, fresh):
        for name, value in _array_fields(mj_model).items():
            np.testing.assert_allclose(value, reference[name], atol=1e-15, err_msg=name)


def test_a_model_moved_to_another_terrain_sees_the_contacts_of_a_fresh_one(go2):
    moved = build_model(go2, Terrain.platform(0.1), num_boxes=2)
    set_terrain(moved, STAIRS)
    fresh = build_model(go2, STAIRS, num_boxes=2)
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(20):
        qpos = np.array(go2.home_qpos)
        qpos[:3] = rng.uniform([0.2, -0.3, 0.15], [1.2, 0.3, 0.4])
        qpos[7:] += rng.uniform(-0.3, 0.3, 12)
        found = []
        for mj_model in (moved, fresh):
            data = mujoco.MjData(mj_model)
            data.qpos[:] = qpos
            mujoco.mj_forward(mj_model, data)
            found.append((data.contact.geom.copy(), data.contact.dist.copy(), data.qacc.copy()))
        for a, b in zip(*found, strict=True):
            np.testing.assert_array_equal(a, b)
        seen += len(found[0][0])
    assert seen > 40


def test_the_robot_does_not_touch_itself_but_touches_boxes(go2):
    mj_model = build_model(go2, Terrain.platform(0.2, front=0.0))
    data = mujoco.MjData(mj_model)
    data.qpos[:] = go2.home_qpos
    data.qpos[7:] = [0.0, 2.5, -2.7] * 4  # folded: calves against thighs and trunk
    mujoco.mj_forward(mj_model, data)
    ground = {mj_model.geom(n).id for n in ("floor", "box0")}
    assert len(data.contact.geom) > 0
    assert all(ground & set(pair.tolist()) for pair in data.contact.geom)


def test_probes_cover_every_collider_with_spheres_of_its_own_radius(go2):
    mj_model = build_model(go2, STAIRS, num_boxes=2)
    found, points = probes(mj_model)
    names = [probe.name for probe in found]
    assert len(set(names)) == len(names)
    assert not any(name.startswith(("floor", "box")) for name in names)
    trunk = np.array([p.pos for p in found if p.name.startswith("trunk")])
    # The published half length 0.1311 m: both ends are probes, neighbours at most 7 cm apart.
    assert sorted(trunk[[0, -1], 0]) == pytest.approx([-0.1311, 0.1311])
    assert np.linalg.norm(np.diff(trunk, axis=0), axis=1).max() <= 0.07
    assert [p.name for p in points] == [*go2.foot_sites, "head"]
    feet = {p.name: p for p in found if p.name in go2.foot_geoms}
    for point in points[:4]:
        assert feet[point.name].pos == point.pos
        assert feet[point.name].body == point.body
        assert go2.spec.bodies[point.body].name == point.name.replace("foot", "calf")
        assert feet[point.name].radius == 0.0175


def test_probe_ends_lie_where_the_compiled_capsule_ends(go2):
    mj_model = build_model(go2, Terrain())
    data = mujoco.MjData(mj_model)
    data.qpos[:] = go2.home_qpos
    mujoco.mj_kinematics(mj_model, data)
    found, _ = probes(mj_model)
    geom = mj_model.geom("RL_shin_upper")
    axis = data.geom_xmat[geom.id].reshape(3, 3)[:, 2] * geom.size[1]
    mine = [p for p in found if p.name.startswith("RL_shin_upper")]
    body = mj_model.body("RL_calf").id
    rotation = data.xmat[body].reshape(3, 3)
    for probe, sign in ((mine[0], -1.0), (mine[-1], 1.0)):
        world = data.xpos[body] + rotation @ np.array(probe.pos)
        np.testing.assert_allclose(world, data.geom_xpos[geom.id] + sign * axis, atol=1e-12)


def test_an_unknown_robot_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"'Go-2': expected one of .*did you mean go2\?"):
        load_robot("Go-2")
    with pytest.raises(ValueError, match="no similar name"):
        load_robot("zzz")


def test_more_boxes_than_the_model_holds_are_refused(go2):
    with pytest.raises(ValueError, match="terrain has 2 boxes, expected at most 1"):
        build_model(go2, STAIRS)
    with pytest.raises(ValueError, match="terrain has 2 boxes, expected at most 1"):
        set_terrain(build_model(go2, Terrain()), STAIRS)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("<equality><joint name='tie' joint1='FR_hip_joint'/></equality>", "constraint 'tie'"),
        (
            "<tendon><fixed name='cord'><joint joint='FR_hip_joint' coef='1'/></fixed></tendon>",
            "tendon 'cord'",
        ),
    ],
)
def test_what_a_spec_cannot_express_is_refused_by_name(go2, extra, message):
    mj_model = mujoco.MjModel.from_xml_string(go2.mjcf.replace("</mujoco>", extra + "</mujoco>"))
    with pytest.raises(ValueError, match=message):
        robot_spec(mj_model, name="go2", substeps=4)
