"""Poses, velocities and point Jacobians of every shipped robot against C MuJoCo, and against their own derivatives.

Both sides read the same numbers: states are rounded to the precision under test first. Poses agree to the tolerance
itself [m, or entries of a rotation matrix]; velocities and Jacobian entries, which grow with the state, to the
tolerance times the largest of the row, at least 1.
"""

import mujoco
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from nerd_contact import Kinematics
from nerd_core.rotation import quat_to_matrix
from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Terrain

ROBOTS = ("go2", "franka", "double-pendulum", "cartpole")
COUNT = 2000
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def random_states(spec, count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(count, spec.state_size, generator=generator, dtype=torch.float64)
    if spec.floating:
        state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    return state.to(dtype)


def points_of(spec, seed=0):
    """A random point on every link."""
    body = list(range(len(spec.bodies)))
    local = 0.3 * torch.randn(len(body), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return body, local


def mujocos(robot, state, body, local):
    """Poses, velocities and Jacobians along the base's axes, arrays of one row per state."""
    spec, model = robot.spec, build_model(robot, Terrain())
    data = mujoco.MjData(model)
    ids = [model.body(b.name).id for b in spec.bodies]
    where = local.numpy()
    found = {k: [] for k in ("pos", "mat", "linvel", "angvel", "linear", "angular")}
    twist, jacp, jacr = np.zeros(6), np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for row in state.double().numpy():
        data.qpos[:], data.qvel[:] = row[: spec.nq], row[spec.nq :]
        for stage in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_comVel):
            stage(model, data)
        base = data.xmat[ids[0]].reshape(3, 3) if spec.floating else np.eye(3)
        origin = data.xpos[ids[0]] if spec.floating else np.zeros(3)
        found["pos"].append((data.xpos[ids] - origin) @ base)
        found["mat"].append(base.T @ data.xmat[ids].reshape(-1, 3, 3))
        velocity = []
        for b in ids:
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, b, twist, 0)
            velocity.append(twist.reshape(2, 3) @ base)
        found["angvel"].append([v[0] for v in velocity])
        found["linvel"].append([v[1] for v in velocity])
        columns = []
        for b, p in zip(body, where, strict=True):
            point = data.xpos[ids[b]] + data.xmat[ids[b]].reshape(3, 3) @ p
            mujoco.mj_jac(model, data, jacp, jacr, point, ids[b])
            columns.append((base.T @ jacp, base.T @ jacr))
        found["linear"].append([c[0] for c in columns])
        found["angular"].append([c[1] for c in columns])
    return {k: np.array(v) for k, v in found.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ROBOTS)
def test_poses_velocities_and_point_jacobians_equal_mujocos(name, dtype):
    robot = load_robot(name)
    body, local = points_of(robot.spec)
    local = local.to(dtype)
    state = random_states(robot.spec, COUNT, dtype)
    theirs = mujocos(robot, state, body, local)
    kinematics = Kinematics(robot.spec)
    motion = kinematics(state)
    ours = {**motion._asdict(), **kinematics.jacobian(state, motion, body, local)._asdict()}
    worst = {}
    for what, value in ours.items():
        assert value.dtype == dtype
        assert value.shape == theirs[what].shape
        error = np.abs(value.double().numpy() - theirs[what]).reshape(COUNT, -1).max(-1)
        if what not in ("pos", "mat"):
            error = error / np.maximum(1, np.abs(theirs[what]).reshape(COUNT, -1).max(-1))
        worst[what] = float(error.max())
    print(name, dtype, {k: f"{v:.1e}" for k, v in worst.items()})
    assert max(worst.values()) <= TOLERANCE[dtype], worst


@pytest.mark.parametrize("name", ROBOTS)
def test_jacobian_times_velocity_is_the_velocity_of_the_point(name):
    spec = load_robot(name).spec
    body, local = points_of(spec)
    state = random_states(spec, 100, torch.float64, seed=1)
    kinematics = Kinematics(spec)
    motion = kinematics(state)
    linear, angular = kinematics.jacobian(state, motion, body, local)
    qvel = state[:, None, None, spec.nq :]
    torch.testing.assert_close((linear * qvel).sum(-1), motion.points(body, local)[1], rtol=0, atol=1e-12)
    torch.testing.assert_close((angular * qvel).sum(-1), motion.angvel[:, body], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["franka", "double-pendulum", "cartpole"])
def test_joint_columns_are_the_derivative_of_the_point(name):
    spec = load_robot(name).spec
    body, local = points_of(spec)
    state = random_states(spec, 3, torch.float64, seed=2)
    kinematics = Kinematics(spec)
    linear = kinematics.jacobian(state, kinematics(state), body, local).linear
    for row in range(3):
        slope = torch.autograd.functional.jacobian(lambda s: kinematics(s).points(body, local)[0], state[row])
        torch.testing.assert_close(linear[row], slope[..., : spec.nq], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ROBOTS)
def test_every_query_passes_gradcheck(name):
    spec = load_robot(name).spec
    last = len(spec.bodies) - 1
    local = torch.tensor([[0.1, -0.2, 0.3]], dtype=torch.float64)
    kinematics = Kinematics(spec)

    def queries(state):
        motion = kinematics(state)
        return *motion, *motion.points([last], local), *kinematics.jacobian(state, motion, [last], local)

    state = random_states(spec, 1, torch.float64, seed=3).requires_grad_(True)
    # The fast mode checks random projections of the Jacobian of every output; the whole one, entry by entry, is
    # affordable for the short chains.
    assert torch.autograd.gradcheck(queries, (state,), fast_mode=len(spec.bodies) > 4)


def test_leading_axes_are_kept_and_an_exported_program_gives_the_same_bits():
    spec = load_robot("double-pendulum").spec
    local = torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.1, -0.1]])

    class Queries(torch.nn.Module):
        def forward(self, state):
            kinematics = Kinematics(spec)
            motion = kinematics(state)
            return *motion, *kinematics.jacobian(state, motion, [0, 1], local)

    state = random_states(spec, 6, torch.float32, seed=4)
    flat = Queries()(state)
    for one, other in zip(flat, Queries()(state.view(2, 3, -1)), strict=True):
        assert torch.equal(one, other.flatten(0, 1))
    # Exporting fails where code branches on a value.
    for one, other in zip(flat, torch.export.export(Queries(), (state,)).module()(state), strict=True):
        assert torch.equal(one, other)


def test_one_level_of_the_tree_is_one_step_of_the_traversal():
    spec = load_robot("go2").spec
    depth = []
    for body in spec.bodies:
        depth.append(0 if body.parent < 0 else depth[body.parent] + 1)
    calls = []

    class Counted(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Counted():
        Kinematics(spec)(random_states(spec, 2, torch.float32))
    # Twelve joints on three levels: two cross products a level, and two that turn the base's velocity.
    assert max(depth) == 3
    assert sum(func is torch.linalg.cross for func in calls) == 2 * max(depth) + 2


def test_a_floating_base_is_turned_by_its_own_quaternion():
    spec = load_robot("go2").spec
    state = random_states(spec, 5, torch.float64, seed=5)
    kinematics = Kinematics(spec)
    linear, angular = kinematics.jacobian(state, kinematics(state), [0], torch.zeros(1, 3, dtype=torch.float64))
    assert torch.equal(linear[:, 0, :, :3], quat_to_matrix(state[:, 3:7]).transpose(-1, -2))
    assert torch.equal(linear[:, 0, :, 3:], torch.zeros(5, 3, spec.nv - 3, dtype=torch.float64))
    assert torch.equal(angular[:, 0, :, 3:6], torch.eye(3, dtype=torch.float64).expand(5, 3, 3))
