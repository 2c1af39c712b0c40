import onnx
import pytest
import torch
from onnx import numpy_helper

from nerd_core.artifact import save_model
from nerd_deploy import OnnxStep, verify_onnx
from nerd_deploy.graph import same_graph
from nerd_deploy.manifest import SEAL_KEY, seal

HANGING = torch.tensor([[0.0, 3.0, 0.0, 0.0], [0.1, -3.1, 0.2, -0.1]])
UPRIGHT = torch.tensor([[0.0, 0.001, 0.0, 0.0], [0.0, -0.002, 0.0, 0.0]])


def with_one_weight_changed(path):
    """Content of a file in which one weight is half as large again, sealed again."""
    model = onnx.load(path)
    tensor = max(model.graph.initializer, key=lambda t: len(t.raw_data))
    values = numpy_helper.to_array(tensor).copy()
    values.flat[abs(values).argmax()] *= 1.5
    tensor.raw_data = values.tobytes()
    kept = [entry for entry in model.metadata_props if entry.key != SEAL_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return seal(model.SerializeToString())


def test_a_changed_weight_is_drift(cartpole, tmp_path):
    data = with_one_weight_changed(cartpole[1])
    (tmp_path / "edited.onnx").write_bytes(data)
    found = verify_onnx(cartpole[0], tmp_path / "edited.onnx", start=HANGING, steps=60, batches=(1, 2))
    assert not found["passed"]
    assert found["verdict"] == "drift"
    assert "its graph is not what is exported now: constants" in found["reason"]
    assert same_graph(cartpole[1].read_bytes(), cartpole[1].read_bytes()) is None


def test_a_reset_that_is_forgotten_is_drift(cartpole, monkeypatch):
    settings = {"start": HANGING, "steps": 20, "batches": (2,), "strict": True}
    assert verify_onnx(*cartpole, **settings)["passed"]
    reset = OnnxStep.reset

    def forgets_single_rows(self, rows=None):
        if rows is None:
            reset(self)

    monkeypatch.setattr(OnnxStep, "reset", forgets_single_rows)
    found = verify_onnx(*cartpole, **settings)
    assert found["verdict"] == "drift"
    assert found["first_beyond"] > found["reset_at"]


def test_rounding_that_the_model_amplifies_is_told_from_a_mistake(cartpole):
    settings = {"start": UPRIGHT, "batches": (1, 3, 16), "tolerance": 1e-6}
    found = verify_onnx(*cartpole, **settings)
    # A pole let go upright: torch in float32 leaves torch in float64, as the file leaves torch.
    assert found["torch_float32_from_float64"]["worlds_beyond"] > 0
    assert found["worlds_beyond"] > 0
    assert (found["passed"], found["verdict"]) == (True, "float64")
    assert found["float64"]["max_abs"] < 1e-9
    assert found["single_step"]["max_abs"] < 2e-6
    strictly = verify_onnx(*cartpole, **settings, strict=True)
    assert (strictly["passed"], strictly["verdict"]) == (False, "drift")


def test_a_model_that_leaves_all_bounds_proves_nothing(cartpole):
    start = torch.tensor([[0.0, 0.0, 2000.0, 0.0]])
    found = verify_onnx(*cartpole, start=start, steps=10, batches=(2,))
    assert (found["passed"], found["verdict"]) == (False, "diverged")


def test_a_file_of_another_model_is_refused(cartpole, walker, forgetful, tmp_path):
    with pytest.raises(ValueError, match="differ in robot_digest, config, context, weights"):
        verify_onnx(walker[0], cartpole[1])
    save_model(tmp_path / "other", forgetful)
    with pytest.raises(ValueError, match="made from another model, they differ in config"):
        verify_onnx(tmp_path / "other", cartpole[1])


def test_settings_out_of_range_are_refused(cartpole):
    for setting, words in (
        ({"steps": 0}, "steps is 0"),
        ({"batches": ()}, "batches is"),
        ({"batches": (0,)}, "batches is"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            verify_onnx(*cartpole, **setting)
