"""Losses, rollouts, evaluation and artifacts take the baseline like our own model."""

import json

import pytest
import torch
from torch import nn

from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig, load_model, rollout, save_model
from nerd_core.artifact import build_model
from nerd_core.cartpole import CartPole
from nerd_core.losses import channel_weights, recursive_loss, teacher_loss

ROBOT = CartPole().robot()
SIZES = NerdBaselineConfig(width=8, heads=2, layers=2, window=4, block=6, head_hidden=8)


class Thermometer(nn.Module):
    """A context encoder for the tests."""

    out_size = 2

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, context):
        return self.layer(context["degrees"])


def model(encoder=None):
    torch.manual_seed(0)
    made = NerdBaseline(SIZES, ROBOT, encoder)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def test_the_type_of_the_config_picks_the_architecture():
    assert type(build_model(SIZES, ROBOT)) is NerdBaseline
    ours = FlashNerdConfig(width=8, heads=2, spans=(2,), hidden=8)
    assert type(build_model(ours, ROBOT)) is FlashNerd
    assert build_model(SIZES, ROBOT, encoder := Thermometer()).context_encoder is encoder


def test_a_loaded_baseline_predicts_the_same_bits(tmp_path):
    made = model()
    made.fit(torch.randn(50, 4), torch.randn(50, 1), torch.randn(50, 4))
    save_model(tmp_path / "m", made)
    loaded, manifest = load_model(tmp_path / "m", robot=ROBOT)
    state, control = torch.randn(2, 4, 4), torch.randn(2, 4, 1)
    assert type(loaded) is NerdBaseline
    assert loaded.config == SIZES
    assert torch.equal(made(state, control), loaded(state, control))
    assert (manifest["architecture"], manifest["format_version"]) == ("nerd-baseline", 1)
    assert manifest["parameters"] == made.num_parameters


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "gpt"}, "architecture 'gpt', expected one of flash-nerd, nerd-baseline"),
        ({"architecture": ["gpt"]}, "expected one of"),
        ({"architecture": "flash-nerd"}, "config has unknown keys"),
        ({"config": {"width": 8}}, "lacks"),
    ],
)
def test_a_manifest_of_another_architecture_is_one_line(tmp_path, change, words):
    save_model(tmp_path / "m", model())
    manifest = json.loads((tmp_path / "m" / "manifest.json").read_text())
    (tmp_path / "m" / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(ValueError, match=words) as refusal:
        load_model(tmp_path / "m")
    assert "\n" not in str(refusal.value)


def test_a_folded_copy_is_not_saved(tmp_path):
    made = model()
    folded = made.folded()
    with pytest.raises(ValueError, match="folded copy"):
        save_model(tmp_path / "m", folded)
    assert not (tmp_path / "m").exists()
    assert not made.is_folded
    # The product with W_p and all biases and gains that others absorbed are gone: d² + d + (2 L + 1) d.
    assert made.num_parameters - folded.num_parameters == 8 * 8 + 8 + 5 * 8
    assert folded.folded().num_parameters == folded.num_parameters


def test_both_losses_train_every_weight_that_a_window_can_reach():
    states, controls = torch.randn(3, 8, 4), torch.randn(3, 7, 1)
    losses = {
        "teacher": lambda m: teacher_loss(m, states[:, :5], controls[:, :4], None),
        "recursive": lambda m: recursive_loss(m, states, controls, torch.ones(4), 4, None),
    }
    for loss in losses.values():
        made = model()
        loss(made).backward()
        for name, parameter in made.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
        reached = made.network.position.grad.abs().sum(1) > 0
        assert reached.tolist() == [True] * 4 + [False] * 2


def test_on_cartpole_the_loss_of_the_baseline_is_nerds_plain_mean():
    states, forces = CartPole().record(64, 50, torch.Generator().manual_seed(0))
    made = NerdBaseline(NerdBaselineConfig(), ROBOT).double()
    made.fit(states[:, :-1].flatten(0, 1), forces.flatten(0, 1), states[:, 1:].flatten(0, 1))
    assert channel_weights(made).tolist() == [1.0] * 4
    states, forces = states[:2, :11], forces[:2, :10]
    error = made(states[:, :-1], forces) - made.target(states[:, :-1], states[:, 1:])
    assert float(teacher_loss(made, states, forces, None).detach()) == pytest.approx(
        float(error.square().mean().detach()), rel=1e-6
    )


def test_the_gradient_of_a_rollout_equals_finite_differences():
    made = model().double()
    cache = made.init_cache(1)
    state, controls = torch.randn(1, 4, dtype=torch.float64) * 0.3, torch.randn(1, 5, 1, dtype=torch.float64)
    inputs = (state.requires_grad_(), controls.requires_grad_())
    end = lambda s, u: rollout(made, s, u, cache=cache)[:, -1]  # noqa: E731
    # Along random directions, so a handful of rollouts instead of one per number.
    assert torch.autograd.gradcheck(end, inputs, fast_mode=True)


def test_surroundings_reach_the_prediction_through_the_cache():
    made = model(Thermometer()).double()
    with pytest.raises(ValueError, match="context is None"):
        made(torch.zeros(1, 1, 4), torch.zeros(1, 1, 1))
    state, control = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 1, dtype=torch.float64)
    degrees = torch.randn(2, 3, 1, dtype=torch.float64, requires_grad=True)
    cache = made.init_cache(2)
    for t in range(3):
        delta, cache = made.step(state[:, t], control[:, t], {"degrees": degrees[:, t]}, cache)
    window = made(state, control, {"degrees": degrees})
    torch.testing.assert_close(delta, made.increment(state[:, -1], window[:, -1]), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(delta.sum(), degrees)
    assert (gradient != 0).all()
