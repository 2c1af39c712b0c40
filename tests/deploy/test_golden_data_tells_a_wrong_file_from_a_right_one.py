import json

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from nerd_core.artifact import load_model
from nerd_deploy import OnnxStep, export_artifact, read_artifact
from nerd_deploy.golden import replay
from nerd_deploy.manifest import SEAL_KEY, seal


def with_weights(data, change):
    """Content of a file whose largest constant was changed, sealed again."""
    model = onnx.load_from_string(data)
    tensor = max(model.graph.initializer, key=lambda t: len(t.raw_data))
    values = numpy_helper.to_array(tensor).copy()
    change(values)
    tensor.raw_data = values.tobytes()
    kept = [entry for entry in model.metadata_props if entry.key != SEAL_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return seal(model.SerializeToString())


@torch.no_grad()
def test_the_recording_is_what_torch_computes_with_a_reset_in_the_middle(walker_nerd):
    model, _ = load_model(walker_nerd[0])
    golden = read_artifact(walker_nerd[1]).golden
    worlds, steps = golden.control.shape[:2]
    assert 0 < golden.reset_at < steps
    assert golden.reset.tolist() == [True, False, True]
    assert golden.context["mask"].any(-1).any(-1).all()
    cache, forgetful = model.init_cache(worlds), []
    for t in range(steps):
        if t == golden.reset_at:
            cache = cache.reset(torch.from_numpy(golden.reset))
        rows = {name: torch.from_numpy(value[:, t]) for name, value in golden.context.items()}
        rows["count"] = rows["mask"].sum(-1)
        state, control = torch.from_numpy(golden.state[:, t]), torch.from_numpy(golden.control[:, t])
        delta, cache = model.step(state, control, rows, cache)
        np.testing.assert_array_equal(delta, golden.delta[:, t])
        np.testing.assert_array_equal(model.codec.integrate(state, delta), golden.state[:, t + 1])
        forgetful.append(model.step(state, control, rows, model.init_cache(worlds))[0])
    # Right after the reset a world without a past is what was recorded, and the one that was kept is not.
    fresh = forgetful[golden.reset_at].numpy() - golden.delta[:, golden.reset_at]
    assert np.abs(fresh[golden.reset]).max() < 1e-6 < 1e-4 < np.abs(fresh[~golden.reset]).max()


def test_the_artifact_computes_its_golden_data_again(cartpole_nerd, walker_nerd):
    for _, folder in (cartpole_nerd, walker_nerd):
        found = read_artifact(folder)
        again = replay(OnnxStep(found.model, 5), found.golden)
        assert again.single_step <= 1e-6
        assert again.recursive <= 1e-5
        assert again.single_step == found.document["golden"]["single_step"]


def test_changed_weights_and_a_forgotten_reset_show(walker_nerd, monkeypatch):
    found = read_artifact(walker_nerd[1])
    tolerance = found.document["golden"]["tolerance"]
    changed = with_weights(found.model, lambda w: w.__setitem__(abs(w).argmax() // w.shape[-1], 1.0))
    assert replay(OnnxStep(changed), found.golden).single_step > tolerance
    spoiled = with_weights(found.model, lambda w: w.fill(np.nan))
    assert replay(OnnxStep(spoiled), found.golden).single_step == np.inf
    monkeypatch.setattr(OnnxStep, "reset", lambda self, rows=None: None)
    assert replay(OnnxStep(found.model), found.golden).single_step > tolerance


def test_a_graph_that_is_not_the_model_is_never_written(cartpole_nerd, tmp_path, monkeypatch):
    found = read_artifact(cartpole_nerd[1])
    wrong = with_weights(found.model, lambda w: w.__imul__(1.5))
    monkeypatch.setattr("nerd_deploy.export.onnx_bytes", lambda model, described: (wrong, found.manifest))
    with pytest.raises(ValueError, match=r"its graph is .* from torch after one step, expected 0\.0001"):
        export_artifact(cartpole_nerd[0], tmp_path / "x.nerd")
    assert list(tmp_path.iterdir()) == []


def test_a_turning_joint_is_not_a_whole_turn_away(cartpole_nerd):
    found = read_artifact(cartpole_nerd[1])
    units = json.loads(json.dumps(found.manifest))["inputs"][0]["units"]
    turned = found.golden.state.copy()
    turned[:, 1:, units.index("rad")] += np.float32(2 * np.pi)
    assert replay(OnnxStep(found.model), found.golden._replace(state=turned)).recursive < 1e-5
