import numpy as np
import pytest
import torch

from nerd_core import rollout
from nerd_core.artifact import load_model, save_model
from nerd_deploy import OnnxStep, export_onnx, verify_onnx
from nerd_deploy.scenario import draw_scenario


def observed(model, scenario):
    """A function from float32 arrays of states to arrays of contact rows."""

    def observe(state):
        rows = model.context_encoder.observe(torch.from_numpy(state), scenario.scene)
        return {name: value.numpy() for name, value in rows.items()}

    return observe


@pytest.fixture
def walk(walker):
    """The walker's model, its file for 5 worlds, a scenario, and a function that sees contacts."""
    model, _ = load_model(walker[0])
    scenario = draw_scenario(model, 5, 12)
    return model, OnnxStep(walker[1], 5), scenario, observed(model, scenario)


@torch.no_grad()
def test_a_rollout_without_contacts_equals_torch(cartpole):
    model, _ = load_model(cartpole[0])
    scenario = draw_scenario(model, 7, 12)
    truth = rollout(model, scenario.start, scenario.controls)
    step, state = OnnxStep(cartpole[1], 7), scenario.start.numpy()
    for t in range(12):
        state = step.step(state, scenario.controls[:, t].numpy())
        np.testing.assert_allclose(state, truth[:, t + 1], atol=2e-6)


@torch.no_grad()
def test_a_rollout_with_contacts_equals_torch(walk):
    model, step, scenario, observe = walk
    look = model.context_encoder.observe
    truth = rollout(model, scenario.start, scenario.controls, observe=lambda s: look(s, scenario.scene))
    state = scenario.start.numpy()
    assert observe(state)["mask"].any(1).all()
    for t in range(12):
        state = step.step(state, scenario.controls[:, t].numpy(), observe(state))
        np.testing.assert_allclose(state, truth[:, t + 1], atol=5e-6)


def test_200_recursive_steps_with_a_reset_stay_within_the_tolerance(cartpole, walker):
    hanging = torch.tensor([[0.0, 3.0, 0.0, 0.0], [0.1, -3.1, 0.2, -0.1]])
    for (model, onnx), start in ((cartpole, hanging), (walker, None)):
        found = verify_onnx(model, onnx, start=start)
        assert found["passed"]
        assert found["verdict"] == "float32"
        assert found["compared"] == 1.0
        assert found["max_abs"] <= 1e-4
        assert [row["batch"] for row in found["batches"]] == [1, 3, 64]


def test_contacts_and_history_matter_to_the_small_models(walk):
    _, step, scenario, observe = walk
    state, control = scenario.start.numpy(), scenario.controls[:, 0].numpy()
    rows = observe(state)
    step.step(state, -control, {**rows, "mask": np.zeros_like(rows["mask"])})
    remembered = step.step(state, control, rows)
    step.reset()
    seen = step.step(state, control, rows)
    step.reset()
    blind = step.step(state, control, {**rows, "mask": np.zeros_like(rows["mask"])})
    assert np.abs(seen - remembered).max() > 1e-4
    assert np.abs(seen - blind).max() > 1e-3


def test_rows_that_are_masked_or_left_out_change_nothing(walk):
    _, step, scenario, observe = walk
    state, control = scenario.start.numpy(), scenario.controls[:, 0].numpy()
    rows = observe(state)
    rows["mask"][:, 5:] = False
    told = step.step(state, control, rows)
    step.reset()
    spoiled = {n: v.copy() for n, v in rows.items()}
    for name in ("point", "gap", "velocity"):
        spoiled[name][:, 5:] = np.nan
    np.testing.assert_array_equal(step.step(state, control, spoiled), told)
    step.reset()
    short = {n: v[:, :5] for n, v in rows.items() if n != "count"}
    np.testing.assert_array_equal(step.step(state, control, short), told)


def test_a_reset_makes_a_world_new_and_leaves_the_others(cartpole):
    draw = np.random.default_rng(0)
    states = draw.normal(0, 0.5, (6, 3, 4)).astype(np.float32)
    control = np.zeros((3, 1), np.float32)
    kept, reset, new = (OnnxStep(cartpole[1], 3) for _ in range(3))
    for state in states[:4]:
        kept.step(state, control)
        reset.step(state, control)
    reset.reset([1])
    for state in states[4:]:
        a, b, c = (step.step(state, control) for step in (kept, reset, new))
        np.testing.assert_array_equal(b[[0, 2]], a[[0, 2]])
        np.testing.assert_allclose(b[1], c[1], atol=1e-6)
        assert np.abs(b[1] - a[1]).max() > 1e-5


def test_forked_worlds_share_a_past_and_have_their_own_future(cartpole):
    draw = np.random.default_rng(0)
    past = draw.normal(0, 0.5, (4, 1, 4)).astype(np.float32)
    future = draw.normal(0, 0.5, (3, 6, 4)).astype(np.float32)
    one, all_along = OnnxStep(cartpole[1], 1), OnnxStep(cartpole[1], 6)
    for state in past:
        one.step(state, np.zeros((1, 1), np.float32))
        all_along.step(np.repeat(state, 6, 0), np.zeros((6, 1), np.float32))
    forked = one.fork(6)
    for state in future:
        control = np.zeros((6, 1), np.float32)
        np.testing.assert_allclose(forked.step(state, control), all_along.step(state, control), atol=1e-6)
    # The world that was forked still stands where it was.
    straight = OnnxStep(cartpole[1], 1)
    for state in past:
        straight.step(state, np.zeros((1, 1), np.float32))
    last, control = future[0][:1], np.zeros((1, 1), np.float32)
    np.testing.assert_array_equal(one.step(last, control), straight.step(last, control))
    with pytest.raises(ValueError, match="starts from 1 world, here are 6"):
        forked.fork(2)


def test_results_are_written_where_they_are_asked_for(cartpole):
    step, state = OnnxStep(cartpole[1], 2), np.full((2, 4), 0.1, np.float32)
    control, out = np.zeros((2, 1), np.float32), np.empty((2, 4), np.float32)
    first = step.step(state, control)
    kept = first.copy()
    step.reset()
    assert step.step(state, control, out=out) is out
    np.testing.assert_array_equal(out, kept)
    step.step(10 * state, control)
    np.testing.assert_array_equal(first, kept)
    assert step.delta.shape == (2, 4)


def test_arrays_that_do_not_fit_are_refused_by_name(walk):
    _, step, scenario, observe = walk
    state, control = scenario.start.numpy(), scenario.controls[:, 0].numpy()
    rows = observe(state)
    wide = {n: np.concatenate([v, v], 1) for n, v in rows.items() if n != "count"}
    for arguments, words in (
        ((state[:4], control, rows), "state is float32 of shape \\(4, 37\\)"),
        ((state.astype(np.float64), control, rows), "state is float64"),
        ((state, control[:, :3], rows), "control is float32 of shape \\(5, 3\\)"),
        ((state, control), "context lacks point, normal, gap"),
        ((state, control, {**rows, "gap": rows["mask"]}), "context\\['gap'\\] is bool"),
        ((state, control, wide), "or with fewer rows"),
    ):
        with pytest.raises(ValueError, match=words):
            step.step(*arguments)
    with pytest.raises(ValueError, match="n is 0"):
        step.init(0)
    with pytest.raises(ValueError, match="rows is a mask of shape"):
        step.reset([True, False])


def test_a_model_without_memory_is_exported_without_rings(forgetful, tmp_path):
    save_model(tmp_path / "model", forgetful)
    manifest = export_onnx(tmp_path / "model", tmp_path / "m.onnx")
    assert [tensor["name"] for tensor in manifest["inputs"]] == ["state", "control"]
    assert [tensor["name"] for tensor in manifest["outputs"]] == ["delta", "next_state"]
    found = verify_onnx(tmp_path / "model", tmp_path / "m.onnx", steps=20, batches=(2,))
    assert found["verdict"] == "float32"
