"""A dataset holds no trajectory in which a contact was dropped: reasons are counted and the rest is as it was."""

import json
from dataclasses import replace

import pytest
import torch

from nerd_contact import PrimitiveCollider
from nerd_core import TrajectoryDataset
from nerd_coupling.heightfield import HeightField
from nerd_coupling.recording import Batch, Limits, record
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain, scene
from nerd_coupling.worlds import MujocoWorlds

HORIZON = 5


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


def starts(go2, count=12):
    """Half of them fall onto their feet, half lie on the ground with the legs drawn in."""
    state = torch.tensor(go2.home_state).repeat(count, 1)
    state[:, 2] += 0.1
    state[::2, 2] = 0.09
    state[::2, 7 : go2.spec.nq] = torch.tensor([0.0, 1.4, -2.6]).repeat(4)
    return state


LEVEL = Terrain()


def recorded(out, robot, state, terrain: Terrain | tuple[Terrain, ...] = LEVEL, **options):
    control = torch.tensor(robot.home_ctrl).repeat(len(state), HORIZON, 1)

    def propose(generator):
        yield Batch(terrain, state, control)

    options = {"shards": 1, "seed": 0, "settings": {"proposal": "test"}, "threads": 1, "progress": False, **options}
    return TrajectoryDataset.open(record(out, robot, propose, **options))


def most_rows(go2, states):
    where = {k: v.expand(len(states), *v.shape[1:]) for k, v in scene(Terrain()).items()}
    return PrimitiveCollider(go2.spec, go2.probes)(states, where).count.amax(1)


def test_trajectories_with_more_rows_than_the_model_reads_are_rejected_and_counted(go2, tmp_path):
    state = starts(go2)
    inside = Limits(penetration=0.1)
    everything = recorded(tmp_path / "all", go2, state, limits=inside).load().states
    assert len(everything) == 12
    rows = most_rows(go2, everything)
    limit = int(rows.median())
    dataset = recorded(tmp_path / "few", go2, state, limits=replace(inside, rows=limit))
    fits = rows <= limit
    assert 0 < int(fits.sum()) < 12
    assert dataset.manifest["rejected"] == {"too many contact rows": int((~fits).sum())}
    assert torch.equal(dataset.load().states, everything[fits])
    assert int(most_rows(go2, dataset.load().states).max()) <= limit
    # The limit is part of what the recording is.
    assert json.loads((tmp_path / "few" / "manifest.json").read_text())["extra"]["max_rows"] == limit


# Flat, and so fine that a robot that lies on it touches hundreds of prisms; one that stands touches few.
FINE = Terrain(
    field=HeightField(heights=((0.0,) * 61,) * 61, origin=(-0.6, -0.6), spacing=(0.02, 0.02)), floor_offset=-1.0
)


@pytest.mark.parametrize("shared", [True, False], ids=["one terrain", "a terrain each"])
def test_worlds_whose_contact_buffer_was_full_are_told_from_those_that_diverged(go2, tmp_path, shared):
    robot = replace(go2, mjcf=go2.mjcf.replace("<default>", '<size memory="160K"/><default>', 1))
    terrain = FINE if shared else (FINE,) * 12
    state = starts(go2)
    state[1, 2] = torch.nan  # no room is needed for that
    control = torch.tensor(go2.home_ctrl).repeat(12, 1)
    with MujocoWorlds(robot, terrain, 12, threads=1) as worlds:
        worlds.set_state(state)
        for _ in range(HORIZON):
            worlds.step(control)
        full = worlds.overflow
        assert full.tolist() == [True, False] * 6
        assert torch.isnan(worlds.state).all(-1).tolist() == [True, True] + [True, False] * 5
        worlds.set_state(state)
        assert not bool(worlds.overflow.any())
    dataset = recorded(tmp_path / "d", robot, state, terrain, limits=Limits(penetration=0.1))
    assert dataset.manifest["rejected"] == {"contact buffer full": 6, "non-finite": 1}
    assert torch.equal(dataset.load().states[:, 0], state[3::2])


def test_no_room_at_all_is_refused():
    with pytest.raises(ValueError, match="rows is 0, expected at least 1"):
        Limits(rows=0)
