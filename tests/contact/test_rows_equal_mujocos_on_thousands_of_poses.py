"""Rows of the torch collider against C MuJoCo's own contacts: Go2 over planes, boxes and height fields.

Compared are spheres, whose contacts are exact in both, where the gap is below the margin in both. MuJoCo holds a
sphere against the prism under every triangle of a height field and lists one contact for each: the deepest of a
sphere is its distance to the surface and is what a row holds. Left out are centres below the surface, where a box has
two nearest faces and a prism offers its inner walls, which no surface of the ground has.
"""

import mujoco
import numpy as np
import pytest
import torch

from nerd_contact import PrimitiveCollider
from nerd_coupling.heightfield import HeightField
from nerd_coupling.recording import RandomTargets
from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Box, Terrain, scene

MARGIN = 0.05
COUNT = 1000
# Scenes are float32 and MuJoCo's elevations float32 fractions of their range; its convex collision stops at 1e-10 m.
TOLERANCE = 5e-7


def rough(seed, spacing=(0.1, 0.12), scale=0.06):
    """Random heights, neighbours independent: slopes up to 45 degrees, ridges and pits in every cell."""
    rows, cols = int(2.4 / spacing[1]), int(3.0 / spacing[0])
    heights = scale * np.random.default_rng(seed).random((rows, cols)) - 0.02
    return HeightField(
        heights=tuple(map(tuple, heights.astype(np.float32).tolist())), origin=(-0.5, -1.2), spacing=spacing
    )


TERRAINS = {
    "plane": Terrain(),
    "tilted plane": Terrain(floor_normal=(0.28, 0.0, 0.96), floor_offset=0.1),
    "boxes": Terrain(
        boxes=(
            Box(center=(0.9, 0.1, 0.0), half_size=(0.3, 0.5, 0.12), yaw=0.4),
            Box(center=(1.6, -0.2, 0.0), half_size=(0.2, 0.3, 0.2), yaw=-0.9),
        )
    ),
    "height field": Terrain(field=rough(0), floor_offset=-1.0),
    "fine height field": Terrain(field=rough(1, spacing=(0.05, 0.04), scale=0.02), floor_offset=-1.0),
    "height field and box": Terrain(
        boxes=(Box(center=(0.9, 0.1, 0.0), half_size=(0.3, 0.5, 0.12), yaw=0.4),), field=rough(2)
    ),
}


def poses(robot, terrain, count):
    generator = torch.Generator().manual_seed(0)
    span = torch.tensor([[-1.0, 1.0]]).repeat(robot.spec.nu, 1)
    state = RandomTargets(robot, span).stances(count, terrain, generator)
    state[:, 2] += 0.02 * torch.randn(count, generator=generator)
    state = state.double()
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)  # MuJoCo normalises in float64
    return state


def mujocos(robot, terrain, state, spheres, surfaces):
    """Deepest contact of each sphere and surface: gap, infinite where none is listed; world normal and point."""
    model = build_model(robot, terrain, num_boxes=len(terrain.boxes))
    # margin 0 with a gap lists contacts up to the gap without force (MuJoCo 3.17).
    model.geom_margin[:], model.geom_gap[:] = 0.0, MARGIN
    model.opt.ccd_tolerance, model.opt.ccd_iterations = 1e-10, 200
    data = mujoco.MjData(model)
    place = {model.geom(name).id: i for i, name in enumerate(surfaces)}
    index = np.full(model.ngeom, -1)
    for i, name in enumerate(spheres):
        index[model.geom(name).id] = i
    shape = (len(state), len(surfaces), len(spheres))
    gap, normal, point = np.full(shape, np.inf), np.zeros((*shape, 3)), np.zeros((*shape, 3))
    most = 0
    for n, row in enumerate(state.numpy()):
        data.qpos[:] = row[: model.nq]
        for stage in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_collision):
            stage(model, data)
        listed = zip(data.contact.geom.tolist(), data.contact.dist, data.contact.frame, data.contact.pos, strict=True)
        for (first, second), distance, frame, middle in listed:
            sign, surface, geom = (1, first, second) if first in place else (-1, second, first)
            at = (n, place[surface], index[geom])
            if index[geom] < 0 or distance >= gap[at]:
                most += index[geom] >= 0
                continue
            # MuJoCo's normal points from the first geom to the second, and its point lies midway between the two.
            gap[at], normal[at] = distance, sign * frame[:3]
            point[at] = middle + normal[at] * distance / 2
    return gap, normal, point, most


@pytest.mark.parametrize("name", TERRAINS)
def test_gap_normal_and_point_are_those_of_the_deepest_contact(name):
    robot, terrain = load_robot("go2"), TERRAINS[name]
    state = poses(robot, terrain, COUNT)
    where = {k: v.double().expand(COUNT, *v.shape[1:]) for k, v in scene(terrain, num_boxes=len(terrain.boxes)).items()}
    collider = PrimitiveCollider(robot.spec, robot.probes, margin=MARGIN, field_cells=7)
    collider.check_scene(where)
    rows = collider(state, where)
    surfaces = ["floor", *(f"box{i}" for i in range(len(terrain.boxes))), *(["field"] if terrain.field else [])]
    exact = [i for i, p in enumerate(robot.probes) if p.name[-2:-1] != "_"]
    radius = np.array([robot.probes[i].radius for i in exact])

    def ours(value):
        return value.unflatten(1, (len(surfaces), len(robot.probes)))[:, :, exact].numpy()

    gap, normal, point, several = mujocos(robot, terrain, state, [robot.probes[i].name for i in exact], surfaces)
    mine = ours(rows.gap)
    outside = np.minimum(gap, mine) > -radius
    both = (gap < MARGIN) & (mine < MARGIN) & outside
    turn = torch.from_numpy(mujoco_rotations(state))
    world = np.einsum("nij,nspj->nspi", turn, ours(rows.normal))
    place = np.einsum("nij,nspj->nspi", turn, ours(rows.point)) + state[:, None, None, :3].numpy()
    errors = {
        "gap": np.abs(mine - gap)[both].max(),
        "normal": (np.abs(world - normal).max(-1) * np.maximum(0.01, radius + mine))[both].max(),
        "point": np.abs(place - point).max(-1)[both].max(),
    }
    touching = int((both & (gap < 0)).sum())
    print(name, f"{both.sum()} rows, {touching} touching", {k: f"{v:.1e}" for k, v in errors.items()})
    assert both.sum() > COUNT / 4
    assert touching > 100
    # A normal's error times its lever, from the surface to the centre, is the length that it stands for.
    assert max(errors.values()) < TOLERANCE, errors
    assert ours(rows.mask)[both].all()
    # What touches in one touches in the other, a rounding away from zero. Above zero MuJoCo's broad phase may drop a
    # pair, and lists pairs up to the sum of both gaps.
    for one, other in ((mine, gap), (gap, mine)):
        assert (other < 0)[(one < -TOLERANCE) & outside].all()
    if "field" in surfaces:
        assert several > both.sum(), "a sphere should touch several prisms"


def mujoco_rotations(state):
    flat = np.zeros((len(state), 9))
    for out, row in zip(flat, state.numpy(), strict=True):
        mujoco.mju_quat2Mat(out, row[3:7].copy())
    return flat.reshape(-1, 3, 3)


def test_no_sample_of_a_capsule_is_deeper_than_mujocos_capsule_over_a_height_field():
    robot, terrain = load_robot("go2"), TERRAINS["height field"]
    state = poses(robot, terrain, 300)
    where = {k: v.double().expand(300, *v.shape[1:]) for k, v in scene(terrain, num_boxes=0).items()}
    rows = PrimitiveCollider(robot.spec, robot.probes, margin=MARGIN, field_cells=4)(state, where)
    names = sorted({p.name.rsplit("_", 1)[0] for p in robot.probes if p.name[-2:-1] == "_"})
    gap, *_ = mujocos(robot, terrain, state, names, ["floor", "field"])
    mine = rows.gap.unflatten(1, (2, -1))[:, 1].numpy()
    compared = 0
    for i, name in enumerate(names):
        samples = [k for k, p in enumerate(robot.probes) if p.name.startswith(f"{name}_")]
        radius = robot.probes[samples[0]].radius
        listed = (gap[:, 1, i] < MARGIN) & (gap[:, 1, i] > -radius) & (mine[:, samples].min(-1) > -radius)
        compared += listed.sum()
        assert (mine[:, samples].min(-1) - gap[:, 1, i])[listed].min(initial=0) > -1e-5
    assert compared > 100
