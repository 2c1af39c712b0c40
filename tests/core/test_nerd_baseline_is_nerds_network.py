"""The opponent has NeRD's layers, sizes and start, and nothing of ours but codec and normalisers."""

import math

import pytest
import torch

from nerd_core import NerdBaseline, NerdBaselineConfig
from nerd_core.baseline import NerdTransformer
from nerd_core.cartpole import CartPole

SMALL = NerdBaselineConfig(width=12, heads=3, layers=2, window=5, block=7, head_hidden=8)


# Parameters of the released checkpoints: reference facts, section 2, cross-checked there with the file sizes.
@pytest.mark.parametrize(
    ("robot", "inputs", "outputs", "width", "block", "published"),
    [
        ("cartpole", 6, 4, 192, 32, 2_713_668),
        ("pendulum", 37, 4, 192, 16, 2_716_548),
        ("cube toss", 72, 13, 192, 32, 2_726_925),
        ("franka", 21, 14, 384, 32, 10_815_566),
        ("ant", 215, 29, 384, 32, 10_891_037),
        ("anymal", 150, 37, 384, 32, 10_866_597),
    ],
)
def test_the_network_has_the_published_number_of_parameters(robot, inputs, outputs, width, block, published):
    network = NerdTransformer(NerdBaselineConfig(width=width, block=block), inputs, outputs)
    assert sum(p.numel() for p in network.parameters()) == published


def test_the_whole_cartpole_model_has_the_published_number_of_parameters():
    assert NerdBaseline(NerdBaselineConfig(), CartPole().robot()).num_parameters == 2_713_668


def by_hand(network, frames, heads):
    """GPT-2, position after position, from nothing but matrix products."""
    weights = dict(network.named_parameters())
    width = weights["position"].shape[1]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def linear(x, name):
        bias = weights.get(f"{name}.bias")
        product = x @ weights[f"{name}.weight"].T
        return product if bias is None else product + bias

    x = [linear(frame, "embed") + weights["position"][t] for t, frame in enumerate(frames)]
    size = width // heads
    for block in range(len(network.blocks)):
        name = f"blocks.{block}"
        q, k, v = zip(*(linear(norm(h, f"{name}.attention_norm"), f"{name}.qkv").split(width) for h in x), strict=True)
        for t in range(len(x)):
            mixed = torch.zeros_like(x[0])
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                score = torch.stack([q[t][part] @ k[j][part] / math.sqrt(size) for j in range(t + 1)])
                weight = score.exp() / score.exp().sum()
                mixed[part] = sum(weight[j] * v[j][part] for j in range(t + 1))
            x[t] = x[t] + linear(mixed, f"{name}.attention_out")
        for t in range(len(x)):
            u = linear(norm(x[t], f"{name}.feedforward_norm"), f"{name}.feedforward_in")
            gelu = u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))
            x[t] = x[t] + linear(gelu, f"{name}.feedforward_out")
    hidden = [linear(linear(norm(h, "norm"), "project"), "head_in").clamp(min=0) for h in x]
    return torch.stack([linear(h, "head_out") for h in hidden])


@torch.no_grad()
def test_the_network_equals_gpt2_written_out_by_hand():
    torch.manual_seed(0)
    network = NerdTransformer(SMALL, 4, 3).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    frames = torch.randn(2, 5, 4, dtype=torch.float64)
    for row in range(2):
        expected = by_hand(network, frames[row], SMALL.heads)
        torch.testing.assert_close(network(frames)[row], expected, rtol=0, atol=1e-12)


def test_weights_start_as_in_nerd():
    torch.manual_seed(0)
    network = NerdTransformer(NerdBaselineConfig(), 6, 4)
    residual = 0.02 / math.sqrt(2 * 6)
    for block in network.blocks:
        for layer, std in (
            (block.qkv, 0.02),
            (block.feedforward_in, 0.02),
            (block.attention_out, residual),
            (block.feedforward_out, residual),
        ):
            assert float(layer.weight.detach().std()) == pytest.approx(std, rel=0.03)
    for weight in (network.embed.weight, network.position, network.project.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not network.embed.bias.any()
    # PyTorch's own start of a linear layer: uniform within 1 / sqrt(inputs).
    largest = float(network.head_in.weight.detach().abs().max())
    assert 0.99 / math.sqrt(192) < largest <= 1 / math.sqrt(192)


def test_targets_are_plain_normalised_increments():
    model = NerdBaseline(SMALL, CartPole().robot()).double()
    state, after = torch.randn(2, 50, 4, dtype=torch.float64)
    model.fit(state, torch.randn(50, 1, dtype=torch.float64), after)
    y = model.target(state, after)
    delta = model.codec.differentiate(after, state)
    torch.testing.assert_close(y, (delta - delta.mean(0)) / delta.std(0, correction=0))
    torch.testing.assert_close(model.increment(state, y), delta)


def test_more_frames_than_the_window_are_refused():
    model = NerdBaseline(SMALL, CartPole().robot())
    model(torch.zeros(1, 5, 4), torch.zeros(1, 5, 1))
    with pytest.raises(ValueError, match=r"window of 6 frames, expected at most 5"):
        model(torch.zeros(1, 6, 4), torch.zeros(1, 6, 1))


@pytest.mark.parametrize("wrong", [{"width": 100}, {"layers": 0}, {"window": 33}, {"head_hidden": 0}, {"block": 0}])
def test_sizes_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        NerdBaselineConfig(**wrong)


def test_the_receptive_field_is_the_window():
    assert NerdBaselineConfig(window=7).receptive_field == 7
