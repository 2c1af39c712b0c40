"""Pictures of robots: what is seen is what stands there."""

import json

import mujoco
import numpy as np
import pytest

from nerd_coupling.cli import main
from nerd_coupling.drawing import contact_sheet, picture
from nerd_coupling.robots import load_robot, robot_names

ORANGE = np.array((0.95, 0.55, 0.1))


def orange(image):
    """Where the picture shows something of the feet's colour, in light or shadow."""
    colour = image / 255.0
    brightness = colour.max(axis=-1)
    hue = colour / np.maximum(brightness, 1e-9)[..., None]
    return (np.abs(hue - ORANGE / ORANGE.max()).max(axis=-1) < 0.05) & (brightness > 0.2)


def test_the_cube_fills_the_picture_and_casts_a_shadow():
    image = picture(load_robot("cube"), width=120, height=100, samples=1)
    assert (image.shape, image.dtype) == ((100, 120, 3), np.uint8)
    seen = orange(image)
    rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
    # The border leaves 6 % on each side of the tighter direction.
    assert min(rows[0], 99 - rows[-1], columns[0], 119 - columns[-1]) >= 4
    assert max((rows[-1] - rows[0]) / 100, (columns[-1] - columns[0]) / 120) > 0.75
    # Grey where there is no cube; the darkest of it is ground in shadow.
    rest = image[~seen].astype(float)
    assert np.ptp(rest, axis=1).max() < 40
    assert rest.max(axis=1).min() < 0.85 * np.median(rest.max(axis=1))


def test_a_robot_stands_on_its_feet_in_the_picture():
    seen = orange(picture(load_robot("go2"), width=120, height=100, samples=1))
    assert 20 < seen.sum() < 600  # four small spheres
    assert np.flatnonzero(seen.any(1)).mean() > 50  # below the middle


def test_a_robots_objects_are_in_its_picture():
    robot = load_robot("leap-cube")
    image = picture(robot, width=120, height=100, samples=1).astype(float)
    assert ((image[..., 2] > 1.5 * image[..., 0]) & (image[..., 2] > 60)).sum() > 500  # the blue cube


def test_every_robot_gets_its_place_on_the_sheet():
    figure = contact_sheet([load_robot(name) for name in ("cube", "go2", "cartpole")], columns=2)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["cube", "go2", "cartpole"]
    mass = mujoco.MjModel.from_xml_string(load_robot("go2").mjcf).body_mass.sum()
    assert shown[1].get_xlabel() == f"12 joints, {mass:.4g} kg"
    assert all(axes.images[0].get_array().std() > 5 for axes in shown)


def test_the_command_lists_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nerd_coupling.drawing.picture", lambda robot: np.zeros((4, 5, 3), np.uint8))
    main(["robots", "--draw", str(tmp_path / "robots.png")])
    out, _ = capsys.readouterr()
    assert [row["name"] for row in json.loads(out.splitlines()[-1])] == list(robot_names())
    assert (tmp_path / "robots.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main(["robots", "--draw", str(tmp_path / "robots.png")])
    assert "is never overwritten" in capsys.readouterr().err


def test_sizes_that_make_no_picture_are_refused():
    with pytest.raises(ValueError, match="width is 0, expected at least 1"):
        picture(load_robot("cube"), width=0)
    with pytest.raises(ValueError, match="robots is empty, expected at least one"):
        contact_sheet([])
    with pytest.raises(ValueError, match="columns is 0, expected at least 1"):
        contact_sheet([load_robot("cube")], columns=0)
