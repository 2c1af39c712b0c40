"""Two-way coupling: against plain MuJoCo Warp, against conservation of momentum, and under abuse."""

import math

import mujoco
import mujoco_warp as mjw
import pytest
import torch
import warp as wp

from nerd_coupling.coupled import CoupledWorlds
from nerd_coupling.engine_free_motion import EngineFreeMotion
from nerd_coupling.free_motion import free_accelerations, free_motion_convention
from nerd_coupling.launches import Launches, on_device

# Both scenes have nine degrees of freedom and the same sizes below: they share their compiled kernels.
NWORLD = 3
SIZES = {"nconmax": 16, "njmax": 64}

# An arm of two hinges and a lift pushes a cube over the floor; position servos, damping, dry friction, limits.
ARM = """
<mujoco>
  <compiler angle="radian"/>
  <option timestep="0.004" integrator="Euler" iterations="20" ls_iterations="20">
    <flag eulerdamp="disable"/>
  </option>
  <worldbody>
    <geom name="floor" type="plane" size="2 2 0.1"/>
    <body name="arm" pos="0 0 0.05">
      <joint name="shoulder" axis="0 0 1" damping="0.3" armature="0.01" frictionloss="0.05" range="-0.9 2"/>
      <geom type="sphere" size="0.03" pos="0.2 0 0" mass="0.5" contype="0" conaffinity="0"/>
      <body pos="0.25 0 0">
        <joint name="elbow" axis="0 0 1" damping="0.3" armature="0.01" range="-0.35 2"/>
        <geom type="sphere" size="0.03" pos="0.1 0 0" mass="0.3" contype="0" conaffinity="0"/>
        <body pos="0.2 0 0">
          <joint name="lift" type="slide" axis="0 0 1" damping="2" armature="0.01" range="-0.02 0.05"/>
          <geom name="tip" type="sphere" size="0.02" mass="0.1"/>
        </body>
      </body>
    </body>
    <body name="cube" pos="0.4 0.12 0.04">
      <freejoint/>
      <geom name="cube" type="box" size="0.04 0.04 0.04" mass="0.2"/>
    </body>
  </worldbody>
  <actuator>
    <position joint="shoulder" kp="20" kv="1" ctrlrange="-2 2"/>
    <position joint="elbow" kp="20" kv="1" ctrlrange="-2 2"/>
    <position joint="lift" kp="200" kv="5" ctrlrange="-0.1 0.1"/>
  </actuator>
</mujoco>
"""

# Without gravity a ball that can move along three axes hits a free cube off its centre.
BALL = """
<mujoco>
  <option timestep="0.004" integrator="Euler" iterations="20" ls_iterations="20" gravity="0 0 0">
    <flag eulerdamp="disable"/>
  </option>
  <worldbody>
    <body name="ball" pos="-0.12 0.01 0.005">
      <joint type="slide" axis="1 0 0"/>
      <joint type="slide" axis="0 1 0"/>
      <joint type="slide" axis="0 0 1"/>
      <geom name="ball" type="sphere" size="0.03" mass="{mass}"/>
    </body>
    <body name="cube">
      <freejoint/>
      <geom name="cube" type="box" size="0.05 0.05 0.05" mass="0.2"/>
    </body>
  </worldbody>
</mujoco>
"""


def _ball(mass=0.5):
    return mujoco.MjModel.from_xml_string(BALL.format(mass=mass))


def _control(t):
    one = [math.sin(0.025 * t), 0.5 * math.sin(0.05 * t), 0.02 * math.sin(0.05 * t)]
    return torch.tensor(one).repeat(NWORLD, 1)


def _run(worlds, start, steps, first=0):
    worlds.set_state(start)
    return torch.stack([worlds.step(_control(first + t)) for t in range(steps)])


def _no_acceleration(state, control):
    return torch.zeros(len(state), 3)


class Plain:
    """MuJoCo Warp as it comes."""

    def __init__(self, mj_model):
        self.model = mjw.put_model(mj_model)
        self.data = mjw.put_data(mj_model, mujoco.MjData(mj_model), nworld=NWORLD, **SIZES)
        self.qpos, self.qvel, self.ctrl = (wp.to_torch(a) for a in (self.data.qpos, self.data.qvel, self.data.ctrl))
        self._launch = Launches(lambda: mjw.step(self.model, self.data), use_graph=True)

    def step(self, control):
        self.ctrl.copy_(control)
        with on_device(torch.device("cpu")):
            self._launch()
        return torch.cat((self.qpos, self.qvel), dim=1)


@pytest.fixture(scope="module")
def arm():
    return mujoco.MjModel.from_xml_string(ARM)


@pytest.fixture(scope="module")
def engine(arm):
    return EngineFreeMotion(arm, "arm", NWORLD)


@pytest.fixture(scope="module")
def worlds(arm, engine):
    return CoupledWorlds(arm, "arm", NWORLD, engine, **SIZES)


@pytest.fixture(scope="module")
def start(arm):
    state = torch.zeros(NWORLD, arm.nq + arm.nv)
    state[:, : arm.nq] = torch.tensor(arm.qpos0)
    state[:, 4] += torch.tensor([0.0, 0.02, 0.04])  # cubes at different places
    return state


@pytest.fixture(scope="module")
def plain(arm, start):
    """Plain MuJoCo Warp over 300 steps: states, and the worlds in which the tip touched the cube at each step."""
    engine = Plain(arm)
    engine.qpos.copy_(start[:, : arm.nq])
    tip, states, touched = arm.geom("tip").id, [], torch.zeros(300, NWORLD, dtype=torch.bool)
    for t in range(300):
        states.append(engine.step(_control(t)))
        count = int(engine.data.nacon.numpy()[0])
        geoms, worlds = engine.data.contact.geom.numpy()[:count], engine.data.contact.worldid.numpy()[:count]
        touched[t, worlds[(geoms == tip).any(axis=1)]] = True
    return torch.stack(states), touched


def test_with_the_engines_own_acceleration_it_is_plain_mujoco_warp_over_300_contact_rich_steps(worlds, start, plain):
    states, touched = plain
    coupled = _run(worlds, start, 300)
    assert (touched.sum(0) > 30).all()  # every arm pushes its cube
    assert ((states[-1] - start)[:, 3:5].norm(dim=1) > 0.1).all()  # and every cube slides
    torch.testing.assert_close(coupled, states, atol=1e-6, rtol=0)
    assert not worlds.overflow.any()


def test_without_a_graph_the_steps_are_the_same(arm, start, plain):
    engine = EngineFreeMotion(arm, "arm", NWORLD, use_graph=False)
    eager = CoupledWorlds(arm, "arm", NWORLD, engine, use_graph=False, **SIZES)
    torch.testing.assert_close(_run(eager, start, 40), plain[0][:40], atol=1e-6, rtol=0)


def test_a_scene_that_knows_neither_actuators_nor_damping_moves_as_its_free_acceleration_says(engine, start, plain):
    ignorant = mujoco.MjModel.from_xml_string(ARM)
    ignorant.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ACTUATION
    ignorant.dof_damping[:] = 0
    states, touched = plain
    assert touched[:25].any()
    # float32 rounds the force M a; contacts amplify it (1e-7 before, 2e-5 after the first touch).
    coupled = _run(CoupledWorlds(ignorant, "arm", NWORLD, engine, **SIZES), start, 25)
    torch.testing.assert_close(coupled, states[:25], atol=1e-4, rtol=0)
    still = _run(CoupledWorlds(ignorant, "arm", NWORLD, _no_acceleration, **SIZES), start, 25)
    assert (still - states[:25]).abs().max() > 0.1


def test_float64_labels_of_c_mujoco_move_the_robot_as_the_engine_does(arm, start, plain):
    def labels(state, control):
        return free_accelerations(arm, "arm", state, control).float()

    coupled = CoupledWorlds(arm, "arm", NWORLD, labels, convention=free_motion_convention(arm, "arm"), **SIZES)
    torch.testing.assert_close(_run(coupled, start, 25), plain[0][:25], atol=1e-4, rtol=0)


def test_the_engines_acceleration_equals_the_float64_label(arm, engine):
    generator = torch.Generator().manual_seed(0)
    state, control = (torch.randn(NWORLD, n, generator=generator) for n in (6, 3))
    label = free_accelerations(arm, "arm", state, control)
    torch.testing.assert_close(engine(state, control).double(), label, rtol=1e-4, atol=1e-3)


def _momentum(worlds, mass):
    """Total linear momentum [kg m/s]; the cube's velocity is that of its centre, in world axes."""
    velocity = worlds.qvel.double()
    return mass * velocity[:, :3] + 0.2 * velocity[:, 3:6]


def _throw(mj_model, *, two_way=True, free=_no_acceleration, steps=60):
    """Throw the ball; momentum before, and momenta and states of each step."""
    worlds = CoupledWorlds(mj_model, "ball", NWORLD, free, two_way=two_way, **SIZES)
    start = torch.cat((torch.tensor(mj_model.qpos0).float(), torch.zeros(9))).repeat(NWORLD, 1)
    start[:, 10] = torch.tensor([0.5, 1.0, 1.5])
    start[:, 11:13] = torch.tensor([0.1, 0.05])
    worlds.set_state(start)
    mass = float(mj_model.body_mass[1])
    before, momenta, states = _momentum(worlds, mass), [], []
    for _ in range(steps):
        states.append(worlds.step(torch.zeros(NWORLD, 0)))
        momenta.append(_momentum(worlds, mass))
    return before, torch.stack(momenta), torch.stack(states)


def test_robot_and_object_exchange_momentum_and_keep_their_sum():
    before, momenta, states = _throw(_ball())
    given = 0.2 * states[-1, :, 13:16].norm(dim=1)
    assert (given > 0.02).all()  # the cube took momentum
    assert (states[-1, :, 16:19].norm(dim=1) > 0.1).all()  # and spins: the hit is off its centre
    assert (momenta - before).abs().max() < 1e-6


def test_one_way_coupling_makes_momentum_out_of_nothing():
    before, momenta, states = _throw(_ball(), two_way=False)
    assert torch.equal(states[-1, :, 10:13], states[0, :, 10:13])  # the ball flies on
    assert ((momenta[-1] - before).norm(dim=1) > 0.05).all()


def test_one_way_coupling_is_the_limit_of_a_heavy_robot():
    def push(state, control):
        return torch.tensor([[20.0, 5.0, 0.0]]).repeat(len(state), 1)

    _, _, one_way = _throw(_ball(), two_way=False, free=push)
    errors = [(one_way - _throw(_ball(mass=mass), free=push)[2]).abs().max().item() for mass in (5.0, 50.0)]
    # Ten times the mass, a tenth of the difference (0.29 and 0.029); the cube reaches 20 rad/s. Without the kinematic
    # stiffness of the contacts the ratio is 4, without the robot's acceleration 0.8.
    assert errors[1] < 0.04
    assert 8 < errors[0] / errors[1] < 12


def test_under_one_way_coupling_limits_and_friction_still_hold_the_robot(arm, engine, start):
    far = start.clone()
    far[:, 3] += 1.0
    robot = [0, 1, 2, 10, 11, 12]
    for first in (20, 130):
        deaf = _run(CoupledWorlds(arm, "arm", NWORLD, engine, two_way=False, **SIZES), start, 80, first=first)
        alone = _run(CoupledWorlds(arm, "arm", NWORLD, engine, **SIZES), far, 80, first=first)
        torch.testing.assert_close(deaf[..., robot], alone[..., robot], atol=1e-4, rtol=0)
        if first == 20:
            assert ((deaf[-1] - start)[:, 3:5].norm(dim=1) > 0.1).any()  # the cube is pushed all the same
    assert -0.93 < deaf[..., 0].min() < -0.88  # the servo asks for -1, the limit is -0.9


def test_where_nothing_touches_the_robot_follows_the_callable():
    def push(state, control):
        # A spring to the point (0.3, 0, 0) that only the callable knows of.
        return 50.0 * (torch.tensor([0.3, 0.0, 0.0]) - state[:, :3])

    worlds = CoupledWorlds(_ball(), "ball", NWORLD, push, **SIZES)
    away = torch.cat((torch.tensor(worlds.mj_model.qpos0).float(), torch.zeros(9))).repeat(NWORLD, 1)
    away[:, 4] = 1.0  # the cube
    worlds.set_state(away)
    x, v = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(20):
        state = worlds.step(torch.zeros(NWORLD, 0)).double()
        v = v + 0.004 * 50.0 * (torch.tensor([0.3, 0.0, 0.0]) - x)
        x = x + 0.004 * v
    torch.testing.assert_close(state[:, :3], x.expand(NWORLD, -1), atol=1e-6, rtol=0)
    torch.testing.assert_close(state[:, 10:13], v.expand(NWORLD, -1), atol=1e-6, rtol=0)
    assert v[0] > 1.0
    assert torch.equal(state[:, 3:10].float(), away[:, 3:10])


def test_an_external_force_accelerates_the_robot_by_its_inertia():
    worlds = CoupledWorlds(_ball(), "ball", NWORLD, _no_acceleration, **SIZES)
    body = worlds.mj_model.body("ball").id
    wp.to_torch(worlds.warp_data.xfrc_applied)[1, body, 1] = 2.0  # [N]
    wp.to_torch(worlds.warp_data.qfrc_applied)[2, 2] = -1.0
    for _ in range(10):
        state = worlds.step(torch.zeros(NWORLD, 0))
    expected = torch.zeros(NWORLD, 3)
    expected[1, 1], expected[2, 2] = 2.0 / 0.5 * 0.04, -1.0 / 0.5 * 0.04
    torch.testing.assert_close(state[:, 10:13], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("two_way", [True, False])
def test_a_nan_of_one_world_stays_there_and_a_reset_starts_afresh(arm, engine, start, two_way):
    calls = []

    def free(state, control):
        calls.append(None)
        acceleration = engine(state, control).clone()
        if len(calls) == 21:
            acceleration[1, 2] = torch.nan
        return acceleration

    healthy = _run(CoupledWorlds(arm, "arm", NWORLD, engine, two_way=two_way, **SIZES), start, 60)
    worlds = CoupledWorlds(arm, "arm", NWORLD, free, two_way=two_way, **SIZES)
    worlds.set_state(start)
    states = [worlds.step(_control(t)) for t in range(20)]
    states += [worlds.step(_control(20 + t)) for t in range(5)]  # the first of these meets the NaN
    assert torch.stack(states[20:])[:, 1].isnan().all()
    assert torch.equal(torch.stack(states[:20]), healthy[:20])
    worlds.set_state(start, mask=torch.tensor([False, True, False]))
    for t in range(25, 60):
        control = _control(t)
        control[1] = _control(t - 25)[1]
        states.append(worlds.step(control))
    others = torch.stack(states)[:, [0, 2]]
    assert torch.equal(others, healthy[:, [0, 2]])
    assert torch.equal(torch.stack(states[25:])[:, 1], healthy[:35, 1])


def test_a_nan_state_is_not_shown_as_a_number_until_it_is_set_again(worlds, start):
    broken = start.clone()
    broken[1, 3] = torch.nan
    worlds.set_state(broken)
    assert worlds.state[1].isnan().all()
    assert worlds.robot_state[1].isnan().all()
    assert worlds.state[[0, 2]].isfinite().all()
    worlds.set_state(start)
    assert torch.equal(worlds.state, start)


def test_a_teleported_object_is_seen_at_once(arm, worlds, start):
    there = start.clone()
    there[:, 3:5] = torch.tensor([0.47, 0.055])  # against the tip
    worlds.set_state(there)
    expected = worlds.step(_control(5))
    worlds.set_state(start)
    worlds.qpos[:, 3:10] = there[:, 3:10]
    assert torch.equal(worlds.step(_control(5)), expected)
    # In the middle of a run, too: the very next step feels it.
    moved = _run(worlds, start, 10)[-1]
    unfelt = worlds.step(_control(10))
    worlds.set_state(moved)
    worlds.qpos[:, 3:10] = there[:, 3:10]
    assert ((worlds.step(_control(10)) - unfelt)[:, 10:12].abs().amax(1) > 0.1).all()


def test_views_share_memory_with_the_simulator(worlds, start):
    worlds.set_state(start)
    worlds.qpos[1, 2], worlds.qvel[2, 0], worlds.ctrl[0, 1] = 0.01, 0.5, 0.25
    data = worlds.warp_data
    assert (data.qpos.numpy()[1, 2], data.qvel.numpy()[2, 0], data.ctrl.numpy()[0, 1]) == (
        torch.tensor(0.01).item(),
        0.5,
        0.25,
    )
    assert worlds.qpos.data_ptr() == data.qpos.ptr
    assert worlds.robot_state[1, 2] == torch.tensor(0.01)


def _strided(tensor):
    return torch.stack((tensor, tensor + 1), dim=-1)[..., 0]


def _transposed(tensor):
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("layout", [_strided, _transposed])
def test_strided_and_transposed_tensors_give_the_result_of_contiguous_ones(arm, engine, worlds, start, layout):
    worlds.set_state(start)
    expected = [worlds.step(_control(t)) for t in range(15, 20)]
    other = CoupledWorlds(arm, "arm", NWORLD, lambda s, u: layout(engine(s, u)), **SIZES)
    given = layout(start)
    assert not given.is_contiguous()
    other.set_state(given)
    assert torch.equal(torch.stack([other.step(layout(_control(t))) for t in range(15, 20)]), torch.stack(expected))


def test_expanded_tensors_give_the_result_of_contiguous_ones(arm, worlds, start):
    def constant(state, control):
        return torch.tensor([1.0, -2.0, 0.5])[None]

    found = []
    for expand in (True, False):
        shape = lambda x, expand=expand: x.expand(NWORLD, -1) if expand else x.repeat(NWORLD, 1)  # noqa: E731
        other = CoupledWorlds(arm, "arm", NWORLD, lambda s, u, shape=shape: shape(constant(s, u)), **SIZES)
        other.set_state(shape(start[:1]))
        found.append(torch.stack([other.step(shape(_control(t)[:1])) for t in range(5)]))
    assert torch.equal(*found)


def test_what_would_have_to_be_converted_is_refused_by_name(arm, worlds, start):
    worlds.set_state(start)
    expected = r"expected \(3, 19\), torch.float32 on cpu"
    for wrong in (start[:2], start[0], start[:, :-1], start.t(), start.double(), start.to("meta")):
        with pytest.raises(ValueError, match=f"state has shape .*{expected}"):
            worlds.set_state(wrong)
    with pytest.raises(ValueError, match="state is a list, expected a tensor"):
        worlds.set_state(start.tolist())
    for wrong in (_control(0)[0], _control(0)[:, :2], _control(0).double(), _control(0).int()):
        with pytest.raises(ValueError, match=r"control has shape .*expected \(3, 3\), torch.float32 on cpu"):
            worlds.step(wrong)
    for mask in (torch.ones(2, dtype=torch.bool), torch.ones(3)):
        with pytest.raises(ValueError, match="mask has shape"):
            worlds.set_state(start, mask)
    assert torch.equal(worlds.state, start)
    for wrong in (torch.zeros(3, 9), torch.zeros(3), torch.zeros(3, 3).double(), torch.zeros(3, 3).half()):
        other = CoupledWorlds(arm, "arm", NWORLD, lambda s, u, wrong=wrong: wrong, **SIZES)
        with pytest.raises(ValueError, match=r"free_acceleration has shape .*expected \(3, 3\), torch.float32 on cpu"):
            other.step(_control(0))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('integrator="Euler"', 'integrator="implicitfast"', "option integrator is IMPLICITFAST, expected Euler"),
        ('integrator="Euler"', 'integrator="implicit"', "option integrator is IMPLICIT, expected Euler"),
        ('integrator="Euler"', 'integrator="RK4"', "option integrator is RK4, expected Euler"),
        ('eulerdamp="disable"', 'eulerdamp="enable"', "option flag eulerdamp is enabled and joints have damping"),
        ('eulerdamp="disable"', 'eulerdamp="disable" sleep="enable"', "option flag sleep is enabled"),
    ],
)
def test_options_that_do_not_step_along_the_acceleration_are_refused_in_one_line(old, new, words):
    mj_model = mujoco.MjModel.from_xml_string(ARM.replace(old, new))
    with pytest.raises(ValueError, match=words) as refusal:
        CoupledWorlds(mj_model, "arm", NWORLD, _no_acceleration, **SIZES)
    assert "\n" not in str(refusal.value)


def test_labels_of_another_convention_are_refused(arm):
    for old, new, words in (
        ('timestep="0.004"', 'timestep="0.002"', "timestep: 0.004 here, 0.002 there"),
        ('integrator="Euler"', 'integrator="implicitfast"', "integrator: EULER here, IMPLICITFAST there"),
        ('kp="200"', 'kp="150"', r"dynamics.actuator_gainprm\[2\]\[0\]: 200.0 here, 150.0 there"),
    ):
        learned = free_motion_convention(mujoco.MjModel.from_xml_string(ARM.replace(old, new)), "arm")
        with pytest.raises(ValueError, match=words):
            CoupledWorlds(arm, "arm", NWORLD, _no_acceleration, convention=learned, **SIZES)


def test_a_number_out_of_range_or_an_absent_device_is_refused_by_name(arm):
    for name, value in (("nworld", 0), ("substeps", 0)):
        arguments = {"nworld": NWORLD, "substeps": 1, name: value}
        with pytest.raises(ValueError, match=f"{name} is 0, expected at least 1"):
            CoupledWorlds(arm, "arm", free_acceleration=_no_acceleration, **arguments)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is 'cuda:0'"):
            CoupledWorlds(arm, "arm", NWORLD, _no_acceleration, device="cuda:0")


def test_a_rollout_equals_stepping_and_leaves_the_worlds_where_they_are(worlds, start):
    controls = torch.stack([_control(t) for t in range(8)], dim=1)
    worlds.set_state(start)
    stepped = [worlds.state, *(worlds.step(controls[:, t]) for t in range(3))]
    rolled = worlds.rollout(start, controls)
    stepped += [worlds.step(controls[:, t]) for t in range(3, 8)]
    assert torch.equal(torch.stack(stepped, dim=1), rolled)


def test_substeps_hold_the_control_and_ask_for_an_acceleration_each(arm, engine, worlds, start):
    seen = []

    def free(state, control):
        seen.append((state.clone(), control.clone()))
        return engine(state, control)

    double = CoupledWorlds(arm, "arm", NWORLD, free, substeps=2, **SIZES)
    double.set_state(start)
    state = double.step(_control(30))
    worlds.set_state(start)
    middle = worlds.step(_control(30))
    assert torch.equal(state, worlds.step(_control(30)))
    assert torch.equal(seen[0][0], start[:, [0, 1, 2, 10, 11, 12]])
    assert torch.equal(seen[1][0], middle[:, [0, 1, 2, 10, 11, 12]])  # the resolved state is the next input
    assert all(torch.equal(control, _control(30)) for _, control in seen)


def test_a_callable_with_memory_hears_of_every_state_that_is_set(arm, start):
    heard = []
    worlds = CoupledWorlds(arm, "arm", NWORLD, _no_acceleration, on_reset=heard.append, **SIZES)
    mask = torch.tensor([True, False, True])
    worlds.set_state(start, mask)
    worlds.rollout(start, torch.zeros(NWORLD, 1, 3))
    assert [m.tolist() for m in heard] == [mask.tolist(), [True] * 3, [True] * 3]


@pytest.mark.gpu
def test_on_cuda_it_is_plain_mujoco_warp_too(arm, start, plain):
    engine = EngineFreeMotion(arm, "arm", NWORLD, device="cuda:0")
    worlds = CoupledWorlds(arm, "arm", NWORLD, engine, device="cuda:0", **SIZES)
    worlds.set_state(start.cuda())
    states = torch.stack([worlds.step(_control(t).cuda()) for t in range(25)])
    torch.testing.assert_close(states.cpu(), plain[0][:25], atol=1e-4, rtol=0)
