"""Height fields as surfaces: a brute-force distance, MuJoCo's rays, derivatives, tiles and static shapes."""

import math

import mujoco
import numpy as np
import pytest
import torch

from nerd_contact import ContactEncoderConfig, ContactSetEncoder, HeightGrid, PrimitiveCollider
from nerd_contact.heightfield import TILE, cells_needed, tile_maxima
from nerd_coupling.heightfield import HeightField, add_field, set_field
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain, scene


def grid(batch=1, rows=14, cols=19, seed=0, scale=0.06, spacing=(0.1, 0.08)):
    generator = torch.Generator().manual_seed(seed)
    height = scale * torch.rand(batch, rows, cols, generator=generator, dtype=torch.float64)
    place = torch.tensor([[-0.4, 0.3]], dtype=torch.float64).expand(batch, 2)
    step = torch.tensor([spacing], dtype=torch.float64).expand(batch, 2)
    return HeightGrid(height, place, step, tile_maxima(height))


def points(field, count, seed=1, low=-0.05, high=0.15):
    """Random points over and under the grid, shape (batch, count, 3)."""
    batch, rows, cols = field.height.shape
    share = torch.rand(batch, count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    span = field.spacing[:, None] * torch.tensor([cols - 1, rows - 1])
    xy = field.origin[:, None] + share[..., :2] * span
    return torch.cat([xy, low + (high - low) * share[..., 2:]], -1)


def sampled_distance(field, point, fine=60):
    """Least distance to a cloud of points on every triangle near one point; too large by under 2 / fine of a cell."""
    weights = torch.tensor([[i / fine, j / fine] for i in range(fine + 1) for j in range(fine + 1 - i)]).double()
    height, (ox, oy), (dx, dy) = field.height[0], field.origin[0], field.spacing[0]
    least = math.inf
    for r in range(height.shape[0] - 1):
        for c in range(height.shape[1] - 1):
            if abs(ox + (c + 0.5) * dx - point[0]) > 0.3 or abs(oy + (r + 0.5) * dy - point[1]) > 0.3:
                continue
            corner = {
                (i, j): torch.stack([ox + (c + j) * dx, oy + (r + i) * dy, height[r + i, c + j]])
                for i in (0, 1)
                for j in (0, 1)
            }
            for middle in ((0, 1), (1, 0)):
                a, b, d = corner[0, 0], corner[middle], corner[1, 1]
                cloud = a + weights[:, :1] * (b - a) + weights[:, 1:] * (d - a)
                least = min(least, float((cloud - point).norm(dim=-1).min()))
    return least


def test_the_distance_is_that_of_the_nearest_point_of_any_triangle():
    field = grid(rows=8, cols=8)
    place = points(field, 12)
    distance, normal = field.distance(place, 5)
    for n in range(12):
        sampled = sampled_distance(field, place[0, n])
        assert abs(float(distance[0, n])) <= sampled + 1e-12
        assert abs(float(distance[0, n])) >= sampled - 0.1 / 60
    torch.testing.assert_close(normal.norm(dim=-1), torch.ones(1, 12, dtype=torch.float64))
    # Following the normal by the distance leads onto the surface, from either side.
    foot = place - distance[..., None] * normal
    assert float(field.above(foot).abs().max()) < 1e-12
    assert torch.equal(distance < 0, field.above(place) < 0)


def test_the_height_above_ground_is_mujocos_ray():
    terrain = HeightField(
        heights=tuple(map(tuple, (0.2 * np.random.default_rng(0).random((9, 12))).tolist())),
        origin=(-0.4, 0.3),
        spacing=(0.1, 0.08),
    )
    spec = mujoco.MjSpec.from_string("<mujoco><worldbody/></mujoco>")
    add_field(spec, terrain.shape)
    model = spec.compile()
    set_field(model, terrain)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    field = HeightGrid.read(
        {k: v.double() for k, v in scene(Terrain(field=terrain)).items()}, torch.zeros(1, 1).double()
    )
    place = points(field, 300)
    place[..., 2] = 1.0
    above = field.above(place)[0].numpy()
    geom = np.zeros(1, np.int32)
    for point, height in zip(place[0].numpy(), above, strict=True):
        ray = mujoco.mj_ray(model, data, point, np.array([0.0, 0.0, -1.0]), None, 1, -1, geom)
        assert height == pytest.approx(ray, abs=1e-7)
    beyond = torch.tensor([[[-0.41, 0.5, 1.0], [0.0, 0.95, 1.0]]], dtype=torch.float64)
    assert bool(torch.isinf(field.above(beyond)).all())


def test_distance_and_normal_have_their_derivatives():
    field = grid()
    place = points(field, 40, low=-0.01, high=0.1)
    _, normal = field.distance(place, 4)
    leaf = place.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(field.distance(leaf, 4)[0].sum(), leaf)
    torch.testing.assert_close(slope, normal, rtol=0, atol=1e-12)
    # Faces, edges and corners alike, at places where the nearest one does not change.
    few = place[:, :8].clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda p: field.distance(p, 4), (few,))
    # On the surface itself, on a corner of the grid too, values and derivatives are finite.
    corner = torch.stack([field.origin[0, 0] + 0.3, field.origin[0, 1] + 0.24, field.height[0, 3, 3]])[None, None]
    corner.requires_grad_(True)
    at, up = field.distance(corner, 4)
    assert abs(float(at.detach())) < 1e-12
    assert bool(torch.isfinite(torch.autograd.grad(at.sum() + up.sum(), corner)[0]).all())


def test_a_window_is_exact_as_far_as_it_says_and_never_too_near():
    field = grid(batch=2, seed=3)
    place = points(field, 400, low=0.0, high=0.4)
    whole, _ = field.distance(place, 19)
    for cells in (1, 2, 4, 7):
        part, _ = field.distance(place, cells)
        reach = (cells - 1) / 2 * 0.08
        assert bool((part.abs() >= whole.abs() - 1e-12).all())
        near = whole.abs() <= reach
        assert bool(near.any()) or cells < 3
        torch.testing.assert_close(part[near], whole[near], rtol=0, atol=1e-12)
    assert cells_needed(0.08, 0.12) == 4
    assert cells_needed(0.08, 0.121) == 5


def test_no_point_is_nearer_than_its_clearance_over_the_tiles():
    for rows, cols in ((14, 19), (2, 2), (9, 17), (40, 5)):
        field = grid(batch=3, rows=rows, cols=cols, seed=rows)
        tiles = field.tiles
        assert tiles.shape == (3, math.ceil((rows - 1) / TILE), math.ceil((cols - 1) / TILE))
        for r in range(tiles.shape[1]):
            for c in range(tiles.shape[2]):
                part = field.height[:, r * TILE : (r + 1) * TILE + 1, c * TILE : (c + 1) * TILE + 1]
                assert torch.equal(tiles[:, r, c], part.amax((1, 2)))
        place = points(field, 300, low=-0.05, high=0.3)
        for cells in (1, 4, 9, 12):
            distance, _ = field.distance(place, cells)
            clearance = field.clearance(place, cells)
            assert bool((clearance <= distance + 1e-12).all())
            assert bool((clearance > -0.2).all())  # a bound that says nothing would pass too


def rough_scene(batch, dtype=torch.float32, dip=-1.0):
    heights = (0.05 * np.random.default_rng(5).random((30, 34))).astype(np.float32).tolist()
    field = HeightField(heights=tuple(map(tuple, heights)), origin=(-1.5, -1.5), spacing=(0.1, 0.1), friction=0.9)
    terrain = Terrain(field=field, floor_offset=dip)
    return {k: v.to(dtype).expand(batch, *v.shape[1:]) for k, v in scene(terrain, num_boxes=0).items()}


def standing(batch, lift=0.03):
    robot = load_robot("go2")
    generator = torch.Generator().manual_seed(0)
    state = torch.tensor(robot.home_state).repeat(batch, 1)
    state[:, :2] += 0.5 * torch.randn(batch, 2, generator=generator).clamp(-1.5, 1.5)
    state[:, 2] += lift
    return robot, state


def test_probes_far_above_their_tiles_cost_nothing_and_change_nothing():
    robot, state = standing(50)
    where = rough_scene(50)
    whole = PrimitiveCollider(robot.spec, robot.probes, margin=0.05)(state, where)
    few = PrimitiveCollider(robot.spec, robot.probes, margin=0.05, field_probes=20)(state, where)
    assert torch.all(few.overflow == 0)
    assert torch.equal(whole.mask, few.mask)
    assert int(whole.mask.sum()) > 100
    for one, other in zip(whole, few, strict=True):
        if one.dim() > 1:
            assert torch.equal(one[whole.mask], other[few.mask])
    # Too few: no row is invented, and what may be missing is said, world by world.
    fewer = PrimitiveCollider(robot.spec, robot.probes, margin=0.05, field_probes=2)(state, where)
    assert bool((whole.mask | ~fewer.mask).all())
    missing = whole.mask.sum(-1) - fewer.mask.sum(-1)
    assert bool((missing > 0).any())
    assert bool((fewer.overflow >= missing).all())


def test_an_exported_program_of_the_whole_observation_gives_the_same_rows():
    robot, state = standing(4)
    where = rough_scene(4)
    collider = PrimitiveCollider(robot.spec, robot.probes[5:16], max_rows=6, field_probes=5)

    class Rows(torch.nn.Module):
        def forward(self, state, where):
            return tuple(collider(state, where))

    # Exporting fails where code branches on a value.
    program = torch.export.export(Rows(), (state, where))
    for one, other in zip(collider(state, where), program.module()(state, where), strict=True):
        assert torch.equal(one, other)


def test_an_encoder_feels_the_height_field_and_gradients_reach_the_joints():
    robot, state = standing(3)
    where = rough_scene(3)
    torch.manual_seed(0)
    encoder = ContactSetEncoder(ContactEncoderConfig(field_cells=5), robot.spec, robot.probes)
    assert encoder.config_json()["field_cells"] == 5
    assert "field_cells" not in ContactSetEncoder(ContactEncoderConfig(), robot.spec, robot.probes).config_json()
    leaf = state.clone().requires_grad_(True)
    out = encoder(encoder.observe(leaf, where))
    bare = {k: v for k, v in where.items() if not k.startswith("hfield")}
    assert not torch.allclose(out, encoder(encoder.observe(state, bare)))
    (slope,) = torch.autograd.grad(out.sum(), leaf)
    assert bool(torch.isfinite(slope).all())
    assert bool((slope[:, 7:19] != 0).any())


def test_nan_in_one_world_stays_in_that_world():
    robot, state = standing(3)
    where = rough_scene(3)
    collider = PrimitiveCollider(robot.spec, robot.probes)
    clean = collider(state, where)
    for bad in (math.nan, math.inf):
        wild = state.clone()
        wild[1, :3] = bad
        found = collider(wild, where)
        for one, other in zip(clean, found, strict=True):
            assert torch.equal(one[[0, 2]], other[[0, 2]])
        assert not bool(found.mask[1].any())


def test_a_field_too_fine_for_the_window_and_a_scene_that_lacks_a_part_are_refused():
    robot, state = standing(2)
    where = rough_scene(2)
    PrimitiveCollider(robot.spec, robot.probes, margin=0.08).check_scene(where)
    with pytest.raises(ValueError, match="field_cells is 3, expected at least 4: radius and margin"):
        PrimitiveCollider(robot.spec, robot.probes, margin=0.08, field_cells=3).check_scene(where)
    del where["hfield_origin"]
    with pytest.raises(ValueError, match="scene lacks hfield_origin"):
        PrimitiveCollider(robot.spec, robot.probes)(state, where)
    where = rough_scene(2)
    where["hfield_height"] = where["hfield_height"][:, :1]
    with pytest.raises(ValueError, match="expected at least 2 rows and 2 columns"):
        PrimitiveCollider(robot.spec, robot.probes)(state, where)
    with pytest.raises(ValueError, match="spacing is 0"):
        cells_needed(0.0, 0.1)


def test_tiles_that_a_scene_lacks_are_found_from_the_heights():
    robot, state = standing(5)
    where = rough_scene(5)
    collider = PrimitiveCollider(robot.spec, robot.probes, field_probes=12)
    bare = {k: v for k, v in where.items() if k != "hfield_tile"}
    for one, other in zip(collider(state, where), collider(state, bare), strict=True):
        assert torch.equal(one, other)
