"""The commands do what they say; bad input is one line, exit code 2, and nothing is written."""

import json

import pytest
import torch

from nerd_core.artifact import save_model
from nerd_core.storage import read_json, write_json
from nerd_rl.cli import main

SMALL = ["--worlds", "4", "--threads", "1", "--ppo.steps", "4", "--ppo.epochs", "1", "--ppo.mini-batches", "2"]
SMALL += ["--ppo.hidden", "8", "--device", "cpu", "--eager"]


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    (line,) = caught.err.splitlines()
    assert line.startswith("nerd-rl: error: ")
    return line


def told(arguments, capsys):
    main([str(argument) for argument in arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def model(small_cartpole_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "cartpole"
    return save_model(path, small_cartpole_model)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run inside a learned model."""
    out = tmp_path_factory.mktemp("runs") / "run"
    learned = ["--physics", "nerd", "--model", str(model)]
    main(["train", "cartpole-swing-up", "--out", str(out), *learned, *SMALL, "--iterations", "2", "--save-every", "1"])
    return out


def test_a_run_folder_holds_what_the_docs_say(run):
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoint.safetensors", "policies", "policy.onnx"} < names
    assert len([name for name in names if name.startswith("events.out.tfevents")]) == 1
    assert sorted(path.name for path in (run / "policies").iterdir()) == ["000001.safetensors", "000002.safetensors"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert [row["world_steps"] for row in rows] == [16, 32]


@pytest.mark.parametrize("physics", ["teacher", "mujoco"])
def test_play_evaluates_the_policy_in_any_physics(physics, run, capsys):
    found = told(["play", run, "--physics", physics, "--worlds", 2, "--threads", 1], capsys)
    assert (found["command"], found["physics"], found["episodes"]) == ("play", physics, 2)
    assert found["return_mean"] < 0  # two iterations do not swing a pole up


def test_play_draws_the_first_episode(run, capsys, tmp_path):
    told(["play", run, "--physics", "teacher", "--worlds", 1, "--film", tmp_path / "film.png"], capsys)
    assert (tmp_path / "film.png").read_bytes().startswith(b"\x89PNG")


def test_play_takes_an_earlier_policy(run, capsys):
    ask = ["play", run, "--physics", "teacher", "--worlds", 2, "--threads", 1]
    first, last = (told([*ask, "--iteration", i], capsys)["return_mean"] for i in (1, 2))
    assert first != last
    assert last == told(ask, capsys)["return_mean"]
    assert "kept: 1, 2" in refused([*ask, "--iteration", 7], capsys)


def test_a_resume_with_other_settings_lists_them_and_changes_nothing(run, model, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ask = ["train", "cartpole-swing-up", "--out", run, "--iterations", 3, "--resume"]
    learned = ["--physics", "nerd", "--model", model]
    line = refused([*ask, *learned, *SMALL, "--seed", 1, "--ppo.learning-rate", "0.01"], capsys)
    assert "cannot resume" in line
    assert "seed: 0, not 1" in line
    assert "task.ppo.learning_rate: 0.0003, not 0.01" in line
    assert "physics.name: 'nerd', not 'teacher'" in refused([*ask, "--physics", "teacher", *SMALL], capsys)
    assert "iterations is 2, expected more than the 2" in refused([*ask, *learned, *SMALL, "--iterations", 2], capsys)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_an_existing_folder_is_refused(run, model, capsys, tmp_path):
    ask = ["train", "cartpole-swing-up", "--physics", "teacher", *SMALL]
    assert "exists; choose a new folder" in refused([*ask, "--out", run], capsys)
    (tmp_path / "mine").write_text("mine")
    assert "exists; choose a new folder" in refused([*ask, "--out", tmp_path], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cartpole-swingup", "--physics", "teacher"], "did you mean cartpole-swing-up"),
        (["cartpole-swing-up", "--physics", "bullet"], "physics is 'bullet', expected one of teacher, mujoco"),
        (["cartpole-swing-up", "--physics", "onnx"], "physics is onnx, which is not here yet"),
        (["cartpole-swing-up", "--physics", "nerd"], "model is missing"),
        (["cartpole-swing-up", "--physics", "mujoco", "--model", "somewhere"], "model is somewhere, expected only"),
        (["cartpole-swing-up", "--physics", "nerd", "--model", "nowhere"], "nowhere"),
        (["cartpole-swing-up", "--physics", "teacher", "--worlds", "0"], "--worlds is 0, expected at least 1"),
        (["cartpole-swing-up", "--physics", "teacher", "--iterations", "0"], "--iterations is 0"),
        (["cartpole-swing-up", "--physics", "teacher", "--seed", "-1"], "seed is -1"),
        (["cartpole-swing-up", "--physics", "teacher", "--ppo.discount", "1.5"], "discount is 1.5"),
        (["cartpole-swing-up", "--physics", "teacher", "--check-physics", "nerd"], "--check-physics is 'nerd'"),
        (["go2-velocity", "--physics", "teacher"], "physics is teacher, which is a cartpole, not go2"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert words in refused(["train", *arguments, "--out", "out"], capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_another_robot_gains_or_architecture_is_refused(model, small_cartpole_model, tmp_path, capsys):
    ask = ["train", "go2-velocity", "--physics", "nerd", "--out", tmp_path / "out", *SMALL]
    line = refused([*ask, "--model", model], capsys)
    assert "made for another robot" in line
    assert "name: cartpole here, go2 there" in line
    ask[1] = "cartpole-swing-up"
    ask[3] = "nerd-baseline"
    assert "is a flash-nerd, expected with physics nerd" in refused([*ask, "--model", model], capsys)
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_task_is_not_played(run, capsys):
    stored = read_json(run / "config.json", what="config")
    edited = json.loads(json.dumps(stored))
    edited["task"]["action_scale"] = [10.0]
    write_json(run / "config.json", edited)
    try:
        line = refused(["play", run, "--physics", "teacher"], capsys)
    finally:
        write_json(run / "config.json", stored)
    assert "trained for another task or robot: action_scale: [10.0], not [1500.0]" in line


def test_what_is_no_run_is_not_played(tmp_path, capsys):
    assert "no such training run's config" in refused(["play", tmp_path, "--physics", "teacher"], capsys)


def test_torch_is_left_with_its_threads(run, capsys):
    before = torch.get_num_threads()
    told(["play", run, "--physics", "teacher", "--worlds", 1, "--threads", 1], capsys)
    assert torch.get_num_threads() == before
