import pytest
import torch
from torch import nn

from nerd_core.cartpole import CartPole
from nerd_core.codec import StateCodec
from nerd_core.dataset import Trajectories
from nerd_core.losses import RecursiveLoss, recursive_loss
from nerd_core.model import FlashNerd, FlashNerdConfig
from nerd_core.windows import TrajectoryPool, WindowSampler, seeded_generator

CART = CartPole()
ROBOT = CART.robot()
PAST, HORIZON = 2, 4


class Wind(nn.Module):
    """Sees the wind of the scene and the state it is met at."""

    out_size = 2

    def observe(self, state, scene):
        wind = scene["wind"].reshape(-1, *([1] * (state.ndim - 1)))
        return {"seen": torch.cat([wind * state[..., :1], wind.expand_as(state[..., :1])], -1)}

    def forward(self, context):
        return context["seen"]


def network(encoder=None):
    torch.manual_seed(0)
    sizes = FlashNerdConfig(width=8, heads=2, spans=(3,), hidden=8, readout_hidden=8)
    model = FlashNerd(sizes, ROBOT, encoder).double()
    states, controls = CART.record(64, 10, torch.Generator().manual_seed(0))
    now, after = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
    model.fit(now, controls.flatten(0, 1), after)
    nn.init.normal_(model.readout_out.weight, std=0.1)
    if encoder is not None:
        nn.init.normal_(model.affine.weight[:, -2:], std=0.1)
    return model


def batch(rows=3):
    states, controls = CART.record(rows, PAST + HORIZON, torch.Generator().manual_seed(1))
    return states, controls


def test_the_loss_is_that_of_a_whole_recomputation():
    model, (states, controls) = network(), batch()
    scale = torch.tensor([0.3, 0.5, 1.0, 2.0], dtype=torch.float64)
    loss = recursive_loss(model, states, controls, scale, HORIZON, None)
    # Without a cache: predict each step from the window of everything before it.
    codec = StateCodec(ROBOT)
    seen, total = states[:, : PAST + 1], 0.0
    for step in range(HORIZON):
        y = model(seen, controls[:, : PAST + 1 + step])[:, -1]
        after = codec.integrate(seen[:, -1], model.increment(seen[:, -1], y))
        error = codec.differentiate(after, states[:, PAST + 1 + step]) / scale
        small = error.abs() <= 1
        total += torch.where(small, error**2, 2 * error.abs() - 1).mean()
        seen = torch.cat([seen, after[:, None]], 1)
    torch.testing.assert_close(loss, total / HORIZON)


def test_history_before_the_start_changes_the_loss():
    model, (states, controls) = network(), batch()
    scale = torch.ones(4, dtype=torch.float64)
    full = recursive_loss(model, states, controls, scale, HORIZON, None)
    short = recursive_loss(model, states[:, PAST:], controls[:, PAST:], scale, HORIZON, None)
    assert float((full - short).detach().abs()) > 1e-9


@pytest.mark.parametrize("encoder", [None, Wind()])
def test_gradients_through_rollout_cache_and_surroundings_match_finite_differences(encoder):
    model, (states, controls) = network(encoder), batch()
    scale = torch.tensor([0.3, 0.5, 1.0, 2.0], dtype=torch.float64)
    scene = {"wind": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
    observe = None if encoder is None else encoder.observe

    def loss():
        return recursive_loss(model, states, controls, scale, HORIZON, observe, scene)

    loss().backward()
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        with torch.no_grad():
            parameter += 1e-6 * direction
            above = loss()
            parameter -= 2e-6 * direction
            below = loss()
            parameter += 1e-6 * direction
        slope = float((above - below) / 2e-6)
        found = float((parameter.grad * direction).sum())
        assert found == pytest.approx(slope, rel=1e-3, abs=1e-7), name


def test_a_row_that_runs_away_pulls_with_a_bounded_force():
    model, (states, controls) = network(), batch()
    scale = torch.ones(4, dtype=torch.float64)

    def pull(offset):
        model.zero_grad()
        wrong = states.clone()
        wrong[0, PAST + 1 :, 0] += offset
        recursive_loss(model, wrong, controls, scale, HORIZON, None).backward()
        return model.affine.bias.grad.norm()

    assert float(pull(1e3)) == pytest.approx(float(pull(1e6)), rel=1e-6)


def test_drawn_batches_use_every_length_of_history_and_the_rows_own_scene():
    states, controls = CART.record(20, 12, torch.Generator().manual_seed(3))
    data = Trajectories(states, controls, {"wind": torch.arange(20.0).double()})
    pool = TrajectoryPool([data], torch.device("cpu"))
    model = network(Wind())
    sampler = WindowSampler(pool, torch.arange(20), model.config.receptive_field - 1 + HORIZON)
    loss = RecursiveLoss(sampler, Wind().observe, model=model, horizon=HORIZON, seed=0)
    lengths = {loss(model, 4, seeded_generator(0, i))[1] // 4 for i in range(20)}
    assert lengths == {HORIZON, HORIZON + 1, HORIZON + 2}
    again = [float(loss(model, 4, seeded_generator(0, 1))[0].detach()) for _ in range(2)]
    assert again[0] == again[1]


def test_the_scale_of_a_channel_is_the_spread_of_its_true_motion():
    # x moves by k after k steps times ±1: variance k², so the mean over k = 1..3 is 14/3.
    signs = torch.tensor([1.0, -1.0]).repeat(500)
    x = signs[:, None] * torch.arange(6)
    states = torch.stack([x, 0 * x, 0 * x, 0 * x], -1).double()
    data = Trajectories(states, torch.zeros(1000, 5, 1).double(), {})
    pool = TrajectoryPool([data], torch.device("cpu"))
    model = network()
    sampler = WindowSampler(pool, torch.arange(1000), 5)
    loss = RecursiveLoss(sampler, None, model=model, horizon=3, seed=0)
    assert float(loss.scale[0]) == pytest.approx((14 / 3) ** 0.5, rel=0.01)
    assert loss.scale[1:].tolist() == [1, 1, 1]
