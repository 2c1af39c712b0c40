"""Pictures show what the states say, and a video or a strip shows the pictures."""

import io

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from PIL import Image

from nerd_coupling.camera import RayCamera
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain
from nerd_coupling.worlds import MujocoWorlds
from nerd_mpc.video import film_strip, render_episode, write_video

WIDTH, HEIGHT = 96, 54
DECK = Terrain.platform(0.181)


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


@pytest.fixture(scope="module")
def camera(go2):
    return RayCamera(go2, DECK, width=WIDTH, height=HEIGHT)


@pytest.fixture(scope="module")
def states(go2):
    """Sixteen executed states: the robot drops, stands and settles."""
    hold = torch.tensor(go2.home_ctrl)[None]
    with MujocoWorlds(go2, DECK, 1, threads=1) as worlds:
        rows = [worlds.state[0], *(worlds.step(hold)[0] for _ in range(15))]
    return torch.stack(rows)


def _standing(robot, *places):
    rows = torch.tensor(robot.home_state).repeat(len(places), 1)
    rows[:, 0] = torch.tensor(places)
    return rows


def _deck_pixels(picture):
    # The deck is the only thing in the scene with much more blue than red.
    red, _, blue = picture.int().unbind(-1)
    return blue - red > 50


def test_a_picture_is_taken_of_every_second_state_from_the_first_on(go2, camera, states):
    told = []
    frames = render_episode(go2, DECK, states, width=WIDTH, height=HEIGHT, progress=lambda *now: told.append(now))
    assert frames.shape == (8, HEIGHT, WIDTH, 3)
    assert frames.dtype == torch.uint8
    assert told == [(4, 8), (8, 8)]
    assert torch.equal(frames[3], camera.render(states[6:7])[0])


def test_pictures_do_not_depend_on_how_they_are_batched(camera, states):
    together = camera.render(states[:5])
    assert torch.equal(together, torch.cat([camera.render(s[None]) for s in states[:5]]))
    assert camera.render(states[:0]).shape == (0, HEIGHT, WIDTH, 3)


def test_the_robot_appears_where_it_stands_and_walks_towards_the_deck(go2, camera):
    pictures = camera.render(_standing(go2, -50.0, 0.0, 0.4)).int()
    changed = (pictures[1:] - pictures[0]).abs().sum(-1) > 30
    columns = torch.arange(WIDTH).float()
    middle = [float((c.sum(0) * columns).sum() / c.sum()) for c in changed]
    deck = float((_deck_pixels(pictures[0]).sum(0) * columns).sum())
    deck /= float(_deck_pixels(pictures[0]).sum())
    # The camera looks from the robot's right: forward is rightward in the picture, as x is in the plots.
    assert middle[0] < middle[1] < deck
    assert all(50 < int(c.sum()) < 0.25 * WIDTH * HEIGHT for c in changed)


@pytest.mark.parametrize("height", [0.06, 0.26])
def test_the_whole_deck_is_in_the_picture_and_a_higher_one_covers_more_of_it(go2, camera, height):
    other = RayCamera(go2, Terrain.platform(height), width=WIDTH, height=HEIGHT)
    far = _standing(go2, -50.0)
    deck, reference = _deck_pixels(other.render(far)[0]), _deck_pixels(camera.render(far)[0])
    border = torch.cat((deck[0], deck[-1], deck[:, 0], deck[:, -1]))
    assert not border.any()
    assert (int(deck.sum()) > int(reference.sum())) == (height > 0.181)


def test_a_state_that_is_not_finite_gives_a_black_picture_and_spoils_no_other(camera, states):
    rows = states[:3].clone()
    rows[1, 4] = torch.nan
    pictures = camera.render(rows)
    assert not pictures[1].any()
    assert torch.equal(pictures[[0, 2]], camera.render(states[:3])[[0, 2]])


def test_a_video_reads_back_as_the_frames_that_were_written(tmp_path):
    frames = torch.zeros(10, HEIGHT, WIDTH, 3, dtype=torch.uint8)
    for i in range(10):
        frames[i, :, : 9 * (i + 1)] = torch.tensor([200, 120, 40], dtype=torch.uint8)
    path = tmp_path / "new" / "climb.mp4"
    write_video(path, frames, 25.0)
    with imageio.get_reader(path) as reader:
        assert reader.get_meta_data()["fps"] == 25.0
        assert reader.get_meta_data()["codec"] == "h264"
        read = np.stack(list(reader.iter_data()))
    assert read.shape == tuple(frames.shape)
    # Lossy, and colour at half resolution: the average error is small, the edges are not.
    assert np.abs(read.astype(int) - frames.numpy().astype(int)).mean() < 8.0
    assert [p.name for p in path.parent.iterdir()] == ["climb.mp4"]


def test_a_video_never_replaces_a_file(tmp_path):
    path = tmp_path / "climb.mp4"
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match="exists"):
        write_video(path, torch.zeros(2, HEIGHT, WIDTH, 3, dtype=torch.uint8), 25.0)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("name", "shape", "fps", "words"),
    [
        ("a.avi", (2, 54, 96, 3), 25.0, "ends in .mp4"),
        ("a.mp4", (0, 54, 96, 3), 25.0, "N at least 1"),
        ("a.mp4", (2, 54, 96), 25.0, "N, H, W, 3"),
        ("a.mp4", (2, 55, 96, 3), 25.0, "even height"),
        ("a.mp4", (2, 54, 96, 3), float("nan"), "fps is nan"),
    ],
)
def test_a_video_that_cannot_be_written_is_refused(tmp_path, name, shape, fps, words):
    with pytest.raises(ValueError, match=words):
        write_video(tmp_path / name, torch.zeros(shape, dtype=torch.uint8), fps)
    assert list(tmp_path.iterdir()) == []


def _panels(png, count):
    """Colour at the middle of the upper part of each panel."""
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    middles = [round((i + 0.5) * image.shape[1] / count) for i in range(count)]
    return [tuple(int(v) for v in image[image.shape[0] // 3, x]) for x in middles]


def test_a_strip_shows_the_frames_nearest_to_evenly_spaced_times():
    frames = torch.zeros(9, HEIGHT, WIDTH, 3, dtype=torch.uint8)
    frames[..., 0] = 20 * torch.arange(9, dtype=torch.uint8)[:, None, None]
    # Crowded at the start: even times 0, 1, 2, 3 fall on frames 0, 5, 7 and 8.
    times = [0.0, 0.1, 0.2, 0.3, 0.5, 0.9, 1.4, 2.1, 3.0]
    png = film_strip(frames, times, count=4, captions=["$5 & <b>"] * 9)
    assert _panels(png, 4) == [(20 * i, 0, 0) for i in (0, 5, 7, 8)]
    assert _panels(film_strip(frames[:2], times[:2]), 2) == [(0, 0, 0), (20, 0, 0)]


def test_a_strip_refuses_times_that_do_not_match_the_frames():
    frames = torch.zeros(3, HEIGHT, WIDTH, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="times has 2 entries for 3 frames"):
        film_strip(frames, [0.0, 1.0])
    with pytest.raises(ValueError, match="captions has 1 entries"):
        film_strip(frames, [0.0, 1.0, 2.0], captions=["a"])


def test_a_camera_refuses_what_it_cannot_draw(go2, camera, states):
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        RayCamera(go2, DECK, width=0)
    with pytest.raises(ValueError, match="state has shape"):
        camera.render(states[:, :-1])
    with pytest.raises(ValueError, match="every is 0"):
        render_episode(go2, DECK, states, every=0)
