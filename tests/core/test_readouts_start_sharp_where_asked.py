"""``readout_sharpness``: what it sets, and that models from before it existed are read."""

import json

import pytest
import torch

from nerd_core import FlashNerd, FlashNerdConfig, load_model, save_model
from nerd_core.cartpole import CartPole

ROBOT = CartPole().robot()


def hidden_inputs(sharpness):
    """Standard deviation, over units and normal frames, of what the frame adds to the hidden units' inputs."""
    torch.manual_seed(0)
    model = FlashNerd(FlashNerdConfig(readout_hidden=4096, readout_sharpness=sharpness), ROBOT)
    frame = torch.randn(512, model.codec.token_size)
    return float((frame @ model.readout_in.weight[:, model.config.width :].detach().T).std()), model


@pytest.mark.parametrize("sharpness", [1.0, 2.5])
def test_a_frame_of_unit_channels_spreads_the_hidden_units_by_the_sharpness(sharpness):
    spread, model = hidden_inputs(sharpness)
    assert spread == pytest.approx(sharpness, rel=0.05)
    assert float(model.readout_in.bias.std()) == pytest.approx(4 * sharpness / 12**0.5, rel=0.05)


def test_the_prediction_at_the_start_is_the_affine_one_however_sharp():
    _, model = hidden_inputs(2.5)
    state, control = torch.randn(3, 4, ROBOT.state_size), torch.randn(3, 4, ROBOT.nu)
    assert torch.equal(model(state, control), model.affine(model.frame(state, control, None)))


def test_without_sharpness_the_weights_are_drawn_as_before_it_existed():
    torch.manual_seed(3)
    model = FlashNerd(FlashNerdConfig(width=8, heads=1, spans=(1,), hidden=8, readout_hidden=8), ROBOT)
    torch.manual_seed(3)
    again = FlashNerd(
        FlashNerdConfig(width=8, heads=1, spans=(1,), hidden=8, readout_hidden=8, readout_sharpness=2.0), ROBOT
    )
    assert torch.equal(model.readout_in.weight[:, :8], again.readout_in.weight[:, :8])
    assert not torch.equal(model.readout_in.weight, again.readout_in.weight)


def test_a_model_from_before_the_setting_loads_without_it(tmp_path):
    model = FlashNerd(FlashNerdConfig(width=8, heads=1, spans=(1,), hidden=8, readout_hidden=8), ROBOT)
    save_model(tmp_path / "model", model, {})
    path = tmp_path / "model" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["config"].pop("readout_sharpness") == 0.0
    path.write_text(json.dumps(manifest))
    assert load_model(tmp_path / "model")[0].config == model.config


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_sharpness_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match="readout_sharpness is"):
        FlashNerdConfig(readout_sharpness=value)
