"""Reading an engine's contact buffers: whose row, which side, which kind, how fast, how many."""

import mujoco
import mujoco_warp as mjw
import numpy as np
import pytest
import torch
import warp as wp

from nerd_contact import ContactEncoderConfig, ContactSet, ContactSetEncoder, Counterpart, PrimitiveCollider, Probe
from nerd_core.rotation import rotvec_to_quat
from nerd_coupling.contact_geoms import contact_geoms, list_approaching, list_approaching_in_warp
from nerd_coupling.description import robot_spec
from nerd_coupling.engine_colliders import MjWarpCollider, MujocoCollider
from nerd_coupling.engine_contacts import read_contacts
from nerd_coupling.heightfield import HeightField
from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Terrain, scene
from nerd_coupling.warp_worlds import MjWarpWorlds

# A floating sphere with a swinging second one, a free ball, a wall of the world; the ball is listed before the robot.
SCENE = """
<mujoco>
  <option timestep="0.002" gravity="0 0 -9.81"><flag eulerdamp="disable"/></option>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" contype="1" conaffinity="1" friction="0.7"/>
    <body name="ball" pos="0.3 0 0.1">
      <freejoint/><geom name="ball" type="sphere" size="0.1" mass="0.5" friction="1.2"/>
    </body>
    <body name="trunk" pos="0 0 0.2">
      <freejoint/>
      <geom name="trunk" type="sphere" size="0.1" mass="1" friction="0.5"/>
      <body name="arm" pos="0 0 0">
        <joint name="arm" axis="0 1 0"/>
        <geom name="arm" type="sphere" pos="0 0 0.32" size="0.05" mass="0.2" friction="0.5"/>
        <body name="hand" pos="0 0 0.32">
          <joint name="hand" axis="0 1 0"/>
          <geom name="hand" type="sphere" pos="0 0 -0.13" size="0.05" mass="0.1" friction="0.5"/>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="arm" ctrllimited="true" ctrlrange="-1 1" forcelimited="true" forcerange="-1 1"/>
    <motor joint="hand" ctrllimited="true" ctrlrange="-1 1" forcelimited="true" forcerange="-1 1"/>
  </actuator>
</mujoco>
"""
REACH = 0.06
TRUNK_PROBE = Probe(name="trunk", body=0, pos=(0.0, 0.0, 0.0), radius=0.1, friction=0.5)


@pytest.fixture(scope="module")
def model():
    return mujoco.MjModel.from_xml_string(SCENE)


@pytest.fixture(scope="module")
def robot(model):
    # The recorder's robots stand alone in their files; here the first joint in the model is the ball's.
    alone = mujoco.MjSpec.from_string(SCENE)
    alone.delete(alone.body("ball"))
    return robot_spec(alone.compile(), name="two-spheres", substeps=1, control="effort")


def states(count, seed=0):
    """qpos (count, 16) and qvel (count, 14): ball and robot near each other and near the floor, turned anyhow."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return 2 * torch.rand(*shape, generator=g, dtype=torch.float64) - 1

    qpos = torch.zeros(count, 16, dtype=torch.float64)
    qpos[:, :3] = torch.tensor([0.22, 0.0, 0.12]) + 0.03 * uniform(count, 3)
    qpos[:, 3:7] = rotvec_to_quat(uniform(count, 3))
    qpos[:, 7:10] = torch.tensor([0.0, 0.0, 0.13]) + 0.03 * uniform(count, 3)
    qpos[:, 10:14] = rotvec_to_quat(0.5 * uniform(count, 3))
    qpos[:, 14:] = 0.6 * uniform(count, 2)
    return qpos, 2 * uniform(count, 14)


def placed(model, qpos, qvel):
    found = []
    for q, v in zip(qpos.numpy(), qvel.numpy(), strict=True):
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = q, v
        mujoco.mj_forward(model, data)
        found.append(data)
    return found


def read_in(engine, model, robot, qpos, qvel, **options):
    """Rows of states with every contact within REACH, from either engine."""
    copy = mujoco.MjModel.from_xml_string(SCENE)
    if engine == "MuJoCo":
        list_approaching(copy, robot, REACH)
        geoms = contact_geoms(copy, robot, reach=REACH)
        return read_contacts(geoms, placed(copy, qpos, qvel), dtype=torch.float64, **options)
    with wp.ScopedDevice("cpu"):
        warp_model, data = mjw.put_model(copy), mjw.make_data(copy, nworld=len(qpos), nconmax=32, njmax=100)
        list_approaching_in_warp(warp_model, copy, robot, REACH)
        wp.to_torch(data.qpos).copy_(qpos)
        wp.to_torch(data.qvel).copy_(qvel)
        mjw.forward(warp_model, data)
        return read_contacts(contact_geoms(copy, robot, reach=REACH), data, **options)


ENGINES = pytest.mark.parametrize("engine", ["MuJoCo", "MuJoCo Warp"])


@ENGINES
def test_static_dynamic_and_self_contacts_are_told_apart_and_a_self_contact_has_two_sides(engine, model, robot):
    qpos, qvel = states(200)
    rows = read_in(engine, model, robot, qpos, qvel)
    kinds = {kind: int(((rows.kind == kind) & rows.mask).sum()) for kind in Counterpart}
    assert min(kinds.values()) > 50, kinds
    for world in range(200):
        own = rows.mask[world] & (rows.kind[world] == Counterpart.SELF)
        if not own.any():
            continue
        # Trunk and hand: each is the other's counterpart.
        assert sorted(rows.link[world, own].tolist()) == [0, 2]
        first, second = (getattr(rows, name)[world, own] for name in ("normal", "velocity"))
        torch.testing.assert_close(first[0], -first[1])
        points, gaps = rows.point[world, own], rows.gap[world, own]
        assert gaps[0] == gaps[1]
        torch.testing.assert_close(points[0] - points[1], first[0] * gaps[0], rtol=0, atol=1e-6)
        # Seen from either side the two bodies close at one speed.
        torch.testing.assert_close((first * second).sum(-1)[0], (first * second).sum(-1)[1], rtol=1e-4, atol=1e-5)


@ENGINES
def test_the_gap_changes_by_the_closing_speed_whatever_the_counterpart_does(engine, model, robot):
    qpos, qvel = states(60, seed=1)
    rows = read_in(engine, model, robot, qpos, qvel)
    step = 1e-6
    later = mujoco.MjModel.from_xml_string(SCENE)
    moved = qpos.clone()
    for n in range(len(qpos)):
        q = moved[n].numpy()
        mujoco.mj_integratePos(later, q, qvel[n].numpy(), step)
    after = read_in("MuJoCo", model, robot, moved, qvel)
    before = read_in("MuJoCo", model, robot, qpos, qvel)
    rate = (after.gap - before.gap) / step
    # The order of rows is that of their gaps, which a step of a microsecond seldom changes.
    same = rows.mask & before.mask & after.mask & (rate.abs() < 50)
    for other in (before, after):
        same &= (rows.link == other.link) & (rows.kind == other.kind)
    closing = (rows.normal * rows.velocity).sum(-1).double()
    for kind in Counterpart:
        chosen = same & (rows.kind == kind)
        assert int(chosen.sum()) > 15
        torch.testing.assert_close(closing[chosen], rate[chosen], rtol=1e-3, atol=2e-3)


@ENGINES
def test_rows_lie_on_the_robot_in_the_base_frame_with_the_friction_of_the_pair(engine, model, robot):
    qpos, qvel = states(100, seed=2)
    rows = read_in(engine, model, robot, qpos, qvel)
    trunk = rows.mask & (rows.link == 0)
    # The trunk is a sphere about the base's origin.
    torch.testing.assert_close(rows.point[trunk].norm(dim=-1), torch.full_like(rows.gap[trunk], 0.1), rtol=1e-5, atol=0)
    torch.testing.assert_close(rows.point[trunk], -0.1 * rows.normal[trunk], rtol=0, atol=1e-6)
    expected = torch.tensor([0.7, 1.2, 0.5], dtype=rows.friction.dtype)[rows.kind]
    torch.testing.assert_close(rows.friction[rows.mask], expected[rows.mask])


def test_both_engines_list_the_same_rows(model, robot):
    qpos, qvel = states(300, seed=3)
    one, other = (read_in(engine, model, robot, qpos, qvel) for engine in ("MuJoCo", "MuJoCo Warp"))
    # Deepest first, so equal sets are equal rows unless two gaps are.
    assert (one.count == other.count).double().mean() > 0.99
    same = one.mask & other.mask & (one.count == other.count)[:, None] & (one.link == other.link)
    assert same.sum() > 0.98 * one.mask.sum()
    for name in ("gap", "point", "normal", "velocity", "friction"):
        first, second = getattr(one, name)[same].float(), getattr(other, name)[same]
        torch.testing.assert_close(first, second, rtol=1e-4, atol=2e-5)


@ENGINES
def test_overflow_keeps_the_deepest_rows_and_is_counted_in_its_world(engine, model, robot):
    qpos, qvel = states(50, seed=4)
    qpos[0, 9] = 5.0  # one robot far from everything but itself
    whole = read_in(engine, model, robot, qpos, qvel)
    few = read_in(engine, model, robot, qpos, qvel, max_rows=2)
    assert not bool(whole.overflow.any())
    assert torch.equal(few.count, whole.count)
    assert torch.equal(few.overflow, (whole.count - 2).clamp_min(0))
    assert 0 < int((few.overflow > 0).sum()) < 50
    torch.testing.assert_close(few.gap[few.mask], whole.gap[:, :2][few.mask])
    deepest = whole.gap.masked_fill(~whole.mask, torch.inf).sort(-1).values
    torch.testing.assert_close(few.gap[few.mask], deepest[:, :2][few.mask])


def test_a_full_buffer_of_mujoco_warp_shows_as_overflow_in_every_world():
    go2 = load_robot("go2")
    state = torch.tensor(go2.home_state).repeat(8, 1)
    roomy, tight = (MjWarpCollider(go2, Terrain(), 8, max_rows=32, nconmax=n) for n in (32, 3))
    assert not bool(roomy(state).overflow.any())
    rows = tight(state)
    assert bool((rows.overflow > 0).all())
    # It is a value of the call, not of the object: with nothing to list nothing is lost.
    state[:, 2] += 5.0
    assert not bool(tight(state).overflow.any())


def test_a_pair_that_used_up_its_places_in_mujoco_shows_as_overflow():
    # MuJoCo stops at 50 contacts of one pair without a warning; a big sphere on a fine grid has more prisms below it.
    text = SCENE.replace(
        '<geom name="floor" type="plane" size="0 0 1"', '<geom name="floor" type="hfield" hfield="grid"'
    ).replace(
        "<worldbody>", '<asset><hfield name="grid" nrow="60" ncol="60" size="1 1 0.1 0.5"/></asset><worldbody>', 1
    )
    model = mujoco.MjModel.from_xml_string(text)
    alone = mujoco.MjSpec.from_string(SCENE)
    alone.delete(alone.body("ball"))
    robot = robot_spec(alone.compile(), name="two-spheres", substeps=1, control="effort")
    qpos = torch.tensor(model.qpos0).repeat(2, 1)
    qpos[0, 9], qpos[1, 9] = 0.02, 0.0999
    rows = read_contacts(contact_geoms(model, robot), placed(model, qpos, torch.zeros(2, 14, dtype=torch.float64)))
    # And however many prisms a sphere stands on, it gives one row.
    assert (rows.mask & (rows.kind == Counterpart.STATIC)).sum(-1).tolist() == [1, 1]
    assert rows.overflow.tolist() == [1, 0]


@ENGINES
def test_nothing_near_is_an_empty_set_that_the_encoder_reads_as_any_other(engine):
    go2 = load_robot("go2")
    kind = MujocoCollider if engine == "MuJoCo" else MjWarpCollider
    state = torch.tensor(go2.home_state).repeat(3, 1)
    state[:, 2] += torch.tensor([5.0, 6.0, 7.0])
    rows = kind(go2, Terrain(), 3)(state)
    assert rows.count.tolist() == [0, 0, 0]
    assert not bool(rows.mask.any())
    torch.manual_seed(0)
    encoder = ContactSetEncoder(ContactEncoderConfig(), go2.spec, go2.probes)
    with torch.no_grad():
        out = encoder(rows._asdict())
        where = {k: v.expand(3, *v.shape[1:]) for k, v in scene(Terrain()).items()}
        assert torch.equal(out, encoder(encoder.observe(state, where)))
    assert bool(torch.isfinite(out).all())


@ENGINES
def test_order_padding_and_duplicates_of_engine_rows_do_what_the_encoder_promises(engine, model, robot):
    qpos, qvel = states(20, seed=5)
    rows = read_in(engine, model, robot, qpos, qvel, max_rows=12)
    rows = ContactSet._make([v.double() if v.is_floating_point() else v for v in rows])
    torch.manual_seed(0)
    encoder = ContactSetEncoder(ContactEncoderConfig(margin=REACH), robot, (TRUNK_PROBE,)).double()
    with torch.no_grad():
        plain = encoder(rows._asdict())
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
        turned = ContactSet._make([*(v[:, order] for v in rows[:-1]), rows.count])
        torch.testing.assert_close(encoder(turned._asdict()), plain, rtol=0, atol=1e-12)
        hole = ~rows.mask
        assert bool(hole.any(-1).all())
        wild = {
            k: v.masked_fill(hole.view(*hole.shape, *[1] * (v.dim() - 2)), torch.nan)
            for k, v in rows._asdict().items()
            if v.is_floating_point()
        }
        assert torch.equal(encoder(rows._replace(**wild)._asdict()), plain)
        twice = ContactSet._make([*(torch.cat([v, v], 1) for v in rows[:-1]), 2 * rows.count])
        doubled = encoder(twice._asdict())
        torch.testing.assert_close(doubled[:, :-1], 2 * plain[:, :-1], rtol=0, atol=1e-12)
        torch.testing.assert_close(doubled[:, -1], torch.log1p(2 * rows.mask.sum(-1).double()))


def test_listing_what_approaches_pushes_nothing():
    go2 = load_robot("go2")
    plain, listing = build_model(go2, Terrain.platform(0.1)), build_model(go2, Terrain.platform(0.1))
    list_approaching(listing, go2.spec, 0.08)
    worlds = [mujoco.MjData(m) for m in (plain, listing)]
    for data in worlds:
        data.qpos[:] = go2.home_qpos
        data.qpos[:3] += [0.9, 0.0, 0.2]
        data.qvel[:6] = [0.5, 0.1, 0.0, 0.5, 1.0, 0.2]
        data.ctrl[:] = go2.home_ctrl
    more = 0
    for _ in range(300):
        for m, data in zip((plain, listing), worlds, strict=True):
            mujoco.mj_step(m, data)
        more += worlds[1].ncon > worlds[0].ncon
        assert np.array_equal(worlds[0].qpos, worlds[1].qpos)
    assert more > 100


def test_running_worlds_of_mujoco_warp_are_read_in_place_and_move_as_before():
    go2 = load_robot("go2")
    start = torch.tensor(go2.home_state).repeat(4, 1)
    start[:, 2] += torch.tensor([0.0, 0.02, 0.05, 0.3])
    control = torch.tensor(go2.home_ctrl).repeat(4, 1)
    with MjWarpWorlds(go2, Terrain(), 4, nconmax=64) as plain, MjWarpWorlds(go2, Terrain(), 4, nconmax=64) as listing:
        list_approaching_in_warp(listing.warp_model, listing.mj_model, go2.spec, 0.08)
        geoms = contact_geoms(listing.mj_model, go2.spec, reach=0.08)
        for worlds in (plain, listing):
            worlds.set_state(start)
        before = start
        for step in range(10):
            before = listing.state
            assert torch.equal(plain.step(control), listing.step(control)), step
        rows = read_contacts(geoms, listing.warp_data, max_rows=24)
    assert bool((rows.count[:3] >= 4).all())
    assert bool((rows.gap[rows.mask] > 0).any())
    # They are of the start of the last physics step: between the state before and the state after.
    where = {k: v.expand(4, *v.shape[1:]) for k, v in scene(Terrain()).items()}
    spheres = tuple(p for p in go2.probes if p.name.endswith("foot"))
    collider = PrimitiveCollider(go2.spec, spheres, margin=1.0)
    low, high = (collider(s, where).gap.amin(-1) for s in (before, listing.state))
    least = rows.gap.masked_fill(~rows.mask, torch.inf).amin(-1)
    near = least < 0.08
    assert bool((least[near] <= torch.maximum(low, high)[near] + 2e-3).all())


def test_every_world_has_its_own_terrain_and_a_nan_stays_in_its_world():
    go2 = load_robot("go2")
    terrains = [Terrain(), Terrain.platform(0.2, front=-0.4, friction=1.4), Terrain(floor_normal=(0.28, 0.0, 0.96))]
    state = torch.tensor(go2.home_state).repeat(3, 1)
    state[1, 2] += 0.2
    for kind in (MujocoCollider, MjWarpCollider):
        rows = kind(go2, terrains, 3, max_rows=32)(state)
        level = rows.mask & (rows.gap < 0.02)
        assert bool(level.any(-1).all())
        assert float(rows.friction[1][level[1]].max()) == pytest.approx(1.4)
        turned = rows.normal[2, level[2]]
        torch.testing.assert_close(turned, torch.tensor([0.28, 0.0, 0.96]).expand_as(turned), rtol=0, atol=1e-6)
    collider = MjWarpCollider(go2, terrains, 3, max_rows=32)
    good = collider(state)
    ill = state.clone()
    ill[1] = torch.nan
    rows = collider(ill)
    assert int(rows.mask[1].sum()) == 0
    for field in ("gap", "point", "velocity"):
        kept = [0, 2]
        assert torch.equal(getattr(rows, field)[kept][good.mask[kept]], getattr(good, field)[kept][good.mask[kept]])
    with pytest.raises(ValueError, match="state holds values that are not finite"):
        MujocoCollider(go2, terrains, 3)(ill)


@pytest.mark.parametrize("engine", ["MuJoCo", "MuJoCo Warp"])
def test_explicit_contact_pairs_are_listed_before_they_touch(engine):
    robot = load_robot("double-pendulum")
    state = 3.0 * (2 * torch.rand(40, 4, generator=torch.Generator().manual_seed(0)) - 1)
    low = Terrain(floor_friction=0.5, floor_offset=1.0)
    kind = MujocoCollider if engine == "MuJoCo" else MjWarpCollider
    rows = kind(robot, low, 40, margin=0.4, max_rows=32)(state)
    where = {k: v.expand(40, *v.shape[1:]) for k, v in scene(low, num_boxes=0).items()}
    own = PrimitiveCollider(robot.spec, robot.probes, margin=0.4)(state, where)
    least, expected = (r.gap.masked_fill(~r.mask, torch.inf).amin(-1) for r in (rows, own))
    approaching = (expected > 0.01) & (expected < 0.39)
    assert int(approaching.sum()) > 3, expected
    torch.testing.assert_close(least[approaching], expected[approaching], rtol=0, atol=1e-5)


def test_what_cannot_be_read_is_refused_in_one_line(model, robot):
    go2 = load_robot("go2")
    with pytest.raises(ValueError, match="link 'base', expected a body of that name"):
        contact_geoms(model, go2.spec)
    with pytest.raises(ValueError, match="reach is 0"):
        list_approaching(mujoco.MjModel.from_xml_string(SCENE), robot, 0.0)
    with pytest.raises(ValueError, match="max_rows is 0"):
        read_contacts(contact_geoms(model, robot), mujoco.MjData(model), max_rows=0)
    field = HeightField(heights=((0.0, 0.0), (0.0, 0.1)), origin=(0.0, 0.0), spacing=(1.0, 1.0))
    rough = Terrain(field=field, floor_offset=-1.0)
    with pytest.raises(ValueError, match="mj_model has a height field"):
        list_approaching_in_warp(None, build_model(go2, rough), go2.spec, 0.1)
    with pytest.raises(ValueError, match="geom 'cube' of cube is no sphere"):
        MjWarpCollider(load_robot("cube"), rough, 2)
    with pytest.raises(ValueError, match="state has shape"):
        MujocoCollider(go2, Terrain(), 2)(torch.zeros(3, 37))
    with pytest.raises(ValueError, match="margin is 0"):
        MjWarpCollider(go2, Terrain(), 2, margin=0.0)
