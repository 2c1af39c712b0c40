"""Terrain values and their tensors."""

import math

import mujoco
import numpy as np
import pytest
import torch

from nerd_coupling.heightfield import HeightField
from nerd_coupling.robots import build_model, build_models, load_robot, robot_spec, set_terrain
from nerd_coupling.terrain import Box, Terrain, scene
from nerd_coupling.worlds import MujocoWorlds


def test_a_platform_has_its_top_at_its_height_and_its_front_where_asked():
    (box,) = Terrain.platform(0.181, front=0.99, length=0.62, width=0.92).boxes
    assert box.top == pytest.approx(0.181)
    assert box.center[0] - box.half_size[0] == pytest.approx(0.99)
    assert box.center[1] == 0.0
    assert box.half_size[1] == pytest.approx(0.46)


def test_only_the_centre_moves_with_the_height():
    low, high = Terrain.platform(0.06).boxes[0], Terrain.platform(0.26).boxes[0]
    assert low.half_size == high.half_size
    assert low.center[:2] == high.center[:2]
    assert low.center[2] - low.half_size[2] < 0.0  # no gap under the deck


@pytest.mark.parametrize("height", [0.0, -0.1, 1.0, math.nan, math.inf])
def test_a_platform_of_no_or_absurd_height_is_refused(height):
    with pytest.raises(ValueError, match=r"height must be between 0 and 1 m .*got"):
        Terrain.platform(height)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"half_size": (0.1, 0.0, 0.1)}, "half_size must be positive"),
        ({"center": (0.0, math.nan, 0.0)}, "center must be three finite"),
        ({"friction": 0.0}, "friction must be a positive"),
        ({"yaw": math.inf}, "yaw must be a finite angle"),
    ],
)
def test_a_malformed_box_is_refused_by_the_name_of_its_field(change, message):
    with pytest.raises(ValueError, match=message):
        Box(**({"center": (0.0, 0.0, 0.0), "half_size": (0.1, 0.1, 0.1)} | change))


def test_a_scene_pads_every_terrain_to_the_same_number_of_boxes():
    stairs = Terrain(
        boxes=(
            Box(center=(1.0, 0.0, -0.4), half_size=(0.3, 0.4, 0.5)),
            Box(center=(1.6, 0.0, -0.3), half_size=(0.3, 0.4, 0.5), yaw=0.2, friction=0.4),
        ),
        floor_friction=0.6,
    )
    tensors = scene([Terrain(), Terrain.platform(0.1), stairs])
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "box_center": (3, 2, 3),
        "box_half": (3, 2, 3),
        "box_yaw": (3, 2),
        "friction": (3, 3),
    }
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert (tensors["box_center"][0, :, 2] == -100.0).all()
    torch.testing.assert_close(tensors["friction"][2], torch.tensor([0.6, 0.8, 0.4]))
    torch.testing.assert_close(tensors["box_yaw"][2], torch.tensor([0.0, 0.2]))


def test_a_scene_has_room_for_a_box_even_on_flat_ground():
    assert scene(Terrain())["box_center"].shape == (1, 1, 3)


def test_a_scene_with_too_few_boxes_asked_for_is_refused():
    with pytest.raises(ValueError, match="terrain has 1 boxes, expected at most 0"):
        scene(Terrain.platform(0.1), num_boxes=0)


def rough(rows=12, cols=15, seed=0, spacing=(0.2, 0.15), friction=0.7):
    generator = torch.Generator().manual_seed(seed)
    heights = tuple(map(tuple, (0.1 * torch.rand(rows, cols, generator=generator) - 0.03).tolist()))
    return HeightField(heights=heights, origin=(-1.0, -0.8), spacing=spacing, friction=friction)


def test_a_scene_holds_the_height_fields_and_puts_missing_ones_out_of_reach():
    field = rough()
    tensors = scene([Terrain(), Terrain(field=field)], num_boxes=0)
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if name.startswith("hfield")}
    assert shapes == {
        "hfield_height": (2, 12, 15),
        "hfield_origin": (2, 2),
        "hfield_spacing": (2, 2),
        "hfield_friction": (2,),
        "hfield_tile": (2, 2, 2),
    }
    assert torch.equal(tensors["hfield_height"][1], torch.tensor(field.heights))
    assert bool((tensors["hfield_height"][0] == -100.0).all())
    assert not any(name.startswith("hfield") for name in scene(Terrain()))
    with pytest.raises(ValueError, match=r"\(12, 15\) and \(13, 15\) points, expected one shape"):
        scene([Terrain(field=field), Terrain(field=rough(rows=13))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heights": ((0.0, 1.0),)}, "heights has 1 rows"),
        ({"heights": ((0.0, 1.0), (0.0,))}, r"rows of \[1, 2\] values"),
        ({"heights": ((0.0, 1.0), (0.0, math.nan))}, "not finite"),
        ({"origin": (math.inf, 0.0)}, "origin is"),
        ({"spacing": (0.1, 0.0)}, "spacing is"),
        ({"friction": -1.0}, "friction must be a positive"),
    ],
)
def test_a_malformed_height_field_is_refused_by_the_name_of_its_field(change, message):
    good = {"heights": ((0.0, 0.1), (0.0, 0.2)), "origin": (0.0, 0.0), "spacing": (0.1, 0.1)}
    with pytest.raises(ValueError, match=message):
        HeightField(**(good | change))


def rolled(model, robot, steps=40):
    """Contacts and state after falling onto the ground."""
    data = mujoco.MjData(model)
    data.qpos[:] = robot.home_qpos
    mujoco.mj_step(model, data, nstep=steps)
    return data.contact.dist.copy(), data.contact.pos.copy(), data.qpos.copy()


def test_a_height_field_moved_into_a_model_equals_one_compiled_there():
    robot, field = load_robot("go2"), rough()
    models = build_models(robot, [Terrain(), Terrain(field=rough(seed=1)), Terrain(field=field, floor_offset=-1.0)])
    moved = models[Terrain(field=field, floor_offset=-1.0)]
    heights = np.array(field.heights)
    spec = mujoco.MjSpec.from_string(robot.mjcf)
    spec.option.timestep = robot.spec.timestep
    spec.worldbody.add_geom(
        name="floor", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], pos=[0, 0, -1], contype=1, conaffinity=1
    )
    half = [0.5 * 0.2 * 14, 0.5 * 0.15 * 11]
    spec.add_hfield(
        name="field", size=[*half, np.ptp(heights), 1.0], nrow=12, ncol=15, userdata=heights.ravel().astype(np.float32)
    )
    middle = [-1.0 + half[0], -0.8 + half[1], heights.min()]
    geom = spec.worldbody.add_geom(
        name="field", type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname="field", pos=middle, contype=1, conaffinity=1
    )
    geom.friction[0] = 0.7
    found = [rolled(model, robot) for model in (moved, spec.compile())]
    assert len(found[0][0]) > 2
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    # A terrain without one, in the same models, is flat.
    flat = rolled(models[Terrain()], robot)
    for one, other in zip(flat, rolled(build_model(robot, Terrain()), robot), strict=True):
        np.testing.assert_array_equal(one, other)


def test_worlds_with_different_height_fields_stand_on_their_own():
    robot = load_robot("go2")
    low = rough(seed=0)
    high = HeightField(
        heights=tuple(tuple(z + 0.5 for z in row) for row in low.heights), origin=low.origin, spacing=low.spacing
    )
    terrains = [Terrain(field=low, floor_offset=-1.0), Terrain(field=high, floor_offset=-1.0)]
    state = torch.tensor(robot.home_state).repeat(2, 1)
    state[1, 2] += 0.5
    control = torch.tensor(robot.home_ctrl).expand(2, 10, -1)
    with MujocoWorlds(robot, terrains, 2, threads=1) as worlds:
        path = worlds.rollout(state, control)
    assert bool(torch.isfinite(path).all())
    path[1, :, 2] -= 0.5
    torch.testing.assert_close(path[0], path[1], rtol=0, atol=1e-4)


def test_a_model_without_room_for_the_height_field_refuses_it():
    robot = load_robot("go2")
    model = build_model(robot, Terrain())
    with pytest.raises(ValueError, match="expected none: the model has none"):
        set_terrain(model, Terrain(field=rough()))
    model = build_model(robot, Terrain(field=rough()))
    with pytest.raises(ValueError, match=r"of \(13, 15\) points, expected \(12, 15\), the model's"):
        set_terrain(model, Terrain(field=rough(rows=13)))
    assert (
        robot_spec(model, name="go2", substeps=robot.spec.substeps, control="position").bodies == robot.spec.bodies
    ), "the ground is no link"


def test_a_tilted_floor_moved_into_a_model_loses_no_contact_to_the_middle_phase():
    robot = load_robot("go2")
    tilt = Terrain(floor_normal=(0.28, 0.0, 0.96), floor_offset=0.1)
    model = build_model(robot, tilt)
    data = mujoco.MjData(model)
    counts = []
    for flags in (0, int(mujoco.mjtDisableBit.mjDSBL_MIDPHASE)):
        model.opt.disableflags = flags
        listed = 0
        for x in np.linspace(0.0, 1.5, 30):
            data.qpos[:] = robot.home_qpos
            data.qpos[0] = x
            data.qpos[2] += 0.1 - 0.28 * x
            mujoco.mj_forward(model, data)
            listed += data.ncon
        counts.append(listed)
    assert counts[0] == counts[1] > 30


def test_warp_worlds_with_different_height_fields_are_refused():
    from nerd_coupling.warp_worlds import MjWarpWorlds

    terrains = [Terrain(), Terrain(field=rough())]
    with pytest.raises(ValueError, match="different height fields, expected one"):
        MjWarpWorlds(load_robot("go2"), terrains, 2, device="cpu")
