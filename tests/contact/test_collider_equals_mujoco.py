"""The torch collider's rows against MuJoCo's own contacts on the same states."""

import mujoco
import numpy as np
import pytest
import torch

from nerd_contact import PrimitiveCollider
from nerd_core.rotation import quat_to_matrix, rotvec_to_quat
from nerd_coupling.recording import RandomTargets
from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Box, Terrain, scene

MARGIN = 0.05
SCENE_ROUNDING = 2e-7  # scene tensors are float32, MuJoCo's sizes float64


def scattered(count, terrain, seed=0):
    robot = load_robot("go2")
    span = torch.tensor([[-1.0, 1.0]]).repeat(robot.spec.nu, 1)
    generator = torch.Generator().manual_seed(seed)
    state = RandomTargets(robot, span).stances(count, terrain, generator)
    state[:, 2] += 0.03 * torch.randn(count, generator=generator)
    state = state.double()
    state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)  # MuJoCo normalises in float64
    return robot, state


def mujoco_rows(robot, terrain, state):
    """(geom, surface) -> list of (gap, normal towards the robot in the base frame, midpoint)."""
    mj_model = build_model(robot, terrain)
    # margin 0 with a gap lists contacts up to the gap without force (MuJoCo 3.17).
    mj_model.geom_margin[:], mj_model.geom_gap[:] = 0.0, MARGIN
    data = mujoco.MjData(mj_model)
    found = []
    for row in state:
        data.qpos[:], data.qvel[:] = row[: robot.spec.nq], row[robot.spec.nq :]
        mujoco.mj_forward(mj_model, data)
        base = quat_to_matrix(row[3:7]).numpy()
        rows = {}
        for contact in data.contact:
            first, second = (mj_model.geom(int(g)).name for g in contact.geom)
            ground_first = first == "floor" or first.startswith("box")
            surface, geom = (first, second) if ground_first else (second, first)
            # MuJoCo's normal points from the first geom to the second.
            normal = contact.frame[:3] * (1 if ground_first else -1)
            point = base.T @ (contact.pos - row[:3].numpy())
            rows.setdefault((geom, surface), []).append((contact.dist, base.T @ normal, point))
        found.append(rows)
    return found


@pytest.mark.parametrize(
    "terrain",
    [
        Terrain(),
        Terrain.platform(0.181),
        Terrain(boxes=(Box(center=(0.9, 0.1, 0.0), half_size=(0.3, 0.5, 0.12), yaw=0.4),)),
    ],
)
def test_every_sphere_contact_of_mujoco_is_a_row_with_the_same_gap_normal_and_point(terrain):
    robot, state = scattered(400, terrain)
    where = {k: v.expand(len(state), *v.shape[1:]).double() for k, v in scene(terrain).items()}
    rows = PrimitiveCollider(robot.spec, robot.probes, margin=MARGIN)(state, where)
    count = len(robot.probes)
    spheres = {p.name: i for i, p in enumerate(robot.probes) if p.name[-2:-1] != "_"}
    compared = 0
    for number, expected in enumerate(mujoco_rows(robot, terrain, state)):
        for (geom, surface), contacts in expected.items():
            if geom not in spheres:
                continue
            index = spheres[geom] + (0 if surface == "floor" else count)
            ((gap, normal, middle),) = contacts
            if gap > MARGIN:  # the pair's list reaches to the sum of both geoms' gaps
                continue
            # Where the centre lies inside the box two faces may be equally near; skip that tie.
            if gap < -robot.probes[spheres[geom]].radius:
                continue
            compared += 1
            assert bool(rows.mask[number, index])
            assert float(rows.gap[number, index]) == pytest.approx(gap, abs=SCENE_ROUNDING)
            # Rounding of the scene, over the short lever from the box to the centre.
            assert np.abs(rows.normal[number, index].numpy() - normal).max() < 2e-5
            # MuJoCo reports the middle between the surfaces; a row holds the robot's own surface.
            surface_point = middle + normal * gap / 2
            assert np.abs(rows.point[number, index].numpy() - surface_point).max() < 1e-6
        # And the other way round: what touches here, touches there.
        listed = {(g, s) for (g, s), c in expected.items() if c[0][0] < MARGIN}
        for geom, probe in spheres.items():
            for surface, offset in (("floor", 0), ("box0", count)):
                row = float(rows.gap[number, probe + offset])
                # Above zero MuJoCo's broad phase may drop a pair before the gap is looked at.
                if -robot.probes[probe].radius < row < -SCENE_ROUNDING:
                    assert (geom, surface) in listed
    assert compared > 100


def test_no_row_of_a_capsule_is_deeper_than_mujocos_and_the_ends_on_the_plane_agree():
    terrain = Terrain()
    robot, state = scattered(400, terrain, seed=3)
    where = {k: v.expand(len(state), *v.shape[1:]).double() for k, v in scene(terrain).items()}
    rows = PrimitiveCollider(robot.spec, robot.probes, margin=MARGIN)(state, where)
    compared = 0
    for number, expected in enumerate(mujoco_rows(robot, terrain, state)):
        for (geom, _), contacts in expected.items():
            samples = [i for i, p in enumerate(robot.probes) if p.name.startswith(f"{geom}_")]
            if not samples:
                continue
            compared += 1
            mine = float(rows.gap[number, samples].min())
            assert mine == pytest.approx(min(c[0] for c in contacts), abs=SCENE_ROUNDING)
    assert compared > 100


def test_a_row_moves_as_its_point_does():
    terrain = Terrain.platform(0.1)
    robot, state = scattered(64, terrain, seed=5)
    where = {k: v.expand(len(state), *v.shape[1:]).double() for k, v in scene(terrain).items()}
    collider = PrimitiveCollider(robot.spec, robot.probes, margin=5.0)
    now = collider(state, where)
    step, spec = 1e-6, robot.spec
    later = state.clone()
    later[:, :3] += step * state[:, spec.nq : spec.nq + 3]
    turn = rotvec_to_quat(step * state[:, spec.nq + 3 : spec.nq + 6])
    from nerd_core.rotation import quat_multiply

    later[:, 3:7] = quat_multiply(state[:, 3:7], turn)
    later[:, 7 : spec.nq] += step * state[:, spec.nq + 6 :]
    count = len(robot.probes)
    rate = (collider(later, where).gap - now.gap)[:, :count] / step
    closing = (now.normal * now.velocity).sum(-1)[:, :count]
    # Against the plane the gap changes by exactly the closing speed.
    torch.testing.assert_close(rate, closing, rtol=1e-4, atol=1e-4)


def test_friction_is_the_larger_of_the_pair():
    terrain = Terrain(floor_friction=1.3)
    robot, state = scattered(3, terrain)
    where = {k: v.expand(3, *v.shape[1:]) for k, v in scene(terrain).items()}
    rows = PrimitiveCollider(robot.spec, robot.probes)(state.float(), where)
    count = len(robot.probes)
    assert torch.all(rows.friction[:, :count] == 1.3)
    assert torch.allclose(rows.friction[:, count:], torch.tensor([p.friction for p in robot.probes]))


def test_states_with_a_time_axis_give_the_rows_of_each_time():
    terrain = Terrain.platform(0.1)
    robot, state = scattered(12, terrain)
    where = {k: v.expand(12, *v.shape[1:]).double() for k, v in scene(terrain).items()}
    collider = PrimitiveCollider(robot.spec, robot.probes, max_rows=16)
    flat = collider(state, where)
    few = {k: v[:4] for k, v in where.items()}
    stacked = collider(state.view(4, 3, -1), few)
    for one, other in zip(flat, stacked, strict=True):
        torch.testing.assert_close(one, other.flatten(0, 1))


def test_bad_settings_are_refused():
    robot = load_robot("go2")
    for wrong in ({"margin": 0.0}, {"margin": float("nan")}):
        with pytest.raises(ValueError, match="margin"):
            PrimitiveCollider(robot.spec, robot.probes, **wrong)
    with pytest.raises(ValueError, match="probes"):
        PrimitiveCollider(robot.spec, ())
