"""The released model, exported once: torch against onnxruntime over 200 recursive steps."""

import json

import pytest

from nerd_core.artifact import load_model
from nerd_deploy import OnnxStep, read_artifact, verify_onnx
from nerd_deploy.golden import replay
from nerd_deploy.lint import lint_artifact

pytestmark = pytest.mark.slow


def test_its_artifact_has_no_findings_and_computes_its_golden_data(released, released_nerd):
    assert lint_artifact(released_nerd) == []
    found = read_artifact(released_nerd)
    assert found.manifest["robot_digest"] == load_model(released)[0].robot.digest()
    again = replay(OnnxStep(released_nerd), found.golden)
    assert again.single_step <= found.document["golden"]["tolerance"]
    assert again.recursive <= 1e-4


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64])
def test_it_stays_within_a_tenth_of_a_millimetre_for_200_steps(released, released_nerd, batch):
    # Spans of 3: the rings wrap 66 times, and half of the worlds are reset at step 100.
    found = verify_onnx(released, released_nerd, batches=(batch,), seed=batch)
    print(json.dumps({key: found[key] for key in ("verdict", "max_abs", "compared", "single_step")}))
    assert (found["steps"], found["reset_at"], found["compared"]) == (200, 100, 1.0)
    assert found["verdict"] == "float32"
    assert found["max_abs"] <= 1e-4
