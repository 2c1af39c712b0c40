"""Rows from Newton's collision pipeline against the torch collider's and C MuJoCo's, on the same states.

Left out are rows deeper than the smallest radius, where a centre inside a box has two nearest faces.
"""

import newton
import pytest
import torch
import warp as wp

from nerd_contact import ContactSet, Counterpart, PrimitiveCollider
from nerd_coupling.engine_colliders import MujocoCollider
from nerd_coupling.newton_contacts import NewtonContacts, newton_contacts
from nerd_coupling.newton_robot import add_robot, find_robot
from nerd_coupling.recording import RandomTargets
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Box, Terrain, scene

MARGIN, WORLDS, BATCHES, ROWS, SMALLEST = 0.05, 100, 10, 48, 0.011
TERRAINS = {
    "plane": Terrain(floor_friction=1.1),
    "tilted plane": Terrain(floor_normal=(0.28, 0.0, 0.96), floor_offset=0.1),
    "boxes": Terrain(
        boxes=(
            Box(center=(0.9, 0.1, 0.0), half_size=(0.3, 0.5, 0.12), yaw=0.4, friction=0.9),
            Box(center=(1.6, -0.2, 0.0), half_size=(0.2, 0.3, 0.2), yaw=-0.9),
        )
    ),
}
# Float32 places and rates.
LIMITS = {"gap": 2e-6, "point": 2e-6, "normal": 2e-6, "velocity": 1e-4, "friction": 1e-6, "kind": 0.0}


def view(holder, name):
    """A torch view of one of Newton's arrays."""
    return wp.to_torch(getattr(holder, name))


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


def ground(builder, terrain):
    def config(friction):
        return newton.ModelBuilder.ShapeConfig(mu=friction)

    builder.add_shape_plane(
        plane=(*terrain.floor_normal, -terrain.floor_offset), width=0.0, length=0.0, cfg=config(terrain.floor_friction)
    )
    for box in terrain.boxes:
        w, x, y, z = box.quaternion
        hx, hy, hz = box.half_size
        where = wp.transform(box.center, wp.quat(x, y, z, w))
        builder.add_shape_box(-1, xform=where, hx=hx, hy=hy, hz=hz, cfg=config(box.friction))


def newton_robot(robot, terrain, worlds=WORLDS, own_shapes=False):
    one = newton.ModelBuilder()
    if own_shapes:
        one.add_mjcf(robot.mjcf, parse_visuals=False)
    else:
        add_robot(one, robot)
    builder = newton.ModelBuilder()
    builder.replicate(one, worlds)
    ground(builder, terrain)
    return find_robot(builder.finalize(device="cpu"), robot)


def poses(robot, terrain, count=WORLDS * BATCHES):
    generator = torch.Generator().manual_seed(0)
    span = torch.tensor([[-1.0, 1.0]]).repeat(robot.spec.nu, 1)
    state = RandomTargets(robot, span).stances(count, terrain, generator)
    state[:, 2] += 0.02 * torch.randn(count, generator=generator)
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    return state


def joined(parts):
    return ContactSet(*(torch.cat(values) for values in zip(*parts, strict=True)))


def newtons(placed, state, rows=ROWS):
    pipeline = newton.CollisionPipeline(placed.model)
    contacts, there, read = (
        pipeline.contacts(),
        placed.model.state(),
        NewtonContacts(placed, margin=MARGIN, max_rows=rows),
    )
    parts = []
    for part in state.split(placed.nworld):
        placed.write(part, there)
        pipeline.collide(there, contacts)
        parts.append(read(contacts, there))
    return joined(parts)


def errors(rows, others):
    """Of each row against the nearest of the other set on the same link; every row must have one."""
    away = (rows.point[:, :, None] - others.point[:, None]).norm(dim=-1).double()
    away = away + (rows.gap[:, :, None] - others.gap[:, None]).abs()
    away = away + 0.1 * (rows.normal[:, :, None] - others.normal[:, None]).norm(dim=-1)
    wrong = ~others.mask[:, None] | (rows.link[:, :, None] != others.link[:, None])
    nearest = away.masked_fill(wrong, torch.inf).argmin(-1)
    needed = rows.mask & (rows.gap < MARGIN - 1e-5) & (rows.gap > -SMALLEST)
    assert not (wrong.all(-1) & needed).any(), "a row has no partner"

    def taken(value):
        return value.gather(1, nearest.view(*nearest.shape, *[1] * (value.dim() - 2)).expand(-1, -1, *value.shape[2:]))

    other = {name: taken(getattr(others, name)) for name in ContactSet._fields[:-1]}
    lever = (rows.gap + SMALLEST).clamp_min(0.01)  # a normal's error times its lever is the length it stands for
    found = {
        "gap": (rows.gap - other["gap"]).abs(),
        "point": (rows.point - other["point"]).norm(dim=-1),
        "normal": (rows.normal - other["normal"]).norm(dim=-1) * lever,
        "velocity": (rows.velocity - other["velocity"]).norm(dim=-1),
        "friction": (rows.friction - other["friction"]).abs(),
        "kind": (rows.kind != other["kind"]).double(),
    }
    return {name: error[needed] for name, error in found.items()}


def assert_same(rows, others):
    for one, other in ((rows, others), (others, rows)):
        for field, error in errors(one, other).items():
            assert len(error) > 500
            assert float(error.max()) <= LIMITS[field], field


@pytest.mark.parametrize("name", TERRAINS)
def test_rows_are_the_torch_colliders_on_a_thousand_poses(go2, name):
    terrain = TERRAINS[name]
    state = poses(go2, terrain)
    rows = newtons(newton_robot(go2, terrain), state)
    where = {k: v.expand(len(state), *v.shape[1:]) for k, v in scene(terrain, num_boxes=len(terrain.boxes)).items()}
    own = PrimitiveCollider(go2.spec, go2.probes, margin=MARGIN)(state, where)
    assert not bool(rows.overflow.any())
    assert int((rows.mask & (rows.gap < 0)).sum()) > 100
    assert_same(rows, own)


def test_with_the_robots_own_capsules_rows_are_mujocos(go2):
    terrain = TERRAINS["plane"]
    state = poses(go2, terrain, 5 * WORLDS)
    rows = newtons(newton_robot(go2, terrain, own_shapes=True), state)
    mujocos = MujocoCollider(go2, terrain, len(state), margin=MARGIN, max_rows=ROWS)(state)
    assert torch.equal(rows.count, mujocos.count)
    assert_same(rows, mujocos)


def test_what_finds_no_room_is_counted_and_the_deepest_stay(go2):
    placed = newton_robot(go2, Terrain(), 2)
    state = torch.tensor(go2.home_state).repeat(2, 1)
    state[:, 2], state[1, 2] = 0.05, 3.0
    every, few = newtons(placed, state), newtons(placed, state, rows=3)
    assert int(every.count[0]) > 3
    assert few.overflow.tolist() == [int(every.count[0]) - 3, 0]
    deepest = every.gap[0][every.mask[0]].sort().values[:3]
    torch.testing.assert_close(few.gap[0].sort().values, deepest)
    full = newton.CollisionPipeline(placed.model, rigid_contact_max=4)
    contacts, there = full.contacts(), placed.model.state()
    placed.write(state, there)
    full.collide(there, contacts)
    lost = newton_contacts(placed, contacts, there, margin=MARGIN, max_rows=ROWS)
    assert (lost.overflow > 0).all()


def test_a_teleported_object_is_seen_at_once_and_as_it_moves(go2):
    one = newton.ModelBuilder()
    add_robot(one, go2)
    crate = one.add_body(mass=1.0, is_kinematic=True, label="crate")
    one.add_shape_box(crate, hx=0.1, hy=0.1, hz=0.1)
    builder = newton.ModelBuilder()
    builder.replicate(one, 2)
    placed = find_robot(builder.finalize(device="cpu"), go2)
    pipeline, there = newton.CollisionPipeline(placed.model), placed.model.state()
    contacts = pipeline.contacts()
    placed.write(torch.tensor(go2.home_state).repeat(2, 1), there)
    pose, twist = view(there, "body_q"), view(there, "body_qd")
    crates = [n for n, label in enumerate(placed.model.body_label) if label.endswith("crate")]

    def look():
        pipeline.collide(there, contacts)
        return newton_contacts(placed, contacts, there, margin=MARGIN, max_rows=ROWS)

    pose[crates, :3] = torch.tensor([5.0, 5.0, 5.0])
    assert look().count.tolist() == [0, 0]
    # Its face 0.02 m before the lower head sphere, which reaches 0.34 m before the base; it comes at 0.5 m/s.
    pose[crates[1], :3] = torch.tensor([0.34 + 0.02 + 0.1, 0.0, go2.home_state[2] + 0.01])
    twist[crates[1], :3] = torch.tensor([-0.5, 0.0, 0.0])
    rows = look()
    assert rows.count[0] == 0
    nearest = int(rows.gap[1].masked_fill(~rows.mask[1], torch.inf).argmin())
    assert int(rows.kind[1, nearest]) == Counterpart.DYNAMIC
    torch.testing.assert_close(rows.gap[1, nearest], torch.tensor(0.02), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.normal[1, nearest], torch.tensor([-1.0, 0.0, 0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.velocity[1, nearest], torch.tensor([0.5, 0.0, 0.0]), atol=1e-5, rtol=0)


def test_gaps_too_small_for_the_margin_are_refused(go2):
    one = newton.ModelBuilder()
    add_robot(one, go2, gap=0.01)
    one.add_ground_plane(cfg=newton.ModelBuilder.ShapeConfig(gap=0.0))
    placed = find_robot(one.finalize(device="cpu"), go2)
    with pytest.raises(ValueError, match=r"shape 'go2/trunk_0' .* up to 0\.01 m.*margin, 0\.08 m"):
        NewtonContacts(placed)
