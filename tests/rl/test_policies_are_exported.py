"""An exported policy gives the mean actions of the trained one, and says what goes in and comes out."""

import json

import onnx
import onnxruntime
import pytest
import torch

from nerd_core.storage import write_tensors
from nerd_rl import export_policy, load_policy, mean_policy
from nerd_rl.policy import build_actor


@pytest.fixture(scope="module")
def actor(swing_up):
    """Every number that export must carry over is its own: weights, normaliser, noise."""
    actor = build_actor(swing_up, swing_up.ppo)
    generator = torch.Generator().manual_seed(0)
    for value in actor.state_dict().values():
        if value.is_floating_point():
            value.copy_(0.2 + torch.rand(value.shape, generator=generator))
    return actor


@pytest.fixture(scope="module")
def file(actor, swing_up, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "policy.onnx"
    export_policy(path, actor, swing_up, {"iterations": 7})
    return path


@pytest.mark.parametrize("batch", [1, 5])
def test_the_file_gives_the_mean_actions_for_any_number_of_worlds(batch, file, actor):
    observation = torch.randn(batch, 5, generator=torch.Generator().manual_seed(batch))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(["actions"], {"obs": observation.numpy()})
    expected = mean_policy(actor)(observation)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)


def test_its_metadata_name_and_scale_every_entry(file, swing_up):
    found = {prop.key: json.loads(prop.value) for prop in onnx.load(file).metadata_props}
    assert found["observation_names"] == ["x [m]", "sin θ", "cos θ", "ẋ [m/s]", "θ̇ [rad/s]"]
    assert found["observation_scales"] == [0.5, 1.0, 1.0, 0.2, 0.2]
    assert (found["action_names"], found["action_scale"], found["action_limit"]) == (["rail"], [1500.0], 1.0)
    assert (found["task"], found["robot"], found["iterations"]) == ("cartpole-swing-up", "cartpole", 7)
    assert found["robot_digest"] == swing_up.robot.spec.digest()
    assert found["dt"] == pytest.approx(1 / 60)


def test_nothing_but_the_file_is_left(file):
    assert [path.name for path in file.parent.iterdir()] == ["policy.onnx"]


def test_a_policy_is_read_back_to_the_bit(actor, swing_up, tmp_path):
    write_tensors(tmp_path / "policy.safetensors", actor.state_dict())
    again = load_policy(tmp_path / "policy.safetensors", swing_up, swing_up.ppo)
    observation = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean_policy(again)(observation), mean_policy(actor)(observation))


def test_weights_of_another_task_are_refused(actor, go2_task, tmp_path):
    write_tensors(tmp_path / "policy.safetensors", actor.state_dict())
    with pytest.raises(ValueError, match="does not fit task go2-velocity"):
        load_policy(tmp_path / "policy.safetensors", go2_task, go2_task.ppo)
