"""SolverNerd in a Newton program: the network's rollout, histories of worlds, and what it refuses."""

import importlib.util
from pathlib import Path

import newton
import pytest
import torch
import warp as wp
from torch.utils import _pytree as pytree

from nerd_contact import ContactEncoderConfig, ContactSetEncoder, FixedContactConfig, FixedContactFeatures
from nerd_core import FlashNerd, FlashNerdConfig, load_model, rollout
from nerd_coupling.learned_step import exported_step
from nerd_coupling.newton_robot import add_robot
from nerd_coupling.robots import load_robot
from nerd_coupling.solver_nerd import SolverNerd
from nerd_coupling.terrain import Box, Terrain, scene
from nerd_coupling.worlds import MujocoWorlds

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "packages/nerd-mpc/src/nerd_mpc/models/go2-climb"
DT, WORLDS, STEPS = 0.02, 4, 12
BOX = Box(center=(0.3, 0.0, 0.0), half_size=(0.2, 0.4, 0.05), yaw=0.3, friction=0.9)


def view(holder, name):
    """A torch view of one of Newton's arrays."""
    return wp.to_torch(getattr(holder, name))


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


@pytest.fixture(scope="module")
def network(go2):
    """Untrained, with weights large enough for contacts and history to matter, and increments small enough to last."""
    torch.manual_seed(0)
    encoder = ContactSetEncoder(ContactEncoderConfig(num_slots=4, slot_width=8), go2.spec, go2.probes)
    network = FlashNerd(
        FlashNerdConfig(width=32, heads=2, spans=(3, 3), hidden=32, readout_hidden=32), go2.spec, encoder
    )
    for layer in (network.affine, network.readout_out):
        torch.nn.init.normal_(layer.weight, std=0.02)
    return network.eval()


def build(robot, change=None, worlds=WORLDS):
    one = newton.ModelBuilder()
    add_robot(one, robot)
    if change is not None:
        change(one)
    builder = newton.ModelBuilder()
    builder.replicate(one, worlds)
    builder.add_ground_plane(cfg=newton.ModelBuilder.ShapeConfig(mu=0.8))
    w, x, y, z = BOX.quaternion
    hx, hy, hz = BOX.half_size
    config = newton.ModelBuilder.ShapeConfig(mu=BOX.friction)
    builder.add_shape_box(-1, xform=wp.transform(BOX.center, wp.quat(x, y, z, w)), hx=hx, hy=hy, hz=hz, cfg=config)
    return builder.finalize(device="cpu")


@pytest.fixture(scope="module")
def model(go2):
    return build(go2)


def starts(robot, worlds=WORLDS):
    state = torch.tensor(robot.home_state).repeat(worlds, 1)
    state[:, 0], state[:, 2] = 0.05 * torch.arange(worlds), 0.38 + 0.01 * torch.arange(worlds)
    state[:, 19:] = 0.3 * torch.randn(worlds, 18, generator=torch.Generator().manual_seed(1))
    return state


def targets(robot, steps=STEPS, worlds=WORLDS):
    noise = torch.randn(worlds, steps, robot.spec.nu, generator=torch.Generator().manual_seed(2))
    return torch.tensor(robot.home_ctrl) + 0.2 * noise


class Program:
    """A Newton program's loop; ``edit(t, state, solver)`` may write before any step."""

    def __init__(self, model, network, robot, **options):
        self.solver = SolverNerd(model, network, **options)
        self.state, self.after, self.control = model.state(), model.state(), model.control()
        self.pipeline = newton.CollisionPipeline(model)
        self.contacts = self.pipeline.contacts()
        self.robot = robot

    def step(self, target):
        view(self.control, "joint_target_q").view(len(target), -1)[:, 7:] = target
        self.pipeline.collide(self.state, self.contacts)
        self.solver.step(self.state, self.after, self.control, self.contacts, DT)
        self.state, self.after = self.after, self.state
        return self.solver.robot.read(self.state)

    def run(self, start, controls, edit=None):
        self.solver.robot.write(start, self.state)
        states = [self.solver.robot.read(self.state)]
        for t in range(controls.shape[1]):
            if edit is not None:
                edit(t, self.state, self.solver)
            states.append(self.step(controls[:, t]))
        return torch.stack(states, 1)


def test_it_is_the_networks_own_rollout_over_the_same_ground(go2, network, model):
    states = Program(model, network, go2).run(starts(go2), targets(go2))
    where = {k: v.expand(WORLDS, *v.shape[1:]) for k, v in scene(Terrain(boxes=(BOX,))).items()}
    encoder = network.context_encoder
    with torch.no_grad():
        alone = rollout(network, starts(go2), targets(go2), observe=lambda s: encoder.observe(s, where))
        nowhere = {k: v - 10.0 if k == "box_center" else v for k, v in where.items()}
        other = rollout(network, starts(go2), targets(go2), observe=lambda s: encoder.observe(s, nowhere))
    torch.testing.assert_close(states, alone, atol=2e-5, rtol=1e-5)
    assert (states - other).abs().max() > 1e-3, "the box should matter"


def test_bodies_follow_the_joints(go2, network, model):
    program = Program(model, network, go2)
    program.run(starts(go2), targets(go2, 3))
    again = model.state()
    newton.eval_fk(model, program.state.joint_q, program.state.joint_qd, again)
    torch.testing.assert_close(view(program.state, "body_q"), view(again, "body_q"))
    torch.testing.assert_close(view(program.state, "body_qd"), view(again, "body_qd"))


def test_stepping_in_place_is_the_same(go2, network, model):
    plain, solver = Program(model, network, go2), SolverNerd(model, network)
    reference = plain.run(starts(go2), targets(go2, 3))
    state, control, contacts = model.state(), model.control(), plain.pipeline.contacts()
    solver.robot.write(starts(go2), state)
    for t in range(3):
        view(control, "joint_target_q").view(WORLDS, -1)[:, 7:] = targets(go2, 3)[:, t]
        plain.pipeline.collide(state, contacts)
        solver.step(state, state, control, contacts, DT)
    assert torch.equal(solver.robot.read(state), reference[:, -1])


def test_nan_in_one_world_leaves_the_others_and_its_reset_is_a_fresh_start(go2, network, model):
    controls, restart = targets(go2), starts(go2).roll(1, 0)
    undisturbed = Program(model, network, go2).run(starts(go2), controls)
    second = torch.tensor([False, False, True, False])

    def edit(t, state, solver):
        if t == 4:
            solver.robot.write(torch.full_like(restart, torch.nan), state, second)
        if t == 7:
            solver.robot.write(restart, state, second)

    states = Program(model, network, go2).run(starts(go2), controls, edit)
    assert torch.equal(states[~second], undisturbed[~second])
    assert states[2, 5:8].isnan().any(-1).all()
    fresh = Program(model, network, go2).run(restart, controls[:, 7:])
    assert torch.equal(states[2, 8:], fresh[2, 1:])


@pytest.mark.parametrize("way", ["state written", "solver.reset"])
def test_a_write_or_a_reset_clears_the_history_of_that_world_alone(go2, network, model, way):
    controls = targets(go2)
    undisturbed = Program(model, network, go2).run(starts(go2), controls)
    pushed = []

    def edit(t, state, solver):
        if t != 6:
            return
        if way == "state written":
            dof = int(solver.robot.dofs[1, 0])
            view(state, "joint_qd")[dof] += 0.01
        else:
            mask = wp.array([False, True, False, False, False], dtype=wp.bool, device="cpu")
            solver.reset(state, mask)
        newton.eval_fk(model, state.joint_q, state.joint_qd, state)
        pushed.append(solver.robot.read(state))

    states = Program(model, network, go2).run(starts(go2), controls, edit)
    assert torch.equal(states[[0, 2, 3]], undisturbed[[0, 2, 3]])
    fresh = Program(model, network, go2).run(pushed[0], controls[:, 6:])
    torch.testing.assert_close(states[1, 7:], fresh[1, 1:], atol=1e-6, rtol=1e-6)
    assert (states[1, 7:] - undisturbed[1, 7:]).abs().max() > 1e-4, "the history should matter"


def test_targets_are_clipped_to_the_recorded_range_and_read_with_any_strides(go2, network, model):
    span = torch.tensor(go2.spec.ctrl_range)
    far = targets(go2, 2)
    far[:, :, 0] = span[0, 1] + 1.0
    inside = far.clone()
    inside[:, :, 0] = span[0, 1]
    reference = Program(model, network, go2).run(starts(go2), inside)
    assert torch.equal(Program(model, network, go2).run(starts(go2), far), reference)
    strided = Program(model, network, go2)
    count = model.joint_coord_count
    strided.control.joint_target_q = wp.from_torch(torch.zeros(count, 2))[:, 1]
    for name in ("joint_q", "joint_qd"):
        size = len(getattr(strided.after, name))
        setattr(strided.after, name, wp.from_torch(torch.zeros(size, 3))[:, 2])
    strided.solver.robot.write(starts(go2), strided.state)
    for t in range(2):
        flat = torch.zeros(count).view(WORLDS, -1)
        flat[:, 7:] = inside[:, t]
        view(strided.control, "joint_target_q")[:] = flat.flatten()
        strided.pipeline.collide(strided.state, strided.contacts)
        strided.solver.step(strided.state, strided.after, strided.control, strided.contacts, DT)
        strided.state, strided.after = strided.after, strided.state
    assert torch.equal(strided.solver.robot.read(strided.state), reference[:, -1])


def test_the_released_model_lands_and_stands_as_mujoco_does(go2, model):
    network, _ = load_model(RELEASED, robot=go2.spec)
    worlds, steps = WORLDS, 15
    flat = newton.ModelBuilder()
    one = newton.ModelBuilder()
    add_robot(one, go2, probes=network.context_encoder.probes)
    flat.replicate(one, worlds)
    flat.add_ground_plane(cfg=newton.ModelBuilder.ShapeConfig(mu=0.8))
    start = torch.tensor(go2.home_state).repeat(worlds, 1)
    start[:, 2] += 0.02 * torch.arange(worlds)
    controls = torch.tensor(go2.home_ctrl).expand(worlds, steps, -1)
    learned = Program(flat.finalize(device="cpu"), network, go2).run(start, controls)
    with MujocoWorlds(go2, Terrain(), worlds, threads=1) as reference:
        exact = reference.rollout(start, controls)
    error = (learned - exact)[:, :, :3].norm(dim=-1)
    print(f"base error after 5, 10, 15 steps [m]: {error[:, [5, 10, 15]].max(0).values.tolist()}")
    assert exact[:, 1:, 2].min() < 0.25, "it should have landed"
    assert error.max() < 0.02


@pytest.mark.parametrize("dt", [0.005, 0.0201, 1 / 60])
def test_another_time_step_is_refused(go2, network, model, dt):
    program = Program(model, network, go2)
    with pytest.raises(
        ValueError, match=r"dt is .*, expected 0.02 .*4 physics steps of 0.005 s.*without substeps"
    ) as e:
        program.solver.step(program.state, program.after, program.control, program.contacts, dt)
    assert "\n" not in str(e.value)


def test_a_network_that_reads_contacts_is_not_stepped_without_them(go2, network, model):
    program = Program(model, network, go2)
    with pytest.raises(ValueError, match="contacts is None"):
        program.solver.step(program.state, program.after, program.control, None, DT)


@pytest.mark.parametrize(
    ("which", "array", "entry"),
    [
        ("state_in.body_f", "body_f", 3 * 13 + 2),
        ("control.joint_f", "joint_f", 18 + 7),
        ("control.joint_target_qd", "joint_target_qd", 18 + 7),
    ],
)
def test_what_the_network_was_not_recorded_with_is_refused_not_ignored(go2, network, model, which, array, entry):
    program = Program(model, network, go2)
    holder = program.state if array == "body_f" else program.control
    view(holder, array).view(-1)[entry if array != "body_f" else 13 * 6 + 8] = 0.5
    program.pipeline.collide(program.state, program.contacts)
    with pytest.raises(ValueError, match=f"{which} is not zero on go2 in world 1, expected zero"):
        program.solver.step(program.state, program.after, program.control, program.contacts, DT)


def edit_mass(builder):
    builder.body_mass[2] *= 1.1


def edit_gain(builder):
    builder.joint_target_ke[8] = 60.0


def edit_limit(builder):
    builder.joint_limit_upper[6] = 2.0


def edit_pose(builder):
    builder.joint_X_p[4] = wp.transform((0.2, 0.0465, 0.0), wp.quat_identity())


def edit_com(builder):
    builder.body_com[0] = wp.vec3(0.05, 0.0, 0.0)


def edit_damping(builder):
    builder.joint_damping[7] = 0.1


def edit_axis(builder):
    builder.joint_axis[6] = wp.vec3(0.0, 0.0, 1.0)


def edit_name(builder):
    builder.body_label[3] = "go2/leg"


def add_ball(builder):
    builder.add_shape_sphere(builder.add_body(mass=1.0, label="ball"), radius=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_mass, r"FR_thigh: mass is 1\.267\d* in world 0, expected 1\.152 \[kg\]"),
        (edit_gain, r"FR_calf_joint: joint_target_ke is 60\.? in world 0, expected 40"),
        (edit_limit, r"FR_hip_joint: range is \[-1\.047\d* +2\. *\] in world 0"),
        (edit_pose, r"FL_hip: position at rest is \[0\.2 "),
        (edit_com, r"base: centre of mass is \[0\.05 "),
        (edit_damping, r"FR_thigh_joint: damping is 0\.1 in world 0, expected 0\.65"),
        (edit_axis, r"FR_hip_joint: axis is \[0\. 0\. 1\.\]"),
        (edit_name, r"model has 0 bodies named 'FR_calf' in world 0, expected 1"),
        (add_ball, r"body 'ball', which is not go2's and is not kinematic"),
    ],
)
def test_another_robot_is_refused_by_name_and_number(go2, network, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        SolverNerd(build(go2, change, worlds=1), network)
    assert "\n" not in str(caught.value)


def test_gravity_and_masses_changed_later_are_refused_when_newton_is_told(go2, network):
    model = build(go2, worlds=2)
    solver = SolverNerd(model, network)
    solver.notify_model_changed(newton.ModelFlags.BODY_INERTIAL_PROPERTIES)
    view(model, "body_mass")[13] = 9.0
    with pytest.raises(ValueError, match=r"base: mass is 9\. in world 1, expected 6\.921"):
        solver.notify_model_changed(newton.ModelFlags.BODY_INERTIAL_PROPERTIES)
    model.set_gravity((0.0, 0.0, -1.62))
    with pytest.raises(ValueError, match="gravity"):
        SolverNerd(model, network)


def test_networks_of_another_robot_or_with_fixed_points_are_refused(go2, network, model):
    fixed = FixedContactFeatures(FixedContactConfig(), go2.spec, go2.probes[:4])
    with pytest.raises(ValueError, match=r"context encoder of kind 'fixed.*expected 'contact-set'"):
        SolverNerd(model, FlashNerd(FlashNerdConfig(), go2.spec, fixed))
    with pytest.raises(ValueError, match="network was made for another ant"):
        SolverNerd(model, network, robot=load_robot("ant"))


def test_a_fixed_base_is_driven_by_efforts(go2):
    cartpole = load_robot("cartpole")
    torch.manual_seed(0)
    network = FlashNerd(FlashNerdConfig(width=16, heads=2, spans=(3,), hidden=16), cartpole.spec)
    torch.nn.init.normal_(network.affine.weight, std=0.05)
    one, builder = newton.ModelBuilder(), newton.ModelBuilder()
    add_robot(one, cartpole)
    builder.replicate(one, 3, spacing=(0.0, 2.0, 0.0))
    model = builder.finalize(device="cpu")
    solver, state, control = SolverNerd(model, network), model.state(), model.control()
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 0.3
    effort = torch.randn(3, 5, 1, generator=torch.Generator().manual_seed(1)) * 0.5
    solver.robot.write(start, state)
    for t in range(5):
        view(control, "joint_f").view(3, 2)[:, 0] = effort[:, t, 0]
        solver.step(state, state, control, None, cartpole.spec.dt)
    with torch.no_grad():
        expected = rollout(network, start, effort)[:, -1]
    torch.testing.assert_close(solver.robot.read(state), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # writes the network out as operators, twice
def test_the_step_for_graphs_is_the_same_and_leaves_nothing_on_the_host(go2, network, model):
    solver = SolverNerd(model, network)
    example = solver._example()
    state, control, rows, _, leaves = example
    generator = torch.Generator().manual_seed(0)

    def random(leaf):
        return torch.randn(leaf.shape, generator=generator) if leaf.is_floating_point() else leaf

    forget = torch.tensor([True, False, False, True])
    given = (state + 0.1 * random(state), random(control), rows, forget, [random(leaf) for leaf in leaves])
    with torch.no_grad():
        plain = pytree.tree_leaves(solver._step(*given))
        flat = pytree.tree_leaves(exported_step(solver._step, example, "cpu")(*given))
        assert all(torch.equal(a, b) for a, b in zip(plain, flat, strict=True))
        # On the device without memory an operator that copies from, or to, a host fails.
        away = exported_step(solver._step, example, "meta")
        moved = away(*pytree.tree_map(lambda leaf: leaf.to("meta"), given))
    assert moved[0].device.type == "meta"
    names = {str(node.target) for node in away.graph.nodes}
    waits = ("aten.item", "aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.masked_select")
    assert not any(name.startswith(waits) for name in names)


def test_the_example_stands(go2):
    path = ROOT / "examples/newton_go2.py"
    assert len(path.read_text().splitlines()) < 60
    spec = importlib.util.spec_from_file_location("newton_go2", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    heights = example.main(str(RELEASED), seconds=0.5)
    assert len(heights) == 4
    assert ((heights > 0.2) & (heights < 0.3)).all()


@pytest.mark.gpu
def test_a_captured_step_replays_as_the_plain_one_on_cuda(go2, network):
    pytest.importorskip("torch.cuda")
    one, builder = newton.ModelBuilder(), newton.ModelBuilder()
    add_robot(one, go2)
    builder.replicate(one, WORLDS)
    builder.add_ground_plane()
    model = builder.finalize(device="cuda:0")
    on_gpu = FlashNerd(network.config, go2.spec, network.context_encoder)
    on_gpu.load_state_dict(network.state_dict())
    on_gpu = on_gpu.to("cuda:0").eval()
    start, controls = starts(go2), targets(go2, 6)
    plain = Program(model, on_gpu, go2).run(start.cuda(), controls.cuda())
    program = Program(model, on_gpu, go2)
    program.solver.robot.write(start.cuda(), program.state)
    view(program.control, "joint_target_q").view(WORLDS, -1)[:, 7:] = controls[:, 0].cuda()

    def step():
        program.pipeline.collide(program.state, program.contacts)
        program.solver.step(program.state, program.after, program.control, program.contacts, DT)
        program.state.assign(program.after)

    step()  # loads the kernels
    with wp.ScopedCapture(device="cuda:0") as capture:
        step()
    graph = capture.graph
    assert graph is not None
    for t in range(1, 6):
        view(program.control, "joint_target_q").view(WORLDS, -1)[:, 7:] = controls[:, t].cuda()
        torch.cuda.synchronize()
        wp.capture_launch(graph)
        wp.synchronize()
    torch.testing.assert_close(program.solver.robot.read(program.state), plain[:, -1], atol=1e-5, rtol=1e-5)
