"""Recording: plain MuJoCo, byte for byte the same after a kill, and nothing kept that diverged."""

import json
import math

import mujoco
import numpy as np
import pytest
import torch

from nerd_core import TrajectoryDataset
from nerd_coupling.cli import main
from nerd_coupling.recording import Batch, RandomTargets, record
from nerd_coupling.robots import build_model, load_robot, robot_names
from nerd_coupling.terrain import Terrain

ROWS, HORIZON = 32, 4


@pytest.fixture(scope="module")
def go2():
    return load_robot("go2")


@pytest.fixture(scope="module")
def targets(go2):
    limits = torch.tensor([joint.range for joint in go2.spec.joints])
    return RandomTargets(go2, limits, rows=ROWS, terrains=2, horizon=HORIZON)


def recorded(out, robot, propose, *, settings=None, **options):
    options = {"shards": 2, "seed": 5, "threads": 1, "progress": False, **options}
    return record(out, robot, propose, settings=settings or {"proposal": "test"}, **options)


class Watched:
    """Passes a proposal's batches on and keeps them; raises instead of giving shard ``stop``."""

    def __init__(self, propose, stop=None):
        self.propose, self.stop, self.batches, self.calls = propose, stop, [], 0

    def __call__(self, generator):
        if self.calls == self.stop:
            raise RuntimeError("the power went off")
        self.calls += 1
        for batch in self.propose(generator):
            self.batches.append(batch)
            yield batch


@pytest.fixture(scope="module")
def watched(targets):
    return Watched(targets)


@pytest.fixture(scope="module")
def whole(go2, watched, tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recording") / "whole", go2, watched)


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_recording_holds_what_was_proposed(whole, watched):
    dataset = TrajectoryDataset.open(whole)
    kept = dataset.load()
    rejected = sum(dataset.manifest["rejected"].values())
    assert len(kept.states) == 2 * ROWS - rejected > ROWS
    assert kept.states.shape[1:] == (HORIZON + 1, 37)
    assert kept.controls.shape[1:] == (HORIZON, 12)
    proposed = torch.cat([batch.state for batch in watched.batches])
    assert (kept.states[:, None, 0] == proposed).all(-1).any(1).all()
    heights = kept.scenes["box_center"][:, 0, 2] + 0.5
    expected = torch.tensor([batch.terrain.boxes[0].top for batch in watched.batches])
    assert (heights[:, None] - expected).abs().amin(1).max() < 1e-6
    assert len(heights.unique()) == 4


def test_a_recorded_transition_is_a_plain_mujoco_step(go2, whole, watched):
    kept = TrajectoryDataset.open(whole).load()
    for batch in watched.batches:
        mj_model = build_model(go2, batch.terrain)
        row = int((kept.states[:, 0] == batch.state[3]).all(-1).nonzero()[0])
        data = mujoco.MjData(mj_model)
        data.qpos[:], data.qvel[:] = np.split(batch.state[3].double().numpy(), [19])
        for t in range(HORIZON):
            data.ctrl[:] = kept.controls[row, t]
            mujoco.mj_step(mj_model, data, nstep=go2.spec.substeps)
            expected = np.concatenate((data.qpos, data.qvel)).astype(np.float32)
            np.testing.assert_array_equal(kept.states[row, t + 1].numpy(), expected)


def test_one_seed_gives_the_same_bytes_and_another_seed_others(go2, targets, whole, tmp_path):
    assert files(recorded(tmp_path / "again", go2, targets)) == files(whole)
    other = recorded(tmp_path / "other", go2, targets, seed=6)
    assert TrajectoryDataset.open(other).digest != TrajectoryDataset.open(whole).digest


def test_shards_of_one_recording_differ(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    assert len({shard["sha256"] for shard in manifest["shards"]}) == 2


def test_a_recording_that_was_killed_goes_on_with_the_same_bytes(go2, targets, whole, tmp_path):
    out = tmp_path / "killed"
    with pytest.raises(RuntimeError, match="power"):
        recorded(out, go2, Watched(targets, stop=1))
    with pytest.raises(ValueError, match="incomplete"):
        TrajectoryDataset.open(out)
    with pytest.raises(ValueError, match="pass resume"):
        recorded(out, go2, targets)
    (out / "shard-00001.safetensors.tmp").write_bytes(b"half a shard")
    rest = Watched(targets)
    recorded(out, go2, rest, resume=True)
    assert rest.calls == 1  # the first shard was not recorded again
    assert files(out) == files(whole)


def test_another_seed_or_other_settings_are_refused_on_resume(go2, targets, tmp_path):
    out = tmp_path / "killed"
    with pytest.raises(RuntimeError):
        recorded(out, go2, Watched(targets, stop=1))
    before = files(out)
    for changes, words in (
        ({"seed": 6}, "seed: 5"),
        ({"shards": 3}, "shards: 2"),
        ({"settings": {"proposal": "other"}}, "proposal: "),
    ):
        with pytest.raises(ValueError, match=f"cannot resume.*{words}"):
            recorded(out, go2, targets, resume=True, **changes)
    assert files(out) == before


def test_a_complete_recording_is_never_touched(go2, targets, whole):
    before = files(whole)
    for resume in (False, True):
        with pytest.raises(ValueError, match="complete dataset"):
            recorded(whole, go2, targets, resume=resume)
    assert files(whole) == before


def test_what_diverges_starts_inside_or_is_too_fast_is_counted_and_left_out(go2, tmp_path):
    good = torch.tensor(go2.home_state)
    good[2] += 0.01
    state = good.repeat(8, 1)
    control = torch.tensor(go2.home_ctrl).repeat(8, HORIZON, 1)
    control[1, 2, 5] = math.nan
    state[2, 30] = math.nan
    state[3, 25:] = 1e9
    state[4, 2] -= 0.1  # inside the ground
    state[5, 0] = 1.3  # inside the deck
    state[6, 19] = 8.5
    state[7, 2], state[7, 23] = 1.0, 41.0

    def propose(generator):
        yield Batch(Terrain.platform(0.2), state, control)

    out = recorded(tmp_path / "d", go2, propose, shards=1)
    dataset = TrajectoryDataset.open(out)
    assert dataset.manifest["rejected"] == {"non-finite": 3, "starts inside": 2, "too fast": 2}
    assert torch.equal(dataset.load().states[:, 0], state[:1])


def test_random_stances_are_outside_of_everything_and_within_the_joint_limits(go2, targets):
    batches = list(targets(torch.Generator().manual_seed(2)))
    assert [len(batch.state) for batch in batches] == [ROWS // 2] * 2
    low, high = torch.tensor([joint.range for joint in go2.spec.joints]).unbind(-1)
    for batch in batches:
        joints = batch.state[:, 7:19]
        assert ((joints >= low) & (joints <= high)).all()
        assert ((batch.control >= low) & (batch.control <= high)).all()


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    assert leaving.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_bad_input_of_the_command_is_one_line_and_exit_code_2(tmp_path, capsys, whole):
    out = tmp_path / "d"
    message = refused(capsys, "record", "go3", "--out", out)
    assert "'go3'" in message
    assert "did you mean go2" in message
    assert "--shards is 0" in refused(capsys, "record", "go2", "--out", out, "--shards", 0)
    assert "--threads is 0" in refused(capsys, "record", "go2", "--out", out, "--threads", 0)
    assert "complete dataset" in refused(capsys, "record", "go2", "--out", whole)
    (tmp_path / "notes.txt").write_text("mine")
    assert "not a dataset" in refused(capsys, "record", "go2", "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_the_robots_command_ends_with_one_json_document(capsys):
    main(["robots"])
    captured = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(captured.out.splitlines()[-1])}
    assert (rows["go2"]["joints"], rows["go2"]["model_step_ms"]) == (12, 20.0)
    assert sorted(rows) == sorted(robot_names())
    assert "go2" in captured.err


def test_the_record_command_writes_a_dataset_that_opens(monkeypatch, tmp_path, capsys):
    def small(robot, control_range):
        return RandomTargets(robot, control_range, rows=8, terrains=2, horizon=2)

    monkeypatch.setattr("nerd_coupling.cli.RandomTargets", small)
    threads = torch.get_num_threads()
    try:
        main(["record", "go2", "--out", str(tmp_path / "d"), "--shards", "1", "--threads", "1"])
    finally:
        torch.set_num_threads(threads)
    dataset = TrajectoryDataset.open(tmp_path / "d")
    assert dataset.robot == load_robot("go2").spec
    assert "1 shards" in capsys.readouterr().err


def test_a_hand_on_a_fixed_base_is_no_robot_for_random_targets(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["record", "leap-cube", "--out", str(tmp_path / "data")])
    assert stop.value.code == 2
    assert "'leap-cube' has a fixed base, expected a floating one" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
