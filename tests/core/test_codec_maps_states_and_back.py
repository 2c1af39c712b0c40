"""Tokens, increments and rotations against closed forms."""

import math

import pytest
import torch

from nerd_core import FlashNerd, FlashNerdConfig, Joint, RobotSpec, StateCodec, rollout
from nerd_core.robot import Body
from nerd_core.rotation import (
    quat_multiply,
    quat_to_matrix,
    quat_to_rotvec,
    rotate,
    rotate_inverse,
    rotvec_to_quat,
)


def floating_robot(continuous: bool = False) -> RobotSpec:
    limits = None if continuous else (-2.0, 2.0)
    return RobotSpec(
        name="floater",
        floating=True,
        bodies=(Body(name="base", parent=-1), Body(name="arm", parent=0)),
        joints=(Joint(name="hinge", kind="hinge", body=1, axis=(0.0, 1.0, 0.0), range=limits),),
        control="effort",
        actuated=(0,),
        ctrl_range=((-1.0, 1.0),),
        effort_limit=(1.0,),
        timestep=0.01,
        substeps=2,
    )


def states(robot, count=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(count, robot.state_size, generator=generator, dtype=torch.float64)
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    return state


@pytest.mark.parametrize("continuous", [False, True])
def test_integrate_inverts_differentiate(continuous):
    robot = floating_robot(continuous)
    codec, now, after = StateCodec(robot), states(robot), states(robot, seed=1)
    found = codec.integrate(now, codec.differentiate(after, now))
    assert float(codec.differentiate(found, after).abs().max()) <= 1e-6
    assert float(codec.differentiate(now, now).abs().max()) <= 1e-12


def test_a_hinge_without_limits_wraps_across_pi_and_is_fed_as_sine_and_cosine():
    robot = floating_robot(continuous=True)
    codec, now = StateCodec(robot), states(robot, 1)
    after = now.clone()
    now[:, 7], after[:, 7] = math.pi - 0.1, -math.pi + 0.1
    change = codec.differentiate(after, now)[0, list(codec.delta_names).index("hinge_change")]
    assert abs(float(change) - 0.2) < 1e-12
    token = dict(zip(codec.token_names, codec.encode(now, now[:, :1])[0].tolist(), strict=True))
    assert token["sin(hinge)"] == pytest.approx(math.sin(0.1))
    assert token["cos(hinge)"] == pytest.approx(-math.cos(0.1))


def test_the_sign_of_a_quaternion_changes_neither_token_nor_increment():
    robot = floating_robot()
    codec, now, after = StateCodec(robot), states(robot), states(robot, seed=1)
    flipped = now.clone()
    flipped[:, 3:7] *= -1
    control = torch.zeros(len(now), 1, dtype=torch.float64)
    torch.testing.assert_close(codec.encode(flipped, control), codec.encode(now, control))
    torch.testing.assert_close(codec.differentiate(after, flipped), codec.differentiate(after, now))


def test_rotations_agree_with_matrices_and_with_the_exponential_map():
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    quat = rotvec_to_quat(vector)
    x, y, z = vector.unbind(-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).view(-1, 3, 3)
    torch.testing.assert_close(quat_to_matrix(quat), torch.linalg.matrix_exp(skew))
    point = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    turned = (quat_to_matrix(quat) @ point[..., None])[..., 0]
    torch.testing.assert_close(rotate(quat, point), turned)
    torch.testing.assert_close(rotate_inverse(quat, turned), point)
    tiny = torch.tensor([[0.0, 0.0, 0.0], [1e-9, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    back = quat_to_rotvec(rotvec_to_quat(tiny))
    torch.testing.assert_close(back, tiny)
    (gradient,) = torch.autograd.grad(back.sum(), tiny)
    torch.testing.assert_close(gradient, torch.ones_like(gradient))


def test_half_turns_map_to_a_rotation_vector_of_length_pi():
    quat = torch.tensor([[0.0, 1.0, 0.0, 0.0], [-0.0, 0.0, -1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(quat_to_rotvec(quat).norm(dim=-1), torch.full((2,), math.pi).double())


@torch.no_grad()
def test_a_world_that_is_moved_and_turned_about_the_vertical_moves_and_turns_the_prediction():
    robot = floating_robot()
    torch.manual_seed(0)
    model = FlashNerd(FlashNerdConfig(spans=(3, 3), width=32, hidden=32), robot).double()
    torch.nn.init.normal_(model.readout_out.weight, std=0.02)
    state = states(robot, 5)
    controls = torch.randn(5, 100, 1, generator=torch.Generator().manual_seed(4)).double()
    turn = rotvec_to_quat(torch.tensor([0.0, 0.0, 1.1], dtype=torch.float64))
    shift = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64)

    def moved(s):
        s = s.clone()
        s[..., :3] = rotate(turn.expand(*s.shape[:-1], 4), s[..., :3]) + shift
        s[..., 3:7] = quat_multiply(turn.expand(*s.shape[:-1], 4), s[..., 3:7])
        nq = robot.nq
        s[..., nq : nq + 3] = rotate(turn.expand(*s.shape[:-1], 4), s[..., nq : nq + 3])
        return s

    plain, elsewhere = rollout(model, state, controls), rollout(model, moved(state), controls)
    codec = StateCodec(robot)
    assert float(codec.differentiate(elsewhere, moved(plain)).abs().max()) <= 1e-4


def test_the_gradient_through_a_rollout_equals_finite_differences():
    robot = floating_robot()
    torch.manual_seed(0)
    model = FlashNerd(FlashNerdConfig(spans=(3, 3), width=32, hidden=32), robot).double()
    torch.nn.init.normal_(model.readout_out.weight, std=0.02)
    state = states(robot, 2)
    controls = torch.randn(2, 10, 1, generator=torch.Generator().manual_seed(4)).double()

    def end(u):
        return rollout(model, state, u)[:, -1].sum()

    controls.requires_grad_(True)
    (gradient,) = torch.autograd.grad(end(controls), controls)
    step = 1e-5
    for index in ((0, 0, 0), (1, 4, 0), (0, 9, 0)):
        bump = torch.zeros_like(controls)
        bump[index] = step
        with torch.no_grad():
            slope = (end(controls + bump) - end(controls - bump)) / (2 * step)
        assert float(slope) == pytest.approx(float(gradient[index]), rel=1e-3, abs=1e-9)


def test_a_robot_survives_json_and_lists_its_differences():
    robot = floating_robot()
    assert RobotSpec.from_json(robot.to_json()) == robot
    other = RobotSpec.from_json({**robot.to_json(), "timestep": 0.02, "name": "else"})
    lines = robot.differences(other)
    assert any(line.startswith("timestep") for line in lines)
    assert any(line.startswith("name") for line in lines)
    assert robot.differences(robot) == []
    with pytest.raises(ValueError, match="not readable"):
        RobotSpec.from_json({**robot.to_json(), "surprise": 1})


def test_a_tossed_body_without_joints_has_an_increment_of_twelve():
    robot = RobotSpec(
        name="cube",
        floating=True,
        bodies=(Body(name="cube", parent=-1),),
        joints=(),
        control="effort",
        actuated=(),
        ctrl_range=(),
        effort_limit=(),
        timestep=0.01,
        substeps=2,
    )
    codec, now, after = StateCodec(robot), states(robot), states(robot, seed=1)
    delta = codec.differentiate(after, now)
    assert delta.shape == (len(now), 12)
    found = codec.integrate(now, delta)
    assert float(codec.differentiate(found, after).abs().max()) <= 1e-6
    assert codec.drift(now, delta).shape == delta.shape
