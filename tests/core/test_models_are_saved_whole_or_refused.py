import json

import pytest
import torch
from torch import nn

from nerd_core import artifact
from nerd_core.artifact import load_model, save_model
from nerd_core.cartpole import CartPole
from nerd_core.model import FlashNerd, FlashNerdConfig
from nerd_core.storage import TEMPORARY_SUFFIX, publish_directory, recover_directory

ROBOT = CartPole().robot()
SIZES = FlashNerdConfig(width=8, heads=2, spans=(2,), hidden=8, readout_hidden=8)


class Thermometer(nn.Module):
    """A context encoder for the tests."""

    kind = "thermometer"

    def __init__(self, scale):
        super().__init__()
        self.scale, self.out_size = scale, 2
        self.layer = nn.Linear(1, 2)

    def forward(self, context):
        return self.layer(context["degrees"] * self.scale)

    def config_json(self):
        return {"scale": self.scale}


class Plugin:
    name = "thermometer"

    def load(self):
        return lambda config, robot: Thermometer(**config)


@pytest.fixture
def plugins(monkeypatch):
    installed = [Plugin()]
    monkeypatch.setattr(artifact, "entry_points", lambda group: installed)
    return installed


def model(encoder=None, seed=0):
    torch.manual_seed(seed)
    made = FlashNerd(SIZES, ROBOT, encoder)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def edit(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_loaded_model_predicts_the_same_bits(tmp_path):
    made = model()
    save_model(tmp_path / "m", made, {"name": "swing", "datasets": ["abc"], "metrics": {"e": 1.0}})
    loaded, manifest = load_model(tmp_path / "m", robot=ROBOT)
    state, control = torch.randn(2, 5, 4), torch.randn(2, 5, 1)
    assert torch.equal(made(state, control), loaded(state, control))
    assert (manifest["name"], manifest["datasets"]) == ("swing", ["abc"])
    assert manifest["parameters"] == made.num_parameters
    assert not loaded.training


def test_saving_twice_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        save_model(tmp_path / name, model())
    for file in ("weights.safetensors", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_an_existing_model_is_replaced_only_on_request(tmp_path):
    save_model(tmp_path / "m", model())
    with pytest.raises(ValueError, match="never overwritten"):
        save_model(tmp_path / "m", model(seed=1))
    save_model(tmp_path / "m", model(seed=1), overwrite=True)
    assert torch.equal(load_model(tmp_path / "m")[0].embed.weight, model(seed=1).embed.weight)
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_a_kill_between_the_two_renames_of_a_replacement_is_recovered(tmp_path):
    path, temporary = tmp_path / "m", tmp_path / f"m{TEMPORARY_SUFFIX}"
    save_model(path, model())
    expected = (path / "manifest.json").read_bytes()
    path.rename(tmp_path / "m.old")
    temporary.mkdir()
    recover_directory(path)
    assert (path / "manifest.json").read_bytes() == expected
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_publishing_never_replaces_a_folder_unasked(tmp_path):
    for name in ("m", "m.tmp"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="never overwritten"):
        publish_directory(tmp_path / "m.tmp", tmp_path / "m")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d.write_bytes(d.read_bytes()[:-8]), "truncated or edited"),
        (lambda d: d.write_bytes(d.read_bytes()[:-1] + b"x"), "truncated or edited"),
        (lambda d: d.unlink(), "no such weights"),
    ],
)
def test_damaged_weights_are_refused_in_one_line(tmp_path, damage, words):
    save_model(tmp_path / "m", model())
    damage(tmp_path / "m" / "weights.safetensors")
    with pytest.raises(ValueError, match=words) as refusal:
        load_model(tmp_path / "m")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format_version=2), "format_version 2, this nerd-core reads 1"),
        (lambda m: m.update(format="nerd-dataset"), "not a model"),
        (lambda m: m.update(architecture="gpt"), "architecture 'gpt'"),
        (lambda m: m["config"].update(depth=3), "unknown keys .'depth'."),
        (lambda m: m["config"].pop("width"), "lacks .'width'."),
        (lambda m: m["config"].update(width=7), "width"),
        (lambda m: m["config"].update(width=16), "does not fit its manifest"),
        (lambda m: m["robot"].update(timestep=1.0), "edited"),
        (lambda m: m.pop("context"), "lacks context"),
    ],
)
def test_an_edited_manifest_is_refused(tmp_path, change, words):
    save_model(tmp_path / "m", model())
    edit(tmp_path / "m", change)
    with pytest.raises(ValueError, match=words) as refusal:
        load_model(tmp_path / "m")
    assert "\n" not in str(refusal.value)


def test_a_model_of_another_robot_is_refused_with_every_difference(tmp_path):
    save_model(tmp_path / "m", model())
    with pytest.raises(ValueError, match="another robot") as refusal:
        load_model(tmp_path / "m", robot=CartPole(substeps=4, timestep=1 / 240).robot())
    assert "substeps" in str(refusal.value)
    assert "timestep" in str(refusal.value)


def test_a_context_encoder_comes_back_through_its_plugin(tmp_path, plugins):
    made = model(Thermometer(0.5))
    save_model(tmp_path / "m", made)
    loaded, manifest = load_model(tmp_path / "m")
    assert manifest["context"] == {"kind": "thermometer", "config": {"scale": 0.5}}
    inputs = torch.randn(2, 5, 4), torch.randn(2, 5, 1), {"degrees": torch.randn(2, 5, 1)}
    assert torch.equal(made(*inputs), loaded(*inputs))


def test_a_missing_plugin_is_named_with_the_package_to_install(tmp_path, plugins):
    save_model(tmp_path / "m", model(Thermometer(0.5)))
    plugins.clear()
    with pytest.raises(ValueError, match=r"'thermometer'.*nerd-contact"):
        load_model(tmp_path / "m")


def test_an_encoder_that_could_not_be_loaded_again_is_not_saved(tmp_path):
    encoder = nn.Linear(1, 2)
    encoder.out_size = 2
    with pytest.raises(ValueError, match="Linear needs config_json"):
        save_model(tmp_path / "m", model(encoder))
    assert not (tmp_path / "m").exists()


def test_unknown_metadata_is_refused(tmp_path):
    with pytest.raises(ValueError, match="author"):
        save_model(tmp_path / "m", model(), {"author": "me"})
