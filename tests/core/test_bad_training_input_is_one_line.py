import dataclasses
import json

import pytest
import torch

from nerd_core.cartpole import CartPole
from nerd_core.cli import main
from nerd_core.dataset import TrajectoryDataset, TrajectoryWriter
from nerd_core.model import FlashNerdConfig
from nerd_core.storage import TEMPORARY_SUFFIX, read_tensors, sha256_of, write_tensors
from nerd_core.train import TrainConfig, train

SIZES = ("--width", "8", "--heads", "2", "--spans", "2", "2", "--hidden", "8", "--readout-hidden", "8")
FLAGS = (*SIZES, "--steps", "4", "--window", "4", "--batch-size", "4", "--threads", "1")
FLAGS = (*FLAGS, "--eval-every", "3", "--checkpoint-every", "2", "--eval-horizons", "1", "5")


def record(path, cartpole=None, rows=20, force=1.0, rename=None):
    """CartPole trajectories, with forces scaled and joints renamed."""
    cartpole = cartpole or CartPole()
    robot = cartpole.robot()
    if rename:
        robot = dataclasses.replace(robot, joints=tuple(dataclasses.replace(j, **rename) for j in robot.joints))
    states, controls = cartpole.record(rows, 8, torch.Generator().manual_seed(0))
    if not force:
        states, controls = states[:, :1].repeat(1, 9, 1), 0 * controls
        for t in range(8):
            states[:, t + 1] = cartpole.step(states[:, t], controls[:, t])
    with TrajectoryWriter(path, robot, engine={}, seed=0) as writer:
        writer.append(states, controls)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return record(tmp_path_factory.mktemp("data") / "cartpole")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    main(["train", str(data), "--out", str(out), *FLAGS])
    return out


def contents(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def refusal(capsys, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert (leaving.value.code, said.out, said.err.count("\n")) == (2, "", 1), said.err
    assert said.err.startswith("nerd-core: error: ")
    return said.err


def test_numbers_that_are_not_finite_are_refused_though_another_program_wrote_them(tmp_path, capsys):
    record(tmp_path / "d")
    shard, manifest = tmp_path / "d" / "shard-00000.safetensors", tmp_path / "d" / "manifest.json"
    for name in ("control", "state"):
        tensors = read_tensors(shard, what="shard")
        tensors[name][3, 2] = torch.inf if name == "state" else torch.nan
        write_tensors(shard, tensors)
        document = json.loads(manifest.read_text())
        document["shards"][0]["sha256"] = sha256_of(shard)
        manifest.write_text(json.dumps(document))
        said = refusal(capsys, "train", tmp_path / "d", "--out", tmp_path / "r", *FLAGS)
        assert f"{tmp_path / 'd'} holds non-finite numbers in {name}" in said
    assert not (tmp_path / "r").exists()


def test_too_few_trajectories_for_the_split_are_refused(tmp_path, capsys):
    record(tmp_path / "d", rows=1)
    said = refusal(capsys, "train", tmp_path / "d", "--out", tmp_path / "r", *FLAGS)
    assert "val_fraction: 0.05 of 1 trajectories leaves none to train on" in said
    assert not (tmp_path / "r").exists()


def test_data_whose_channels_have_other_names_are_refused(data, tmp_path, capsys):
    record(tmp_path / "d", rename={"name": "tail"})
    said = refusal(capsys, "train", data, tmp_path / "d", "--out", tmp_path / "r", *FLAGS)
    assert "another robot" in said
    assert "'tail'" in said
    assert not (tmp_path / "r").exists()


def test_a_run_or_a_model_of_one_robot_is_not_continued_on_anothers_data(run, tmp_path, capsys):
    record(tmp_path / "d", CartPole(substeps=4, timestep=1 / 240))
    before = contents(run)
    said = refusal(capsys, "train", tmp_path / "d", "--out", run, *FLAGS, "--resume")
    assert "cannot resume, the run is of another robot: " in said
    assert "substeps: 5 here, 4 there" in said
    assert contents(run) == before
    said = refusal(capsys, "train", tmp_path / "d", "--out", tmp_path / "r", *FLAGS, "--init-from", run / "best")
    assert "made for another robot" in said
    assert "substeps: 5 here, 4 there" in said
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spans", "0"), "spans is (0,), expected at least one block, each span at least 1"),
        (("--spans", "3", "0"), "spans is (3, 0)"),
        (("--spans", "9"), "window: got 4, expected at least the model's receptive field of 9 frames"),
        (("--window", "9"), "window: got 9 steps, but trajectories have 8"),
    ],
)
def test_networks_and_windows_that_cannot_be_are_refused(data, tmp_path, capsys, flags, words):
    assert words in refusal(capsys, "train", data, "--out", tmp_path / "r", *FLAGS, *flags)
    assert not (tmp_path / "r").exists()


def test_a_resumed_run_with_another_size_and_rate_lists_both(data, run, capsys):
    before = contents(run)
    said = refusal(capsys, "train", data, "--out", run, *FLAGS, "--resume", "--hidden", "16", "--lr", "0.5")
    assert "model.hidden: 8, not 16; train.lr: 0.001, not 0.5" in said
    assert contents(run) == before


def test_a_checkpoint_of_a_newer_format_is_refused_and_kept(data, run, capsys):
    checkpoint = run / "last" / "checkpoint.safetensors"
    original = checkpoint.read_bytes()
    write_tensors(checkpoint, read_tensors(checkpoint, what="c") | {"format_version": torch.tensor(3)})
    before = contents(run)
    said = refusal(capsys, "train", data, "--out", run, *FLAGS, "--resume")
    assert f"{checkpoint}: checkpoint format_version 3, this nerd-core reads up to 2" in said
    assert contents(run) == before
    checkpoint.write_bytes(original)


def test_a_checkpoint_that_lacks_weights_is_refused_and_kept(data, run, capsys):
    checkpoint = run / "last" / "checkpoint.safetensors"
    original = checkpoint.read_bytes()
    tensors = read_tensors(checkpoint, what="c")
    write_tensors(checkpoint, {name: tensor for name, tensor in tensors.items() if "embed" not in name})
    assert "does not fit the run's settings" in refusal(capsys, "train", data, "--out", run, *FLAGS, "--resume")
    checkpoint.write_bytes(original)


def test_a_checkpoint_from_before_formats_were_numbered_still_resumes(data, run, tmp_path):
    config = json.loads((run / "config.json").read_text())
    tensors = read_tensors(run / "last" / "checkpoint.safetensors", what="c")
    assert int(tensors["format_version"]) == 2
    old = tmp_path / "old"
    (old / "last").mkdir(parents=True)
    later = ("format_version", "losses", "skipped")
    first = {name: tensor for name, tensor in tensors.items() if name not in later}
    write_tensors(old / "last" / "checkpoint.safetensors", first)
    (old / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in ("architecture", "processes")})
    )
    (old / "best").symlink_to(run / "best")
    main(["train", str(data), "--out", str(old), *FLAGS, "--resume"])


def test_a_run_that_died_before_it_had_settings_does_not_block_its_folder(data, tmp_path):
    out = tmp_path / "r"
    out.mkdir()
    (out / f"config.json{TEMPORARY_SUFFIX}").write_text("{")
    main(["train", str(data), "--out", str(out), *FLAGS])
    assert (out / "best" / "manifest.json").exists()


def test_channels_without_variance_are_named_in_one_line_and_others_are_not(tmp_path, capsys):
    sizes = FlashNerdConfig(width=8, heads=2, spans=(2,), hidden=8, readout_hidden=8)
    config = TrainConfig(steps=1, window=4, batch_size=4, eval_horizons=(1,), threads=1)
    for name, force, warned in (("still", 0.0, True), ("pushed", 1.0, False)):
        dataset = TrajectoryDataset.open(record(tmp_path / name, force=force))
        capsys.readouterr()
        train(dataset, sizes, config, out=tmp_path / f"run-{name}", progress=False)
        expected = "warning: channels without variance in the training data, left out: token rail_ctrl\n"
        assert capsys.readouterr().err == (expected if warned else "")


def test_targets_that_never_change_are_named_as_well(tmp_path, capsys):
    states = torch.zeros(20, 9, 4)
    states[:, :, 2] = torch.rand(20, 9, generator=torch.Generator().manual_seed(0))
    states[:, :, 0] = 7.0
    with TrajectoryWriter(tmp_path / "d", CartPole().robot(), engine={}, seed=0) as writer:
        writer.append(states, torch.rand(20, 8, 1, generator=torch.Generator().manual_seed(1)))
    main(["train", str(tmp_path / "d"), "--out", str(tmp_path / "r"), *FLAGS, "--no-kinematic"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    token, target = (
        "token rail, sin(hinge), cos(hinge), hinge_vel",
        "target rail_change, hinge_change, hinge_vel_change",
    )
    assert lines == [f"warning: channels without variance in the training data, left out: {token}; {target}"]
