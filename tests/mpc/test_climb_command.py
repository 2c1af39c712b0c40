"""``nerd-mpc climb``: bad input is one line and leaves nothing behind; results are whole or absent."""

import dataclasses
import json
import tempfile

import pytest
import torch

from nerd_contact import ContactEncoderConfig, ContactSetEncoder
from nerd_core import FlashNerd
from nerd_core.artifact import save_model
from nerd_core.storage import read_tensors
from nerd_mpc.cli import main
from nerd_mpc.outputs import OutputFolder
from nerd_mpc.platform import PlatformTask
from nerd_mpc.released import load_climber, released_model


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Commands run in an empty folder and leave torch's thread count as it was."""
    threads = torch.get_num_threads()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "here"
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory, go2, small_nerd):
    """Model folders: one that fits, and all kinds that do not."""
    root = tmp_path_factory.mktemp("models")
    save_model(root / "fits", small_nerd)
    slots = ContactEncoderConfig(num_slots=2, slot_width=4, hidden=8, max_rows=8)
    for name, change in {
        "soft": {"kp": (15.0, *go2.spec.kp[1:])},
        "fast": {"timestep": go2.spec.timestep / 2},
    }.items():
        spec = dataclasses.replace(go2.spec, **change)
        save_model(root / name, FlashNerd(small_nerd.config, spec, ContactSetEncoder(slots, spec, go2.probes)))
    save_model(root / "blind", FlashNerd(small_nerd.config, go2.spec))
    save_model(root / "truncated", small_nerd)
    weights = root / "truncated" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    save_model(root / "no-weights", small_nerd)
    (root / "no-weights" / "weights.safetensors").unlink()
    return root


def climb(*arguments):
    main(["climb", *(str(argument) for argument in arguments)])


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        climb(*arguments)
    assert leaving.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--terrain", "T8"), ["--terrain is 'T8'", "did you mean"]),
        (("--terrain", "t5"), ["did you mean T5"]),
        (("--height", 5), ["--height is 5 m", "0.35"]),
        (("--height", "nan"), ["--height is nan"]),
        (("--height", 0.1, "--terrain", "T2"), ["both given"]),
        (("--dynamics", "mujocco"), ["--dynamics is 'mujocco'", "did you mean mujoco"]),
        (("--dynamics", "Nerd"), ["did you mean nerd"]),
        (("--dynamics", "bullet"), ["expected one of nerd, mujoco, mjwarp"]),
        (("--samples", 1), ["--samples is 1", "at least 2"]),
        (("--samples", 0), ["samples is 0"]),
        (("--horizon", 3), ["horizon"]),
        (("--iterations", 0), ["iterations is 0"]),
        (("--seed", -1), ["seed is -1"]),
        (("--seed", 2**70), ["seed is"]),
        (("--threads", 0), ["--threads is 0"]),
        (("--threads", -2), ["--threads is -2"]),
    ],
)
def test_bad_settings_are_one_line_and_nothing_is_written(capsys, elsewhere, arguments, words):
    message = refused(capsys, "--out", elsewhere / "deep" / "out", *arguments)
    assert all(word in message for word in words), message
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("missing", ["no such model manifest"]),
        ("truncated", ["truncated or edited"]),
        ("no-weights", ["no such weights file"]),
        ("soft", ["made for another robot", "kp[0]: 15.0 here"]),
        ("fast", ["made for another robot", "timestep"]),
        ("blind", ["no context encoder"]),
    ],
)
def test_models_that_do_not_fit_are_one_line_and_nothing_is_written(capsys, elsewhere, models, model, words):
    message = refused(capsys, "--model", models / model)
    assert all(word in message for word in words), message
    assert not list(elsewhere.iterdir())


def test_an_existing_output_is_refused_and_left_as_it_was(capsys, elsewhere):
    (elsewhere / "out").mkdir()
    (elsewhere / "file").write_text("mine")
    (elsewhere / "link").symlink_to(elsewhere / "nowhere")
    for name in ("out", "file", "link"):
        assert "never overwritten" in refused(capsys, "--out", elsewhere / name)
    assert "is not a folder" in refused(capsys, "--out", elsewhere / "file" / "out")
    assert sorted(path.name for path in elsewhere.iterdir()) == ["file", "link", "out"]
    assert not list((elsewhere / "out").iterdir())


def test_values_of_the_wrong_kind_are_exit_code_2(capsys, elsewhere):
    for arguments in (("--samples", "many"), ("--height", "high"), ("--sample", 12)):
        with pytest.raises(SystemExit) as leaving:
            climb(*arguments)
        assert leaving.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def test_help_opens_with_a_command_that_can_be_run(capsys):
    with pytest.raises(SystemExit) as leaving:
        climb("--help")
    assert leaving.value.code == 0
    assert "nerd-mpc climb --terrain T4" in capsys.readouterr().out


def test_an_episode_that_does_not_climb_is_written_and_exit_code_1(monkeypatch, capsys, elsewhere):
    monkeypatch.setattr(PlatformTask, "max_decisions", 3)
    budget = ("--samples", 4, "--horizon", 5, "--iterations", 1, "--threads", 1)
    with pytest.raises(SystemExit) as leaving:
        climb("--dynamics", "mujoco", "--height", 0.1, *budget, "--no-video", "--out", elsewhere / "a" / "out")
    assert leaving.value.code == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["command"], document["outcome"], document["decisions"]) == ("climb", "timeout", 3)
    assert document["terrain"] == "0.1m"
    assert document["machine"]["torch_threads"] == 1
    out = elsewhere / "a" / "out"
    assert {"result.json", "trajectory.safetensors", "report.html"} <= {path.name for path in out.iterdir()}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    stored = json.loads((out / "result.json").read_text())
    assert stored.pop("format_version") == 1
    assert stored == {key: document[key] for key in stored}
    tensors = read_tensors(out / "trajectory.safetensors", what="trajectory")
    assert tensors["state"].shape == (4, 37)
    assert tensors["control"].shape == (3, 12)


def test_a_model_that_fits_plans_a_climb(monkeypatch, capsys, elsewhere, models):
    monkeypatch.setattr(PlatformTask, "max_decisions", 2)
    monkeypatch.setattr("nerd_mpc.dynamics.can_compile", lambda: False)
    budget = ("--samples", 4, "--horizon", 6, "--iterations", 1)
    with pytest.raises(SystemExit) as leaving:
        climb("--terrain", "T1", "--model", models / "fits", *budget, "--no-video", "--out", elsewhere / "out")
    assert leaving.value.code == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["terrain"], document["height"], document["dynamics"]) == ("T1", 0.06, "nerd")
    assert document["compiled"] is False
    manifest = json.loads((models / "fits" / "manifest.json").read_text())
    assert document["model"]["weights_sha256"] == manifest["weights_sha256"]
    assert document["on_plan_error_median_m"].keys() == {"5"}


@pytest.mark.skipif(not released_model().exists(), reason="the released model is not in the package yet")
def test_the_released_model_is_whole_and_made_for_the_shipped_robot(go2):
    model, manifest = load_climber(released_model(), go2.spec)
    assert model.context_encoder is not None
    assert manifest["robot"]["name"] == "go2"


def test_a_results_folder_appears_whole_at_the_end(elsewhere):
    folder = OutputFolder(elsewhere / "deep" / "out")
    assert not list(elsewhere.iterdir())  # nothing is made before there is something to keep
    with folder as partial:
        (partial / "file").write_text("1")
        assert not folder.path.exists()
    assert [path.name for path in folder.path.parent.iterdir()] == ["out"]
    assert (folder.path / "file").read_text() == "1"
    with pytest.raises(ValueError, match="never overwritten"):
        OutputFolder(folder.path)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_results_folder_disappears_after_an_error(elsewhere, error):
    def write():
        with OutputFolder(elsewhere / "out") as partial:
            (partial / "file").write_text("1")
            raise error

    with pytest.raises(error):
        write()
    assert not list(elsewhere.iterdir())


def test_a_results_folder_that_somebody_else_made_meanwhile_is_kept(elsewhere):
    def write():
        with OutputFolder(elsewhere / "out"):
            (elsewhere / "out").mkdir()
            (elsewhere / "out" / "theirs").touch()

    with pytest.raises(ValueError, match="never overwritten"):
        write()
    assert [path.name for path in elsewhere.iterdir()] == ["out"]
    assert [path.name for path in (elsewhere / "out").iterdir()] == ["theirs"]


def test_a_results_folder_in_a_place_that_cannot_be_written_is_refused(monkeypatch, elsewhere):
    def refuse(prefix, dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ValueError, match=r"cannot be created, .* is not a folder that can be written \(Permission"):
        OutputFolder(elsewhere / "deep" / "out")
