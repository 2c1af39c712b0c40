import json

import numpy as np
import pytest
import torch

from nerd_core import rollout
from nerd_core.artifact import load_model
from nerd_deploy import OnnxStep, read_artifact
from nerd_deploy.cli import main
from nerd_deploy.rollouts import Request, observer, read_request, roll
from nerd_deploy.scenario import draw_scenario

STATES = np.random.default_rng(0).normal(0, 0.2, (5, 4)).astype(np.float32)
CONTROLS = np.random.default_rng(1).normal(0, 1, (5, 9, 1)).astype(np.float32)


def request(state=STATES, control=CONTROLS, context=None, scene=None):
    return Request(state, control, context or {}, scene or {})


@pytest.fixture
def worlds(walker_nerd):
    """The walker's model, its artifact, and a scenario."""
    model, _ = load_model(walker_nerd[0])
    return model, walker_nerd[1], draw_scenario(model, 4, 8)


@torch.no_grad()
def test_a_file_of_starts_and_controls_becomes_the_rollout_of_torch(cartpole_nerd, tmp_path, capsys):
    np.savez(tmp_path / "in.npz", state=STATES, control=CONTROLS)
    main(["rollout", str(cartpole_nerd[1]), str(tmp_path / "in.npz"), "--out", str(tmp_path / "deep" / "out.npz")])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"command": "rollout", "worlds": 5, "steps": 9, "flagged": []}
    with np.load(tmp_path / "deep" / "out.npz") as found:
        truth = rollout(load_model(cartpole_nerd[0])[0], torch.from_numpy(STATES), torch.from_numpy(CONTROLS))
        np.testing.assert_allclose(found["state"], truth, atol=2e-6)
        assert found["flagged_at"].tolist() == [-1] * 5
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out.npz"]


@torch.no_grad()
def test_surroundings_in_the_file_are_seen_as_by_the_model(worlds, tmp_path):
    model, folder, scenario = worlds
    scene = {f"scene.{name}": value.numpy() for name, value in scenario.scene.items()}
    np.savez(tmp_path / "in.npz", state=scenario.start, control=scenario.controls, **scene)
    main(["rollout", str(folder), str(tmp_path / "in.npz"), "--out", str(tmp_path / "out.npz")])
    look = model.context_encoder.observe
    truth = rollout(model, scenario.start, scenario.controls, observe=lambda s: look(s, scenario.scene))
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["state"], truth, atol=5e-6)


def test_contact_rows_in_the_file_are_used_as_they_are(worlds, tmp_path):
    found = read_artifact(worlds[1])
    golden = found.golden
    part = slice(0, golden.reset_at)
    rows = {f"context.{name}": value[:, part] for name, value in golden.context.items()}
    np.savez(tmp_path / "in.npz", state=golden.state[:, 0], control=golden.control[:, part], **rows)
    main(["rollout", str(worlds[1]), str(tmp_path / "in.npz"), "--out", str(tmp_path / "out.npz")])
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_allclose(out["state"], golden.state[:, : golden.reset_at + 1], atol=5e-6)


def test_a_world_that_is_not_finite_is_flagged_and_no_other_changes_by_a_bit(cartpole_nerd):
    sound = roll(OnnxStep(cartpole_nerd[1]), request())
    state, control = STATES.copy(), CONTROLS.copy()
    state[1, 2], control[3, 4, 0], control[4, 8, 0] = np.nan, np.inf, -np.inf
    found = roll(OnnxStep(cartpole_nerd[1]), request(state, control))
    assert found.flagged_at.tolist() == [-1, 0, -1, 4, 8]
    for world, last in enumerate((10, 0, 10, 5, 9)):
        np.testing.assert_array_equal(found.state[world, :last], sound.state[world, :last])
        assert np.isnan(found.state[world, max(last, 1) :]).all()


def test_contact_rows_and_surroundings_that_are_not_finite_flag_their_world_alone(worlds):
    _, folder, scenario = worlds
    step, golden = OnnxStep(folder), read_artifact(folder).golden
    context = {name: value.copy() for name, value in golden.context.items()}
    sound = roll(step, request(golden.state[:, 0], golden.control, context))
    real = np.argwhere(context["mask"][1, 5])[0, 0]
    context["gap"][1, 5, real] = np.nan
    context["point"][~context["mask"]] = np.nan  # rows that do not exist may hold anything
    found = roll(step, request(golden.state[:, 0], golden.control, context))
    assert found.flagged_at.tolist() == [-1, 5, -1]
    np.testing.assert_array_equal(found.state[[0, 2]], sound.state[[0, 2]])
    scene = {name: value.numpy().copy() for name, value in scenario.scene.items()}
    scene["friction"][2] = np.nan
    asked = request(scenario.start.numpy(), scenario.controls.numpy(), scene=scene)
    found = roll(step, asked, observer(step.manifest, scene))
    assert found.flagged_at.tolist() == [-1, -1, 0, -1]
    assert np.isfinite(found.state[[0, 1, 3]]).all()


def test_a_world_that_leaves_all_bounds_is_flagged(cartpole_nerd):
    state = STATES.copy()
    state[2] = 3e38
    found = roll(OnnxStep(cartpole_nerd[1]), request(state))
    assert found.flagged_at[2] > 0
    assert (np.delete(found.flagged_at, 2) == -1).all()


def test_a_request_that_does_not_fit_is_one_line_and_exit_code_2(cartpole_nerd, worlds, tmp_path, capsys):
    path = tmp_path / "in.npz"
    sound = {"state": STATES, "control": CONTROLS}
    trap = {"state": np.array([{}], dtype=object), "control": CONTROLS}
    for arrays, words in (
        ({"state": STATES}, "lacks control"),
        ({**sound, "state": STATES.astype(np.float64)}, "state is float64 of shape (5, 4), expected float32"),
        ({**sound, "state": STATES[:, :3]}, "state is float32 of shape (5, 3), expected float32 of shape (B, 4)"),
        ({**sound, "control": CONTROLS[:, :0]}, "control is float32 of shape (5, 0, 1)"),
        ({**sound, "state": STATES[:4]}, "state has 4 worlds, control has 5"),
        ({**sound, "forces": STATES}, "forces unknown"),
        ({**sound, "scene.box": np.zeros((3, 2))}, "scene.box has shape (3, 2)"),
        ({**sound, "context.gap": np.zeros((5, 2, 8))}, "context.gap has shape (5, 2, 8), expected (5, 9, ...)"),
        (trap, "not readable as a .npz file of plain arrays"),
    ):
        np.savez(path, **arrays)
        refused(capsys, words, cartpole_nerd[1], path, "--out", tmp_path / "out.npz")
    np.savez(path, **sound)
    refused(capsys, "expected float32 of shape (B, 37)", worlds[1], path, "--out", tmp_path / "out.npz")
    start, control = worlds[2].start.numpy(), worlds[2].controls.numpy()
    np.savez(path, state=start, control=control)
    refused(capsys, "this model sees contacts", worlds[1], path, "--out", tmp_path / "out.npz")
    np.savez(path, **{"state": start, "control": control, "scene.box": np.zeros((1, 2), np.float32)})
    refused(capsys, "scene does not fit", worlds[1], path, "--out", tmp_path / "out.npz")
    refused(capsys, "no such file", cartpole_nerd[1], tmp_path / "x.npz", "--out", tmp_path / "out.npz")
    refused(capsys, "never overwritten", cartpole_nerd[1], path, "--out", path)
    np.save(tmp_path / "one.npy", STATES)
    refused(capsys, "a single array", cartpole_nerd[1], tmp_path / "one.npy", "--out", tmp_path / "out.npz")
    refused(capsys, "'ort-x', expected one of", cartpole_nerd[1], path, "--out", tmp_path / "o", "--backend", "ort-x")
    assert not (tmp_path / "out.npz").exists()


def refused(capsys, words, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["rollout", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (leaving.value.code, captured.out) == (2, "")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_one_surrounding_may_serve_all_worlds(worlds, tmp_path):
    _, folder, scenario = worlds
    step = OnnxStep(folder)
    one = {name: value[:1].numpy() for name, value in scenario.scene.items()}
    each = {name: value.numpy() for name, value in scenario.scene.items()}
    found = []
    for scene in (one, each):
        np.savez(
            tmp_path / "in.npz",
            state=scenario.start,
            control=scenario.controls,
            **{f"scene.{name}": value for name, value in scene.items()},
        )
        asked = read_request(tmp_path / "in.npz", step.manifest)
        found.append(roll(step, asked, observer(step.manifest, asked.scene)).state)
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
