import json

import pytest
import torch
from torch import nn

from nerd_core.cartpole import CartPole
from nerd_core.dataset import TrajectoryDataset, TrajectoryWriter
from nerd_core.model import FlashNerdConfig
from nerd_core.train import TrainConfig, train

CART = CartPole()


class Wind(nn.Module):
    """Passes the wind of the scene on to the network."""

    kind, out_size = "wind", 1

    def observe(self, state, scene):
        wind = scene["wind"].reshape(-1, *([1] * (state.ndim - 1)))
        return {"wind": wind.expand_as(state[..., :1])}

    def forward(self, context):
        return context["wind"]

    def config_json(self):
        return {}


@pytest.fixture(scope="module")
def windy(tmp_path_factory):
    """CartPole trajectories, each under its own unseen constant push on the cart."""
    path = tmp_path_factory.mktemp("data") / "windy"
    draw = torch.Generator().manual_seed(0)
    states, force = CART.record(200, 10, draw)
    wind = 2 * torch.rand(200, generator=draw, dtype=torch.float64) - 1
    now, pushed = states[:, 0], []
    for t in range(10):
        pushed.append(now)
        now = CART.step(now, force[:, t] + 1500 * wind[:, None])
    with TrajectoryWriter(path, CART.robot(), engine={}, seed=0) as writer:
        writer.append(torch.stack([*pushed, now], 1), force, {"wind": wind})
    return TrajectoryDataset.open(path)


def test_a_push_that_is_part_of_the_scene_is_learned_only_when_it_is_seen(windy, tmp_path):
    def held_out_loss(name, encoder):
        best = train(
            windy,
            # One frame only: from a longer history the wind could be inferred.
            FlashNerdConfig(width=16, heads=2, spans=(1,), hidden=16, readout_hidden=16),
            TrainConfig(
                steps=200,
                recursive_steps=5,
                recursive_horizon=3,
                batch_size=32,
                window=5,
                lr=1e-2,
                warmup=10,
                ema=0.9,
                eval_every=1000,
                precision="float32",
            ),
            out=tmp_path / name,
            context_encoder=encoder,
            progress=False,
        )
        return json.loads((best.parent / "metrics.jsonl").read_text().splitlines()[-1])

    blind, seeing = held_out_loss("blind", None), held_out_loss("seeing", Wind())
    assert seeing["val_loss"] < 0.3 * blind["val_loss"]
    assert seeing["rollout_error_mean"] < 0.7 * blind["rollout_error_mean"]
