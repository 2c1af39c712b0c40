import json
import os

import pytest
import torch

from nerd_core.cartpole import CartPole, collect_cartpole
from nerd_core.dataset import TrajectoryDataset, TrajectoryWriter, split

ROBOT = CartPole().robot()


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def random_trajectories(rows, steps=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    state = torch.rand(rows, steps + 1, ROBOT.state_size, generator=draw)
    return state, torch.rand(rows, steps, ROBOT.nu, generator=draw)


def write_dataset(path, rows=(3, 2), scene=False):
    with TrajectoryWriter(path, ROBOT, engine={"name": "test"}, seed=0) as writer:
        for seed, count in enumerate(rows):
            state, control = random_trajectories(count, seed=seed)
            boxes = {"height": torch.arange(count).float(), "kind": torch.arange(count)}
            writer.append(state, control, boxes if scene else None)
    return TrajectoryDataset.open(path)


def test_what_was_written_is_read_back_in_order(tmp_path):
    dataset = write_dataset(tmp_path / "d", rows=(3, 0, 2), scene=True)
    loaded = dataset.load()
    expected = [random_trajectories(3, seed=0), random_trajectories(2, seed=2)]
    assert torch.equal(loaded.states, torch.cat([state for state, _ in expected]))
    assert torch.equal(loaded.controls, torch.cat([control for _, control in expected]))
    assert torch.equal(loaded.scenes["kind"], torch.tensor([0, 1, 2, 0, 1]))
    assert (dataset.num_trajectories, dataset.horizon, dataset.num_transitions) == (5, 5, 25)
    assert dataset.robot == ROBOT


def test_the_digest_names_the_numbers_and_not_the_folder(tmp_path):
    first, same = write_dataset(tmp_path / "a"), write_dataset(tmp_path / "b")
    other = write_dataset(tmp_path / "c", rows=(3, 3))
    assert first.digest == same.digest
    assert first.digest != other.digest


def test_a_recording_killed_at_any_file_operation_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("nerd_core.cartpole.SHARD_TRAJECTORIES", 2)
    settings = {"trajectories": 5, "horizon": 3, "progress": False}
    whole = collect_cartpole(tmp_path / "whole", **settings)
    replace, calls = os.replace, 0

    def dying_replace(source, target):
        nonlocal calls
        calls += 1
        if calls == fatal:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying_replace)
    for fatal in range(1, 20):
        path, calls = tmp_path / f"killed-{fatal}", 0
        try:
            collect_cartpole(path, **settings)
        except Killed:
            calls = 100
            resumed = collect_cartpole(path, resume=True, **settings)
            assert resumed.digest == whole.digest
            assert resumed.manifest == whole.manifest
            assert not list(path.glob("*.tmp"))
        else:
            break
    assert fatal == 9  # three shards: a first manifest, two renames each, a last manifest


def test_an_incomplete_dataset_is_not_opened_and_not_overwritten(tmp_path):
    writer = TrajectoryWriter(tmp_path / "d", ROBOT, engine={}, seed=0)
    writer.append(*random_trajectories(2))
    with pytest.raises(ValueError, match="incomplete"):
        TrajectoryDataset.open(tmp_path / "d")
    with pytest.raises(ValueError, match="resume"):
        TrajectoryWriter(tmp_path / "d", ROBOT, engine={}, seed=0)


def test_an_error_inside_the_with_block_leaves_the_dataset_incomplete(tmp_path):
    def record_and_fail():
        with TrajectoryWriter(tmp_path / "d", ROBOT, engine={}, seed=0) as writer:
            writer.append(*random_trajectories(2))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        record_and_fail()
    with pytest.raises(ValueError, match="incomplete"):
        TrajectoryDataset.open(tmp_path / "d")


def test_a_complete_dataset_is_never_written_again(tmp_path):
    write_dataset(tmp_path / "d")
    with pytest.raises(ValueError, match="never overwritten"):
        TrajectoryWriter(tmp_path / "d", ROBOT, engine={"name": "test"}, seed=0, resume=True)


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not a dataset"):
        TrajectoryWriter(tmp_path, ROBOT, engine={}, seed=0, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_resuming_with_other_settings_lists_every_difference(tmp_path):
    TrajectoryWriter(tmp_path / "d", ROBOT, engine={"name": "a", "dt": 0.1}, seed=0)
    other = CartPole(substeps=4).robot()
    with pytest.raises(ValueError, match="cannot resume") as refusal:
        TrajectoryWriter(tmp_path / "d", other, engine={"name": "b"}, seed=1, resume=True)
    for words in ("engine.name: 'a', not 'b'", "engine.dt", "seed: 0, not 1", "robot.substeps"):
        assert words in str(refusal.value)


def test_rejections_are_counted_once_although_the_shard_is_recorded_twice(tmp_path):
    writer = TrajectoryWriter(tmp_path / "d", ROBOT, engine={}, seed=0)
    writer.reject("nan", 1)
    writer.append(*random_trajectories(2))
    writer.reject("overflow", 3)  # killed here, before the shard it belongs to
    writer = TrajectoryWriter(tmp_path / "d", ROBOT, engine={}, seed=0, resume=True)
    assert writer.num_shards == 1
    writer.reject("overflow", 3)
    writer.append(*random_trajectories(2, seed=1))
    writer.close()
    assert TrajectoryDataset.open(tmp_path / "d").manifest["rejected"] == {"nan": 1, "overflow": 3}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-4]), "truncated or edited"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"), "SHA-256"),
        (lambda file: file.unlink(), "missing shard"),
    ],
)
def test_a_damaged_shard_is_named_in_one_line(tmp_path, damage, words):
    write_dataset(tmp_path / "d")
    damage(tmp_path / "d" / "shard-00001.safetensors")
    with pytest.raises(ValueError, match=words) as refusal:
        TrajectoryDataset.open(tmp_path / "d")
    assert "shard-00001" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_edited_manifest_is_refused(tmp_path):
    write_dataset(tmp_path / "d")
    path = tmp_path / "d" / "manifest.json"
    original = path.read_text()
    for edit, words in (
        (lambda m: m.update(format_version=2), "format_version 2"),
        (lambda m: m["robot"].update(timestep=0.1), "edited"),
        (lambda m: m.pop("shapes"), "lacks shapes"),
        (lambda m: m.update(format="other"), "not a dataset"),
    ):
        manifest = json.loads(original)
        edit(manifest)
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=words):
            TrajectoryDataset.open(tmp_path / "d")
    path.write_text(original[:50])
    with pytest.raises(ValueError, match="not valid JSON"):
        TrajectoryDataset.open(tmp_path / "d")
    with pytest.raises(ValueError, match="no such dataset manifest"):
        TrajectoryDataset.open(tmp_path / "nowhere")


def test_another_robot_is_refused_with_the_differences_although_dimensions_agree(tmp_path):
    write_dataset(tmp_path / "d")
    with pytest.raises(ValueError, match="substeps"):
        TrajectoryDataset.open(tmp_path / "d", robot=CartPole(substeps=4).robot())


def test_bad_trajectories_are_refused_before_anything_is_written(tmp_path):
    writer = TrajectoryWriter(tmp_path / "d", ROBOT, engine={}, seed=0)
    state, control = random_trajectories(3)
    poisoned, huge = state.clone(), state.double()
    poisoned[1, 2, 0] = torch.nan
    huge[0, 0, 0] = 1e300  # finite in float64, infinite as stored
    for bad, words in (
        ((poisoned, control), "state: holds non-finite"),
        ((huge, control), "state: holds non-finite"),
        ((state, control[:, :-1]), "control: got shape"),
        ((state[..., :-1], control), "state: got shape"),
        ((state, control, {"box": torch.zeros(2)}), "scene.box: got shape"),
    ):
        with pytest.raises(ValueError, match=words):
            writer.append(*bad)
    writer.append(state, control)
    with pytest.raises(ValueError, match="differs from the shards before"):
        writer.append(*random_trajectories(3, steps=6))
    assert [file.name for file in sorted((tmp_path / "d").iterdir())] == [
        "manifest.json",
        "shard-00000.safetensors",
    ]


def test_an_empty_dataset_cannot_be_completed(tmp_path):
    writer = TrajectoryWriter(tmp_path / "d", ROBOT, engine={}, seed=0)
    with pytest.raises(ValueError, match="at least one trajectory"):
        writer.close()


def test_the_split_is_by_trajectory_disjoint_complete_and_repeatable():
    training, held_out = split(20, 0.25, seed=3)
    assert len(held_out) == 5
    assert torch.equal(torch.cat([training, held_out]).sort().values, torch.arange(20))
    assert torch.equal(split(20, 0.25, seed=3)[1], held_out)
    assert not torch.equal(split(20, 0.25, seed=4)[1], held_out)
    assert len(split(20, 1e-9, seed=0)[1]) == 1
    with pytest.raises(ValueError, match="none to train on"):
        split(1, 0.5, seed=0)
