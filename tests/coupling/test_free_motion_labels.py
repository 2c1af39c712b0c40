"""Acceleration labels against equations worked out by hand, and the convention that travels with them."""

import json
import math

import mujoco
import pytest
import torch

from nerd_coupling.free_motion import FreeMotionConvention, free_accelerations, free_motion_convention
from nerd_coupling.robot_block import robot_block

# A point mass m = 0.7 kg at l = 0.4 m, damping d, dry friction and a limit that the label must not contain.
PENDULUM = """
<mujoco>
  <compiler angle="radian"/>
  <option timestep="0.002" integrator="{integrator}"><flag eulerdamp="{eulerdamp}"/></option>
  <worldbody>
    <body name="pendulum" pos="{place}">
      <inertial pos="0 0 -0.4" mass="0.7" diaginertia="1e-12 1e-12 1e-12"/>
      <joint name="hinge" axis="0 1 0" damping="{damping}" armature="0.01" frictionloss="5" range="-0.1 0.1"/>
    </body>
    {objects}
  </worldbody>
  <actuator><motor name="motor" joint="hinge" gear="2" ctrlrange="-1 1"/></actuator>
</mujoco>
"""
CUBE = """<body name="cube" pos="0 0 -0.4"><freejoint/><geom type="box" size="0.1 0.1 0.1" mass="{mass}"/></body>"""

# Cart 1.2 kg on a rail, rod with a point mass 0.3 kg at 0.5 m, gravity down, θ = 0 hanging.
CARTPOLE = """
<mujoco>
  <option integrator="Euler"><flag eulerdamp="disable"/></option>
  <worldbody>
    <body name="cart">
      <joint name="rail" type="slide" axis="1 0 0"/>
      <inertial pos="0 0 0" mass="1.2" diaginertia="1e-12 1e-12 1e-12"/>
      <body name="pole">
        <joint axis="0 1 0"/>
        <inertial pos="0 0 -0.5" mass="0.3" diaginertia="1e-12 1e-12 1e-12"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="rail"/></actuator>
</mujoco>
"""


def _pendulum(*, integrator="Euler", eulerdamp="disable", damping=0.2, place="0 0 1", objects=""):
    text = PENDULUM.format(integrator=integrator, eulerdamp=eulerdamp, damping=damping, place=place, objects=objects)
    return mujoco.MjModel.from_xml_string(text)


def _states(count=50):
    generator = torch.Generator().manual_seed(0)
    state = 3 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return state, torch.randn(count, 1, generator=generator, dtype=torch.float64)


def test_a_pendulum_accelerates_as_its_equation_says():
    state, control = _states()
    angle, rate = state.unbind(-1)
    effort = 2 * control[:, 0].clamp(-1, 1)  # gear times the clipped control
    inertia = 0.7 * 0.4**2 + 0.01 + 1e-12
    expected = (effort - 0.2 * rate - 0.7 * 9.81 * 0.4 * angle.sin()) / inertia
    label = free_accelerations(_pendulum(), "pendulum", state, control)
    assert label.dtype == torch.float64
    torch.testing.assert_close(label[:, 0], expected, rtol=1e-12, atol=1e-12)
    # The limit of 0.1 rad and the dry friction of 5 N m are far from idle in these states.
    assert (angle.abs() > 0.1).float().mean() > 0.9


def test_a_cart_with_a_pole_accelerates_as_its_two_equations_say():
    mj_model = mujoco.MjModel.from_xml_string(CARTPOLE)
    generator = torch.Generator().manual_seed(1)
    state = 2 * torch.randn(50, 4, generator=generator, dtype=torch.float64)
    force = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    _, angle, _, rate = state.unbind(-1)
    M, m, length, g = 1.2, 0.3, 0.5, 9.81
    # The mass hangs at x − l sin θ (the axis is +y): (M + m) ẍ − m l cos θ θ̈ + m l sin θ θ̇² = F,
    # −m l cos θ ẍ + (m l² + I) θ̈ + m g l sin θ = 0.
    a, b, c = M + m, -m * length * angle.cos(), m * length**2 + 1e-12
    right = torch.stack((force[:, 0] - m * length * angle.sin() * rate**2, -m * g * length * angle.sin()), -1)
    determinant = a * c - b * b
    expected = torch.stack((c * right[:, 0] - b * right[:, 1], a * right[:, 1] - b * right[:, 0]), -1)
    label = free_accelerations(mj_model, "cart", state, force)
    torch.testing.assert_close(label, expected / determinant[:, None], rtol=1e-10, atol=1e-10)


def test_objects_and_their_masses_make_no_difference_to_the_label():
    state, control = _states()
    alone = free_accelerations(_pendulum(), "pendulum", state, control)
    for mass in (0.1, 5.0):
        # The cube touches nothing by shape, but it stands where the point mass hangs and has its own inertia.
        crowded = _pendulum(objects=CUBE.format(mass=mass))
        assert torch.equal(free_accelerations(crowded, "pendulum", state, control), alone)
        assert not free_motion_convention(crowded, "pendulum").differences(
            free_motion_convention(_pendulum(place="3 0 2"), "pendulum")
        )


def test_float32_states_give_the_labels_of_the_same_numbers():
    state, control = _states()
    rounded = free_accelerations(_pendulum(), "pendulum", state.float().double(), control.float().double())
    assert torch.equal(free_accelerations(_pendulum(), "pendulum", state.float(), control.float()), rounded)


def test_a_convention_survives_json():
    convention = free_motion_convention(_pendulum(), "pendulum")
    text = json.dumps(convention.to_json(), allow_nan=False)
    again = FreeMotionConvention.from_json(json.loads(text))
    assert again == convention
    convention.check(again)
    assert (again.label, again.integrator, again.implicit, again.joints) == ("qacc_smooth", "EULER", (), ("hinge",))
    with pytest.raises(ValueError, match="not readable"):
        FreeMotionConvention.from_json({"label": "qacc_smooth"})
    with pytest.raises(ValueError, match="not readable"):
        FreeMotionConvention.from_json({**convention.to_json(), "extra": 1})


@pytest.mark.parametrize(
    ("integrator", "eulerdamp", "damping", "implicit"),
    [
        ("Euler", "disable", 0.2, ()),
        ("Euler", "enable", 0.0, ()),
        ("Euler", "enable", 0.2, ("joint damping",)),
        ("RK4", "enable", 0.2, ()),
        ("implicitfast", "disable", 0.2, ("joint damping", "actuators")),
        ("implicit", "enable", 0.0, ("actuators", "bias")),
    ],
)
def test_what_an_integrator_treats_implicitly_is_named(integrator, eulerdamp, damping, implicit):
    mj_model = _pendulum(integrator=integrator, eulerdamp=eulerdamp, damping=damping)
    convention = free_motion_convention(mj_model, "pendulum")
    assert (convention.integrator, convention.implicit) == (integrator.upper(), implicit)


def test_euler_with_its_implicit_damping_does_not_step_along_the_label_and_without_it_does():
    state, control = torch.tensor([[0.05, 2.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    found = {}
    for eulerdamp in ("enable", "disable"):
        mj_model = _pendulum(eulerdamp=eulerdamp, damping=5.0)
        mj_model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONSTRAINT
        data = mujoco.MjData(mj_model)
        data.qpos[:], data.qvel[:] = state[0].tolist()
        mujoco.mj_step(mj_model, data)
        label = free_accelerations(mj_model, "pendulum", state, control)
        found[eulerdamp] = abs(data.qvel[0] - 2.0 - 0.002 * float(label))
    assert found["disable"] < 1e-14
    assert found["enable"] > 0.01


def test_every_difference_of_a_convention_is_named_and_refused():
    here = free_motion_convention(_pendulum(), "pendulum")
    other = _pendulum(eulerdamp="enable", damping=0.3)
    other.opt.timestep, other.opt.gravity[2] = 0.004, -1.6
    other.body_mass[other.body("pendulum").id] = 0.8
    other.actuator_gear[0, 0] = 3
    other.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SPRING
    there = free_motion_convention(other, "pendulum")
    expected = (
        "timestep: 0.002 here, 0.004 there",
        "implicit: [] here, ['joint damping'] there",
        "disabled: [] here, ['SPRING'] there",
        "options.gravity[2]: -9.81 here, -1.6 there",
        "dynamics.body_mass[0]: 0.7 here, 0.8 there",
        "dynamics.dof_damping[0]: 0.2 here, 0.3 there",
        "dynamics.actuator_gear[0][0]: 2.0 here, 3.0 there",
    )
    assert set(here.differences(there)) == set(expected)
    with pytest.raises(ValueError, match="convention differs") as refusal:
        here.check(there)
    assert all(line in str(refusal.value) for line in expected)


def test_the_last_digits_of_a_recompiled_robot_are_no_difference():
    other = _pendulum()
    other.body_mass[1] = math.nextafter(other.body_mass[1], 1)
    assert not free_motion_convention(_pendulum(), "pendulum").differences(free_motion_convention(other, "pendulum"))


def test_wrong_shapes_are_refused_by_name():
    state, control = _states(4)
    with pytest.raises(ValueError, match=r"state has shape \(4, 3\), expected \(4, 2\)"):
        free_accelerations(_pendulum(), "pendulum", torch.zeros(4, 3), control)
    with pytest.raises(ValueError, match=r"control has shape \(5, 1\), expected \(4, 1\)"):
        free_accelerations(_pendulum(), "pendulum", state, torch.zeros(5, 1))


TENDON = """
<mujoco>
  <worldbody>
    <body name="arm"><joint name="arm"/><geom size="0.1"/><site name="hand" pos="0.2 0 0"/>
      <body name="hand"><joint name="wrist"/><geom size="0.1"/></body>
    </body>
    <body name="door" pos="1 0 0"><joint name="door"/><geom size="0.1"/><site name="handle"/></body>
    <body name="stone" pos="2 0 0"><geom size="0.1"/></body>
  </worldbody>
  {rest}
</mujoco>
"""


@pytest.mark.parametrize(
    ("robot", "rest", "words"),
    [
        ("leg", "", "robot is 'leg', expected the name of a body; at the root: arm, door, stone"),
        ("hand", "", "robot 'hand' hangs on 'arm', which moves"),
        ("stone", "", "robot stone: expected at least one joint"),
        (
            "arm",
            '<tendon><spatial name="rope" stiffness="9"><site site="hand"/><site site="handle"/></spatial></tendon>',
            "tendon 'rope' connects the robot with an object",
        ),
        (
            "arm",
            '<tendon><fixed name="belt"><joint joint="arm" coef="1"/><joint joint="door" coef="1"/></fixed></tendon>',
            "tendon 'belt' connects the robot with an object",
        ),
        (
            "arm",
            '<actuator><general name="jet" site="hand" refsite="handle" gear="1 0 0 0 0 0"/></actuator>',
            "actuator 'jet' connects the robot with an object",
        ),
        (
            "arm",
            '<actuator><adhesion name="glue" body="hand" ctrlrange="0 1"/></actuator>',
            "actuator 'glue' has transmission mjTRN_BODY, expected joint, tendon or site",
        ),
        (
            "arm",
            '<actuator><general name="lag" joint="arm" dyntype="integrator"/></actuator>',
            "na is 1, expected 0",
        ),
    ],
)
def test_a_robot_that_cannot_be_separated_is_refused_by_name(robot, rest, words):
    mj_model = mujoco.MjModel.from_xml_string(TENDON.format(rest=rest))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (compared below)
        robot_block(mj_model, robot)
    assert words in str(refusal.value)


def test_the_block_is_the_whole_tree_and_its_actuators():
    rest = '<actuator><motor joint="door"/><motor joint="wrist"/></actuator>'
    mj_model = mujoco.MjModel.from_xml_string(TENDON.format(rest=rest))
    block = robot_block(mj_model, "arm")
    assert (block.bodies, block.qpos, block.dofs, block.actuators) == ((1, 2), (0, 1), (0, 1), (1,))
    assert robot_block(mj_model, ("arm", "door")).dofs == (0, 1, 2)
    free = _pendulum(objects=CUBE.format(mass=1))
    assert robot_block(free, "cube").qpos == tuple(range(1, 8))
    assert robot_block(free, "cube").dofs == tuple(range(1, 7))
