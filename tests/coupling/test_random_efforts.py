"""NeRD's recorder: the ranges it draws from, planes that are free at the start, repeatable and resumable bytes."""

import json
import math

import pytest
import torch

from nerd_contact import PrimitiveCollider
from nerd_core import TrajectoryDataset
from nerd_core.cartpole import collect_cartpole
from nerd_core.cli import main as core_main
from nerd_core.windows import TrajectoryPool
from nerd_coupling.cli import main
from nerd_coupling.grounds import nerd_ground, nerd_grounds
from nerd_coupling.random_efforts import RandomEfforts
from nerd_coupling.recording import Batch, record
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain, scene
from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_coupling.worlds import MujocoWorlds

ROBOTS = ("cartpole", "double-pendulum", "franka")


def drawn(name, seed=0, **settings):
    proposal = RandomEfforts(load_robot(name), rows=250, horizon=3, **settings)
    (batch,) = proposal(torch.Generator().manual_seed(seed))
    return batch


def recorded(out, name, *, shards=1, resume=False, propose=None, **settings):
    robot = load_robot(name)
    propose = propose or RandomEfforts(robot, **{"rows": 20, "horizon": 5, **settings})
    return record(
        out, robot, propose, shards=shards, seed=3, settings={}, threads=1, num_boxes=0, resume=resume, progress=False
    )


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


# Published ranges: reference of the data generation, per robot position, velocity, effort.
@pytest.mark.parametrize(
    ("name", "reach", "effort"),
    [
        ("cartpole", [3.5, math.pi, 10, 10], [1500]),
        ("double-pendulum", [math.pi, math.pi, 2 * math.pi, 4 * math.pi], [1500, 1500]),
        ("franka", [math.pi] * 14, [100] * 4 + [20] * 3),
    ],
)
def test_starts_and_efforts_fill_the_published_ranges(name, reach, effort):
    batch = drawn(name)
    for found, bound in ((batch.state, reach), (batch.control.flatten(0, 1), effort)):
        bound = torch.tensor(bound, dtype=torch.float32)
        assert (found.abs() <= bound + 1e-6).all()
        # The largest of 250 uniform draws falls below 0.95 of the bound with probability 3e-6.
        assert (found.abs().amax(0) > 0.95 * bound).all()
    # Redrawn at every model step, independently: neighbours do not correlate.
    one, other = (batch.control[:, t] / torch.tensor(effort, dtype=torch.float32) for t in (0, 1))
    assert (one * other).mean().abs() < 0.1


def test_every_trajectory_has_a_plane_that_is_free_at_the_start_and_within_the_published_offsets():
    robot, batch = load_robot("double-pendulum"), drawn("double-pendulum")
    assert len({plane.floor_normal for plane in batch.terrain}) == 250
    gap = PrimitiveCollider(robot.spec, robot.probes, margin=9.0)(batch.state, scene(batch.terrain, num_boxes=0)).gap
    assert gap.min() > -1e-5
    assert (gap.amin(-1) < 0.4).sum() > 10
    normal = torch.tensor([plane.floor_normal for plane in batch.terrain])
    beyond = normal @ torch.tensor(robot.spec.bodies[0].pos) - torch.tensor([p.floor_offset for p in batch.terrain])
    assert 0.1 - 1e-5 < beyond.min() < 0.5
    assert 3.2 < beyond.max() < 3.5 + 1e-5
    assert (normal.mean(0).abs() < 0.15).all()


def test_passive_trajectories_get_no_effort_and_start_as_nerds_environments_reset():
    cartpole, pendulum = drawn("cartpole", passive=True), drawn("double-pendulum", passive=True, ground="c1")
    assert not cartpole.control.any()
    assert not pendulum.control.any()
    assert (cartpole.state.abs() <= torch.tensor([1, math.pi, 1, 1]) + 1e-6).all()
    assert (pendulum.state[:, 2:].abs() <= 2).all()
    upper = pendulum.state[:, 0] + pendulum.state[:, 1]
    assert torch.sin(upper).min() > -1e-5  # the second link points up
    assert pendulum.terrain == nerd_ground("c1")


@pytest.mark.parametrize("name", ROBOTS)
def test_one_seed_gives_the_same_bytes_and_continuous_angles_are_wrapped(name, tmp_path):
    first = recorded(tmp_path / "a", name)
    assert files(first) == files(recorded(tmp_path / "b", name))
    dataset = TrajectoryDataset.open(first)
    states = dataset.load().states
    assert states.shape == (20, 6, dataset.robot.state_size)
    turning = [i for i, joint in enumerate(dataset.robot.joints) if joint.continuous]
    assert turning
    assert states[..., turning].abs().max() <= math.pi + 1e-6


def test_a_recording_over_planes_that_was_killed_goes_on_with_the_same_bytes(tmp_path):
    robot = load_robot("double-pendulum")
    propose = RandomEfforts(robot, rows=10, horizon=4)
    calls = []

    def dies(generator):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the power went off")
        yield from propose(generator)

    whole = recorded(tmp_path / "whole", robot.name, shards=2, propose=propose)
    with pytest.raises(RuntimeError, match="power"):
        recorded(tmp_path / "killed", robot.name, shards=2, propose=dies)
    recorded(tmp_path / "killed", robot.name, shards=2, propose=propose, resume=True)
    assert files(tmp_path / "killed") == files(whole)


def test_a_row_over_its_own_plane_equals_the_same_row_alone():
    robot, batch = load_robot("double-pendulum"), drawn("double-pendulum")
    control = batch.control[:8].repeat(1, 10, 1)
    with MujocoWorlds(robot, batch.terrain[:8], 8, threads=1) as worlds:
        together = worlds.rollout(batch.state[:8], control)
    for n in range(8):
        with MujocoWorlds(robot, batch.terrain[n], 1, threads=1) as worlds:
            assert torch.equal(worlds.rollout(batch.state[n : n + 1], control[n : n + 1])[0], together[n])


def test_what_is_not_finite_or_beyond_1e5_or_starts_inside_is_counted_and_left_out(tmp_path):
    state = torch.zeros(5, 4)
    state[1, 2] = math.nan
    state[2, 0] = -1.5  # down to 0.5 m, far below the ground
    control = torch.zeros(5, 2, 2)
    control[3, 1, 0] = math.nan

    def pendulums(generator):
        yield Batch(Terrain(floor_friction=0.5, floor_offset=1.5), state, control)

    dataset = TrajectoryDataset.open(recorded(tmp_path / "d", "double-pendulum", propose=pendulums))
    assert dataset.num_trajectories == 2
    assert dataset.manifest["rejected"] == {"non-finite": 2, "starts inside": 1}
    fast = torch.zeros(2, 4)
    fast[1, 2] = 2e5

    def carts(generator):
        yield Batch(None, fast, torch.zeros(2, 1, 1))

    dataset = TrajectoryDataset.open(recorded(tmp_path / "e", "cartpole", propose=carts))
    assert dataset.manifest["rejected"] == {"too large": 1}
    assert torch.equal(dataset.load().states[:, 0], fast[:1])


@pytest.mark.parametrize("name", ROBOTS)
def test_hundred_steps_of_random_effort_stay_finite(name, tmp_path):
    dataset = TrajectoryDataset.open(recorded(tmp_path / "d", name, rows=50, horizon=100))
    assert dataset.manifest["rejected"] == {}
    assert dataset.load().states.isfinite().all()


@pytest.mark.parametrize("name", ROBOTS)
def test_warp_and_c_mujoco_label_the_same_starts_alike(name):
    robot, batch = load_robot(name), drawn(name)
    rows = 6
    if name == "double-pendulum":
        # From just above the plane into it.
        gap = PrimitiveCollider(robot.spec, robot.probes, margin=9.0)(
            batch.state, scene(batch.terrain, num_boxes=0)
        ).gap.amin(-1)
        chosen = gap.argsort()[:rows]
        terrain = [batch.terrain[int(n)] for n in chosen]
    else:
        chosen, terrain = torch.arange(rows), [Terrain()] * rows
    state, control = batch.state[chosen], batch.control[chosen]
    with MujocoWorlds(robot, terrain, rows, threads=1) as worlds:
        exact = worlds.rollout(state, control)
    warp = MjWarpWorlds(robot, terrain, rows).rollout(state, control)
    # float32 against float64 over 3 model steps. Velocities reach 40 rad/s and accelerations 1e3 rad/s²: rounding is
    # 1e-5 relative per step; a wrong plane, friction or gain is off by more than 0.1.
    torch.testing.assert_close(warp, exact, rtol=2e-4, atol=2e-3)
    if name == "double-pendulum":
        with MujocoWorlds(robot, nerd_ground("none"), 1, threads=1) as worlds:
            free = worlds.rollout(state, control)
        assert (exact - free)[:, -1].abs().amax(-1).gt(0.5).sum() >= 3  # the planes matter


def test_cartpole_data_of_both_teachers_can_be_trained_on_together(tmp_path):
    ours = TrajectoryDataset.open(recorded(tmp_path / "a", "cartpole"))
    theirs = collect_cartpole(tmp_path / "b", trajectories=5, horizon=5, progress=False)
    assert ours.robot == theirs.robot
    assert len(TrajectoryPool([ours.load(), theirs.load()], torch.device("cpu")).steps) == 25


def test_a_recorded_pendulum_trains_with_contacts_and_evaluates_finite(tmp_path, capsys):
    threads = torch.get_num_threads()
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    try:
        main(["record", "double-pendulum", "--out", data, "--shards", "1", "--rows", "200", "--horizon", "30"])
        extra = TrajectoryDataset.open(data).manifest["extra"]["context"]
        assert (len(extra["contact-set"]["probes"]), len(extra["fixed-contact"]["probes"])) == (10, 4)
        core_main(
            f"train {data} --out {run} --context contact-set --steps 6 --batch-size 8 --window 8 --eval-every 6 "
            "--eval-trajectories 10 --checkpoint-every 6 --width 16 --heads 2 --hidden 16 --readout-hidden 16 "
            "--spans 3 3".split()
        )
        capsys.readouterr()
        core_main(["eval", f"{run}/best", data])
    finally:
        torch.set_num_threads(threads)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["horizons"]
    assert all(math.isfinite(row["at_step"]) for row in report["horizons"])


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_what_does_not_fit_the_robot_is_one_line_and_exit_code_2(tmp_path, capsys):
    out = tmp_path / "d"
    assert "cartpole touches nothing" in refused(capsys, "record", "cartpole", "--out", out, "--ground", "c1")
    assert "expected one of none, c1" in refused(capsys, "record", "double-pendulum", "--out", out, "--ground", "c9")
    assert "go2 has servos" in refused(capsys, "record", "go2", "--out", out, "--passive")
    assert "--rows is 0" in refused(capsys, "record", "franka", "--out", out, "--rows", 0)
    assert "rows is 3, expected at least 16" in refused(capsys, "record", "go2", "--out", out, "--rows", 3)
    assert not out.exists()
    assert len(nerd_grounds()) == 7
