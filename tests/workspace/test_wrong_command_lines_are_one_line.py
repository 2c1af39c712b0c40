"""What a user mistypes is answered by one line on standard error and exit code 2, by every command of the workspace."""

import importlib
import os
import re
from pathlib import Path

import pytest

PROGRAMS = ("nerd-core", "nerd-coupling", "nerd-mpc", "nerd-rl", "nerd-deploy")


def _say(program, arguments, capsys):
    main = importlib.import_module(f"{program.replace('-', '_')}.cli").main
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    (line,) = caught.err.splitlines()
    assert line.startswith(f"{program}: error: ")
    assert not re.search("[╭│╰─\x1b]", line)
    return line


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_command_that_does_not_exist(program, capsys):
    assert "clamber" in _say(program, ["clamber"], capsys)


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        ("nerd-mpc", ["climb", "--terain", "T4"], ["--terain", "did you mean --terrain"]),
        ("nerd-mpc", ["climb", "--samples", "many"], ["--samples", "many"]),
        ("nerd-mpc", ["climb", "--samples"], ["--samples"]),
        ("nerd-mpc", ["clim"], ["clim", "climb, recipe"]),
        ("nerd-core", ["train"], ["--out"]),
        ("nerd-core", ["collect-cartpole", "--out", "x", "--trajectories", "1.5"], ["--trajectories", "1.5"]),
        ("nerd-coupling", ["record", "go2"], ["--out"]),
        ("nerd-deploy", ["verify", "a", "b", "--steps", "x"], ["--steps", "'x'"]),
    ],
)
def test_a_wrong_argument_is_named(program, arguments, words, capsys):
    line = _say(program, arguments, capsys)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("nerd-core", ["collect-cartpole", "--out", "data", "--seed", "-1"]),
        ("nerd-core", ["collect-cartpole", "--out", "data", "--seed", str(2**63)]),
        ("nerd-coupling", ["record", "go2", "--out", "data", "--seed", "-1"]),
        ("nerd-mpc", ["climb", "--out", "data", "--seed", "-1"]),
    ],
)
def test_a_seed_out_of_range_writes_nothing(program, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "seed is" in _say(program, arguments, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("nerd-core", ["collect-cartpole", "--out"]),
        ("nerd-coupling", ["record", "go2", "--out"]),
        ("nerd-mpc", ["climb", "--out"]),
        ("nerd-mpc", ["recipe", "--out"]),
    ],
)
@pytest.mark.parametrize("place", ["file", "kernel"])
def test_a_place_where_nothing_can_be_written_is_said_at_once(program, arguments, place, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine\n")
    below = file if place == "file" else Path("/proc/sys")  # no folder can be made there, not even by root
    if not below.exists():
        pytest.skip("no /proc on this system")
    line = _say(program, [*arguments, str(below / "run" / "deeper")], capsys)
    assert f"{below} is not a folder that can be written" in line
    assert file.read_text() == "mine\n"
    assert os.listdir(tmp_path) == ["file"]
