"""Ant, ANYmal C, G1, Microduck, LEAP hand with cube, tossed cube: the published numbers, standing, real physics."""

import itertools
import json
import math
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from nerd_contact import Kinematics, PrimitiveCollider
from nerd_core import StateCodec
from nerd_core.robot import RobotSpec
from nerd_coupling.robots import build_model, load_robot, probes, robot_names, robot_spec
from nerd_coupling.terrain import Terrain, scene
from nerd_coupling.worlds import MujocoWorlds

NEW = ("ant", "anymal-c", "cube", "g1", "leap-cube", "microduck")
LEGGED = ("ant", "anymal-c", "g1", "microduck")
FACTS = Path(__file__).parents[3] / "shared" / "data" / "robot_facts"
# Of the public descriptions [kg]; the ant is gymnasium's of 0.91088 kg at density 5, here at density 1000.
MASS = {
    "ant": 200 * 0.9108800827,
    "anymal-c": 44.96518,
    "cube": 0.37,
    "g1": 33.341142,
    "leap-cube": 0.749,
    "microduck": 0.73724318,
}


def alone(name):
    return mujoco.MjModel.from_xml_string(load_robot(name).mjcf)


def at(mj_model, qpos=None):
    data = mujoco.MjData(mj_model)
    if qpos is not None:
        data.qpos[:] = qpos
    mujoco.mj_kinematics(mj_model, data)
    mujoco.mj_comPos(mj_model, data)
    return data


def touching(mj_model, data):
    """Names of the geoms that touch the floor, and how many contacts are of another kind."""
    pairs = [{mj_model.geom(int(g)).name for g in pair} for pair in data.contact.geom]
    return set().union(*(pair - {"floor"} for pair in pairs if "floor" in pair)), sum("floor" not in p for p in pairs)


def random_states(robot, count=20, seed=0):
    """States anywhere within the joint limits, tumbling; float64."""
    spec, rng = robot.spec, np.random.default_rng(seed)
    low, high = np.array([j.range or (-3.0, 3.0) for j in spec.joints]).reshape(-1, 2).T
    qpos = rng.uniform(low, high, (count, len(low)))
    if spec.floating:
        quat = rng.normal(size=(count, 4))
        place = rng.uniform(-2, 2, (count, 3))
        qpos = np.concatenate([place, quat / np.linalg.norm(quat, axis=1, keepdims=True), qpos], 1)
    return torch.from_numpy(np.concatenate([qpos, rng.normal(size=(count, spec.nv))], 1))


def test_all_ten_robots_of_the_design_ship():
    assert robot_names() == tuple(sorted((*NEW, "cartpole", "double-pendulum", "franka", "go2")))


@pytest.mark.parametrize("name", NEW)
def test_a_robot_weighs_what_its_publication_says(name):
    assert alone(name).body_mass.sum() == pytest.approx(MASS[name], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "facts"),
    [("anymal-c", "anymal_c"), ("g1", "g1_29dof"), ("leap-cube", "leap_hand_cube"), ("microduck", "microduck")],
)
def test_links_and_limits_are_those_of_the_public_description(name, facts):
    path = FACTS / f"{facts}.json"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    public, mj_model = json.loads(path.read_text()), alone(name)
    bodies = [b for b in public["bodies"] if b["name"] not in ("goal", "cube")]
    assert mj_model.nbody - 1 == len(bodies)
    for i, body in enumerate(bodies, start=1):
        assert mj_model.body_mass[i] == pytest.approx(body["mass"], rel=1e-6)
        np.testing.assert_allclose(mj_model.body_ipos[i], body["com"], atol=1e-9)
        if i > 1:  # the root stands where we put it
            np.testing.assert_allclose(mj_model.body_pos[i], body["pos"], atol=1e-9)
        rotation = np.zeros(9)
        mujoco.mju_quat2Mat(rotation, mj_model.body_iquat[i])
        rotation = rotation.reshape(3, 3)
        tensor = rotation @ np.diag(mj_model.body_inertia[i]) @ rotation.T
        if "diaginertia" in body:
            np.testing.assert_allclose(mj_model.body_inertia[i], body["diaginertia"], rtol=1e-6)
        else:
            xx, yy, zz, xy, xz, yz = body["inertia_com_xx_yy_zz_xy_xz_yz"]
            published = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
            np.testing.assert_allclose(tensor, published, atol=2e-6 * abs(published).max())
    joints = public.get("joints") or [b["joint"] for b in bodies]
    ours = {j.name: j for j in load_robot(name).spec.joints}
    seen = 0
    for joint in joints:
        if joint["type"] == "free":
            continue
        mine = ours[joint["name"].removesuffix("_joint")]
        published = joint["range"]
        if published[1] - published[0] > 2 * math.pi:  # ANYmal's flexion joints: limited to one turn here
            published = [-3.14, 3.14]
        assert mine.range == pytest.approx(published, abs=1e-6)
        np.testing.assert_allclose(mine.axis, joint["axis"], atol=1e-6)
        seen += 1
    assert seen == len(ours)


@pytest.mark.parametrize("name", NEW)
def test_inertias_are_those_of_real_bodies(name):
    mj_model = alone(name)
    for body in range(1, mj_model.nbody):
        small, middle, large = sorted(mj_model.body_inertia[body])
        assert small > 0
        assert large <= (small + middle) * 1.001


def mirrored(mj_model):
    """Pairs (left, right) of body names."""
    names = [mj_model.body(i).name for i in range(1, mj_model.nbody)]
    swaps = (("left", "right"), ("LF_", "RF_"), ("LH_", "RH_"))
    return [(a, a.replace(left, right)) for a in names for left, right in swaps if left in a]


@pytest.mark.parametrize(("name", "pairs"), [("ant", 4), ("anymal-c", 6), ("g1", 13), ("microduck", 5)])
def test_left_and_right_mirror_each_other(name, pairs):
    mj_model, flip = alone(name), np.diag([1.0, -1.0, 1.0])
    straight = np.zeros(mj_model.nq)
    straight[3] = 1.0
    data = at(mj_model, straight)
    found = mirrored(mj_model)
    assert len(found) == pairs
    for left, right in found:
        a, b = mj_model.body(left).id, mj_model.body(right).id
        # Published numbers are themselves symmetric to a tenth of a millimetre and 0.1 %.
        assert mj_model.body_mass[a] == pytest.approx(mj_model.body_mass[b], rel=1e-4)
        np.testing.assert_allclose(flip @ data.xpos[a], data.xpos[b], atol=2e-5)
        np.testing.assert_allclose(flip @ data.xipos[a], data.xipos[b], atol=2e-4)
        tensors = [
            data.ximat[i].reshape(3, 3) @ np.diag(mj_model.body_inertia[i]) @ data.ximat[i].reshape(3, 3).T
            for i in (a, b)
        ]
        # Products of inertia are not: two of ANYmal's hips and of G1's shins have the sign of one that is not mirrored.
        np.testing.assert_allclose(np.linalg.eigvalsh(tensors[0]), np.linalg.eigvalsh(tensors[1]), rtol=2e-3)
        np.testing.assert_allclose(flip @ tensors[0] @ flip, tensors[1], atol=4e-2 * abs(tensors[0]).max())
        ja, jb = mj_model.body_jntadr[a], mj_model.body_jntadr[b]
        axes = [data.xmat[i].reshape(3, 3) @ mj_model.jnt_axis[j] for i, j in ((a, ja), (b, jb))]
        # A rotation's axis is a pseudovector: its mirror image points the other way.
        sign = round(float(-(flip @ axes[0]) @ axes[1]))
        assert abs(sign) == 1
        low, high = mj_model.jnt_range[jb]
        assert mj_model.jnt_range[ja] == pytest.approx((low, high) if sign > 0 else (-high, -low), abs=1e-6)
        spheres = [
            sorted((*(m @ data.geom_xpos[g]).round(4) + 0.0, *mj_model.geom_size[g].round(6)))
            for i, m in ((a, flip), (b, np.eye(3)))
            for g in range(mj_model.ngeom)
            if mj_model.geom_bodyid[g] == i and mj_model.geom_conaffinity[g]
        ]
        half = len(spheres) // 2
        np.testing.assert_allclose(sorted(spheres[:half]), sorted(spheres[half:]), atol=2e-4)


@pytest.mark.parametrize("name", NEW)
def test_a_joint_at_its_limit_does_not_pass_it(name):
    robot = load_robot(name)
    mj_model = build_model(robot, Terrain(floor_offset=-50.0))
    mj_model.opt.gravity[:] = 0.0
    low, high = np.array([j.range for j in robot.spec.joints]).reshape(-1, 2).T
    first = mj_model.nq - len(low)
    for end in (0, 1):
        data = mujoco.MjData(mj_model)
        data.qpos[:] = robot.home_qpos
        data.ctrl[:] = mj_model.actuator_ctrlrange[:, end]
        mujoco.mj_step(mj_model, data, nstep=round(1.5 / mj_model.opt.timestep))
        assert (data.qpos[first:] > low - 0.06).all()
        assert (data.qpos[first:] < high + 0.06).all()
        assert not any(warning.number for warning in data.warning)


# Height [m] that stiff servos would hold, from the published lengths; what it may lose as they give way.
STANDING = {
    "ant": (0.8 * math.sqrt(0.5) * 0.5 + 0.08, 0.004),
    "anymal-c": (0.5588, 0.03),
    "g1": (0.7842, 0.01),
    "microduck": (0.1146, 0.001),
}


@pytest.mark.parametrize("name", LEGGED)
def test_a_robot_stands_on_all_its_feet_and_on_nothing_else_for_two_seconds(name):
    robot = load_robot(name)
    mj_model = build_model(robot, Terrain())
    data = mujoco.MjData(mj_model)
    data.qpos[:], data.ctrl[:] = robot.home_qpos, robot.home_ctrl
    mujoco.mj_forward(mj_model, data)
    assert touching(mj_model, data) == (set(), 0)  # just above the ground, clear of itself
    for _ in range(round(2.0 / robot.spec.dt)):
        mujoco.mj_step(mj_model, data, nstep=robot.spec.substeps)
        ground, other = touching(mj_model, data)
        assert ground <= set(robot.foot_geoms)
        assert other == 0
        assert data.xmat[1, 8] > 0.99  # upright
        assert len(data.contact.dist) == 0 or data.contact.dist.min() > -2e-3
    mujoco.mj_forward(mj_model, data)
    assert touching(mj_model, data)[0] == set(robot.foot_geoms)
    height, sag = STANDING[name]
    assert height - sag < data.qpos[2] < height + 0.002
    assert np.abs(data.qvel).max() < 0.15
    assert not any(warning.number for warning in data.warning)


def test_the_standing_heights_are_those_of_the_kinematics():
    for name in ("anymal-c", "g1", "microduck"):
        robot = load_robot(name)
        mj_model = alone(name)
        data = at(mj_model, robot.home_qpos)
        soles = [data.geom(foot).xpos[2] - mj_model.geom(foot).size[0] for foot in robot.foot_geoms]
        assert np.ptp(soles) < 1e-6  # all feet at one height
        assert robot.home_qpos[2] - soles[0] == pytest.approx(STANDING[name][0], abs=1e-4)


@pytest.mark.parametrize("name", NEW)
def test_random_controls_do_not_blow_a_robot_up(name):
    robot, rng = load_robot(name), np.random.default_rng(0)
    mj_model = build_model(robot, Terrain(), with_objects=bool(robot.objects))
    data = mujoco.MjData(mj_model)
    data.qpos[: robot.spec.nq] = robot.home_qpos
    low, high = mj_model.actuator_ctrlrange.T
    fastest = 0.0
    for _ in range(100):
        data.ctrl[:] = rng.uniform(low, high)
        mujoco.mj_step(mj_model, data, nstep=robot.spec.substeps)
        fastest = max(fastest, np.abs(data.qvel).max())
    assert not any(warning.number for warning in data.warning)
    # G1's wrist, 25 N m on 0.0036 kg m² of armature and a light hand, gains 100 rad/s in a step if its damping lets it.
    assert fastest < 150.0


@pytest.mark.parametrize("name", NEW)
def test_states_go_from_mujoco_to_ours_and_back(name):
    robot = load_robot(name)
    mj_model, states = build_model(robot, Terrain(floor_offset=-50.0)), random_states(robot)
    kinematics, nq = Kinematics(robot.spec), robot.spec.nq
    motion = kinematics(states)
    for row, state in enumerate(states.numpy()):
        data = mujoco.MjData(mj_model)
        data.qpos[:], data.qvel[:] = state[:nq], state[nq:]
        mujoco.mj_kinematics(mj_model, data)
        base = data.xmat[1].reshape(3, 3) if robot.spec.floating else np.eye(3)
        origin = data.xpos[1] if robot.spec.floating else np.zeros(3)
        for i, body in enumerate(robot.spec.bodies):
            theirs = data.body(body.name)
            np.testing.assert_allclose(origin + base @ motion.pos[row, i].numpy(), theirs.xpos, atol=1e-12)
            np.testing.assert_allclose(base @ motion.mat[row, i].numpy(), theirs.xmat.reshape(3, 3), atol=1e-12)
    # One state from another: the codec's difference, added again, is MuJoCo's own sum.
    codec = StateCodec(robot.spec)
    delta = codec.differentiate(states[1:], states[:-1])
    torch.testing.assert_close(codec.integrate(states[:-1], delta).abs(), states[1:].abs(), rtol=0, atol=1e-10)
    with MujocoWorlds(robot, Terrain(floor_offset=-50.0), len(states), threads=1) as worlds:
        worlds.set_state(states)
        assert torch.equal(worlds.state, states.float())
    assert RobotSpec.from_json(robot.spec.to_json()) == robot.spec


def test_the_ant_weighs_as_much_as_its_spheres_and_capsules_of_water():
    ball = lambda r: 4 / 3 * math.pi * r**3  # noqa: E731
    rod = lambda r, length: math.pi * r**2 * length  # noqa: E731
    short, long = math.hypot(0.2, 0.2), math.hypot(0.4, 0.4)
    volume = ball(0.25) + 4 * (3 * ball(0.08) + rod(0.08, short) * 2 + rod(0.08, long))
    assert alone("ant").body_mass.sum() == pytest.approx(1000 * volume, rel=1e-9)
    spec = load_robot("ant").spec
    assert spec.effort_limit == (400.0,) * 8
    assert (spec.dt, spec.substeps) == (pytest.approx(1 / 60), 16)
    assert len(load_robot("ant").fixed_points) == 25  # NeRD's


def test_effort_limits_are_on():
    limits = {"anymal-c": {80.0}, "microduck": {0.96}, "leap-cube": {0.2196}, "g1": {5.0, 25.0, 50.0, 88.0, 139.0}}
    for name, expected in limits.items():
        robot = load_robot(name)
        assert set(robot.spec.effort_limit) == expected
        mj_model = build_model(robot, Terrain())
        data = mujoco.MjData(mj_model)
        data.qpos[:] = robot.home_qpos
        data.ctrl[:] = mj_model.actuator_ctrlrange[:, 1]
        data.qpos[-robot.spec.nu :] -= 300.0  # far beyond: every servo saturates
        mujoco.mj_forward(mj_model, data)
        np.testing.assert_allclose(data.actuator_force, robot.spec.effort_limit)


def landing(height, quat=(1.0, 0.0, 0.0, 0.0), friction=0.18, speed=0.0):
    mj_model = build_model(load_robot("cube"), Terrain(floor_friction=friction))
    data = mujoco.MjData(mj_model)
    data.qpos[:], data.qvel[0] = (0, 0, height, *quat), speed
    return mj_model, data


def test_the_cube_returns_the_measured_eighth_of_its_speed():
    corner = np.zeros(4)
    mujoco.mju_axisAngle2Quat(corner, np.array([1.0, -1.0, 0.0]) / math.sqrt(2), math.atan(math.sqrt(2)))
    for quat, rest in (((1, 0, 0, 0), 0.0524), (corner, 0.0524 * math.sqrt(3))):
        mj_model, data = landing(rest + 0.1, quat)
        speeds = []
        for _ in range(round(0.25 / mj_model.opt.timestep)):
            mujoco.mj_step(mj_model, data)
            speeds.append(data.qvel[2])
        lowest = int(np.argmin(speeds))
        assert speeds[lowest] == pytest.approx(-math.sqrt(2 * 9.81 * 0.1), rel=0.01)
        assert max(speeds[lowest:]) / -speeds[lowest] == pytest.approx(0.125, abs=0.01)


def test_the_cube_slides_to_rest_under_the_measured_friction():
    mj_model, data = landing(0.0524, speed=1.0)
    mujoco.mj_step(mj_model, data, nstep=round(0.3 / mj_model.opt.timestep))
    assert data.qvel[0] == pytest.approx(1.0 - 0.18 * 9.81 * 0.3, abs=0.02)
    assert data.qpos[2] == pytest.approx(0.0524, abs=2e-4)


def test_the_cubes_corners_are_what_mujoco_touches():
    robot = load_robot("cube")
    collider = PrimitiveCollider(robot.spec, robot.probes, margin=5.0)
    mj_model = build_model(robot, Terrain())
    states = random_states(robot)
    states[:, 2] = 0.07
    rows = collider(states, {k: v.expand(len(states), *v.shape[1:]) for k, v in scene(Terrain(), num_boxes=0).items()})
    compared = 0
    for row, state in enumerate(states.numpy()):
        data = mujoco.MjData(mj_model)
        data.qpos[:] = state[:7]
        mujoco.mj_forward(mj_model, data)
        if len(data.contact.dist):
            assert float(rows.gap[row].min()) == pytest.approx(data.contact.dist.min(), abs=1e-6)
            compared += 1
    assert compared > 5
    corners = {tuple(np.sign(p.pos)) for p in robot.probes}
    assert corners == set(itertools.product((-1.0, 1.0), repeat=3))
    assert all(p.radius == 0.0 and np.abs(p.pos) == pytest.approx(0.0524) for p in robot.probes)


def test_the_hand_holds_its_cube_and_the_cube_is_no_part_of_it():
    robot = load_robot("leap-cube")
    (cube,) = robot.objects
    assert (cube.name, robot.spec.nq, robot.spec.nu) == ("cube", 16, 16)
    assert build_model(robot, Terrain()).nq == 16
    mj_model = build_model(robot, Terrain(), with_objects=True)
    assert (mj_model.nq, mj_model.nv) == (23, 22)
    assert mj_model.body("cube").mass == 0.108
    assert robot_spec(mj_model, name="leap-cube", substeps=4, objects=("cube",)) == robot.spec
    assert tuple(probes(mj_model, objects=("cube",))[0]) == robot.probes
    with pytest.raises(ValueError, match="joint 'cube' is mjJNT_FREE"):
        robot_spec(mj_model, name="leap-cube", substeps=4)
    data = mujoco.MjData(mj_model)
    data.qpos[:16], data.ctrl[:] = robot.home_qpos, robot.home_ctrl
    mujoco.mj_forward(mj_model, data)
    assert len(data.contact.dist) == 0
    mujoco.mj_step(mj_model, data, nstep=600)
    palm = data.site("palm").xpos
    assert np.linalg.norm(data.body("cube").xpos - palm) < 0.1
    assert data.body("cube").xpos[2] > palm[2]
    assert np.abs(data.qvel).max() < 0.05
    carried = np.zeros(3)
    for i in range(data.ncon):
        force = np.zeros(6)
        mujoco.mj_contactForce(mj_model, data, i, force)
        normal = data.contact.frame[i].reshape(3, 3).T @ force[:3]
        second = mj_model.geom(int(data.contact.geom[i, 1])).name
        carried += normal if second == "cube" else -normal
    assert carried == pytest.approx([0.0, 0.0, 0.108 * 9.81], abs=0.02)


def test_without_the_hand_the_cube_falls_to_the_ground():
    robot = load_robot("leap-cube")
    mj_model = build_model(robot, Terrain(), with_objects=True)
    data = mujoco.MjData(mj_model)
    data.qpos[:16] = robot.home_qpos
    data.qpos[16] += 0.5
    mujoco.mj_step(mj_model, data, nstep=200)
    assert data.body("cube").xpos[2] == pytest.approx(0.035, abs=1e-3)
