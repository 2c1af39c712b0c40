"""Torch forward kinematics against C MuJoCo on the same states."""

import mujoco
import numpy as np
import pytest
import torch

from nerd_contact import Kinematics
from nerd_core import Body, Joint, RobotSpec
from nerd_core.rotation import quat_to_matrix
from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Terrain


def random_states(spec, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(count, spec.state_size, generator=generator, dtype=torch.float64)
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    return state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_go2_body_poses_and_velocities_equal_mujocos(dtype, tolerance):
    robot = load_robot("go2")
    mj_model = build_model(robot, Terrain())
    data = mujoco.MjData(mj_model)
    state = random_states(robot.spec, 50)
    motion = Kinematics(robot.spec)(state.to(dtype))
    names = [body.name for body in robot.spec.bodies]
    ids = [mj_model.body(name).id for name in names]
    velocity = np.zeros(6)
    for row in range(len(state)):
        data.qpos[:] = state[row, : robot.spec.nq]
        data.qvel[:] = state[row, robot.spec.nq :]
        mujoco.mj_forward(mj_model, data)
        base = quat_to_matrix(state[row, 3:7]).numpy()
        for index, body in enumerate(ids):
            pos = base.T @ (data.xpos[body] - data.xpos[ids[0]])
            mat = base.T @ data.xmat[body].reshape(3, 3)
            mujoco.mj_objectVelocity(mj_model, data, mujoco.mjtObj.mjOBJ_XBODY, body, velocity, 0)
            scale = 1 + np.abs(velocity).max()
            assert np.abs(motion.pos[row, index].numpy() - pos).max() <= tolerance
            assert np.abs(motion.mat[row, index].numpy() - mat).max() <= tolerance
            found = (motion.angvel[row, index].numpy(), motion.linvel[row, index].numpy())
            for mine, theirs in zip(found, (velocity[:3], velocity[3:]), strict=True):
                assert np.abs(mine - base.T @ theirs).max() <= tolerance * scale


def test_offset_anchors_slides_and_unordered_branches_equal_mujocos():
    xml = """
    <mujoco><compiler angle="radian"/><worldbody><body name="base"><freejoint/><geom size=".1"/>
      <body name="a" pos=".1 .2 .3" quat=".8 .6 0 0"><joint name="ja" axis="0 1 0" pos=".05 0 -.1"/><geom size=".1"/>
        <body name="b" pos="0 .1 .2"><joint name="jb" type="slide" axis="1 0 0"/><geom size=".1"/></body></body>
      <body name="c" pos="-.1 0 .1"><joint name="jc" axis="0 0 1"/><geom size=".1"/></body>
    </body></worldbody></mujoco>"""
    mj_model = mujoco.MjModel.from_xml_string(xml)
    spec = RobotSpec(
        name="branches",
        floating=True,
        bodies=(
            Body(name="base", parent=-1),
            Body(name="a", parent=0, pos=(0.1, 0.2, 0.3), quat=(0.8, 0.6, 0.0, 0.0)),
            Body(name="b", parent=1, pos=(0.0, 0.1, 0.2)),
            Body(name="c", parent=0, pos=(-0.1, 0.0, 0.1)),
        ),
        joints=(
            Joint(name="ja", kind="hinge", body=1, axis=(0.0, 1.0, 0.0), pos=(0.05, 0.0, -0.1)),
            Joint(name="jb", kind="slide", body=2, axis=(1.0, 0.0, 0.0)),
            Joint(name="jc", kind="hinge", body=3, axis=(0.0, 0.0, 1.0)),
        ),
        control="effort",
        actuated=(0, 1, 2),
        ctrl_range=((-1.0, 1.0),) * 3,
        effort_limit=(1.0,) * 3,
        timestep=0.01,
        substeps=1,
    )
    data = mujoco.MjData(mj_model)
    state = random_states(spec, 20)
    motion = Kinematics(spec)(state)
    velocity = np.zeros(6)
    for row in range(len(state)):
        data.qpos[:], data.qvel[:] = state[row, : spec.nq], state[row, spec.nq :]
        mujoco.mj_forward(mj_model, data)
        base = quat_to_matrix(state[row, 3:7]).numpy()
        for index, body in enumerate(spec.bodies):
            identity = mj_model.body(body.name).id
            pos = base.T @ (data.xpos[identity] - data.xpos[1])
            mujoco.mj_objectVelocity(mj_model, data, mujoco.mjtObj.mjOBJ_XBODY, identity, velocity, 0)
            assert np.abs(motion.pos[row, index].numpy() - pos).max() <= 1e-12
            assert np.abs(motion.linvel[row, index].numpy() - base.T @ velocity[3:]).max() <= 1e-11


def test_a_link_with_two_joints_is_refused_by_name():
    spec = load_robot("go2").spec.to_json()
    spec["joints"][1]["body"] = spec["joints"][0]["body"]
    with pytest.raises(ValueError, match="FR_hip has two joints"):
        Kinematics(RobotSpec.from_json(spec))


def test_gradients_reach_the_joints():
    robot = load_robot("go2")
    state = random_states(robot.spec, 2).requires_grad_(True)
    local = torch.tensor([[0.0, 0.0, -0.2]], dtype=torch.float64)

    def heights(s):
        return Kinematics(robot.spec)(s).points([3], local)[0]

    assert torch.autograd.gradcheck(heights, (state,))
