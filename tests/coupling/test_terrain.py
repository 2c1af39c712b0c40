"""Terrain values and their tensors."""

import math

import pytest
import torch

from nerd_coupling.terrain import Box, Terrain, scene


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
