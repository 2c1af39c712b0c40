import json

import pytest

from nerd_core.cli import main


def run(*arguments):
    main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A tiny dataset and a tiny run made by the commands themselves."""
    path = tmp_path_factory.mktemp("cli")
    run("collect-cartpole", "--out", path / "data", "--trajectories", 40, "--horizon", 20)
    sizes = ("--width", 8, "--heads", 2, "--hidden", 8, "--readout-hidden", 8)
    short = ("--steps", 4, "--window", 8, "--eval-every", 2, "--checkpoint-every", 2)
    run("train", path / "data", "--out", path / "run", *sizes, *short)
    return path


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        run(*arguments)
    assert leaving.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_the_last_line_of_eval_is_one_json_document(workspace, capsys):
    run("eval", workspace / "run", workspace / "data", "--horizons", 1, 15, 100)
    captured = capsys.readouterr()
    document = json.loads(captured.out.strip().splitlines()[-1])
    assert [row["horizon"] for row in document["horizons"]] == [1, 15]
    assert document["held_out"] is True
    assert document["num_trajectories"] == 2  # 5 % of 40
    for row in document["horizons"]:
        assert row["low"] <= row["at_step"] <= row["high"]
        assert row["affine"] < row["zero_increment"]
    assert "rollout error" in captured.err


def test_eval_takes_a_model_folder_and_other_data_as_well(workspace, tmp_path, capsys):
    run("collect-cartpole", "--out", tmp_path / "d", "--trajectories", 9, "--seed", 1)
    run("eval", workspace / "run" / "best", tmp_path / "d")
    document = json.loads(capsys.readouterr().out)
    assert document["held_out"] is False
    assert [row["horizon"] for row in document["horizons"]] == [1, 15, 100]


def test_bad_input_is_one_line_and_exit_code_2(workspace, tmp_path, capsys):
    data, model = workspace / "data", workspace / "run"
    for arguments, words in (
        (("train", tmp_path / "nowhere", "--out", tmp_path / "r"), "no such dataset manifest"),
        (("train", data, "--out", model), "exists"),
        (("train", data, "--out", tmp_path / "r", "--lr", -1), "lr: got -1.0"),
        (("train", data, "--out", tmp_path / "r", "--width", 7), "width"),
        (("train", data, "--out", tmp_path / "r", "--context", "sonar"), "'sonar'"),
        (("train", data, "--out", tmp_path / "r", "--device", "toaster"), "device"),
        (("train", data, "--out", model, "--resume", "--seed", 4), "train.seed: 0, not 4"),
        (("eval", data, data), "not a model"),
        (("eval", model, model), "no such dataset manifest"),
        (("eval", model, data, "--horizons", 500), "horizons"),
        (("collect-cartpole", "--out", data), "never overwritten"),
        (("collect-cartpole", "--out", tmp_path / "d", "--trajectories", 0), "trajectories"),
    ):
        message = refused(capsys, *arguments)
        assert words in message
        assert message.count("\n") == 1, message
    assert not list(tmp_path.iterdir())


def test_unknown_options_are_refused_with_exit_code_2(capsys):
    assert "widht" in refused(capsys, "train", "d", "--out", "r", "--widht", "3")
    refused(capsys)


def test_help_opens_with_a_runnable_example(capsys):
    for command in ("collect-cartpole", "train", "eval"):
        with pytest.raises(SystemExit) as leaving:
            run(command, "--help")
        assert leaving.value.code == 0
        assert f"nerd-core {command}" in capsys.readouterr().out


def test_an_interrupt_leaves_with_130_and_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("nerd_core.cli.collect_cartpole", interrupted)
    with pytest.raises(SystemExit) as leaving:
        run("collect-cartpole", "--out", tmp_path / "d")
    assert leaving.value.code == 130
    assert "--resume" in capsys.readouterr().err
