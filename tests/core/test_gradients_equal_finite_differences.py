import pytest
import torch
from torch import nn

from nerd_core.cartpole import CartPole
from nerd_core.model import FlashNerd, FlashNerdConfig
from nerd_core.robot import Body, Joint, RobotSpec
from nerd_core.rollout import prefill, rollout

SIZES = FlashNerdConfig(width=8, heads=2, spans=(3, 3), hidden=8, readout_hidden=8)
STEP = 1e-5
"""Error of a central difference: its square, and rounding over it, 1e-11 for float64."""


def drone():
    """A floating base with a limited and a continuous hinge."""
    bodies = (Body(name="base", parent=-1), Body(name="arm", parent=0), Body(name="rotor", parent=1))
    return RobotSpec(
        name="drone",
        floating=True,
        bodies=bodies,
        joints=(
            Joint(name="elbow", kind="hinge", body=1, axis=(0.0, 1.0, 0.0), range=(-2.0, 2.0)),
            Joint(name="spin", kind="hinge", body=2, axis=(0.0, 0.0, 1.0)),
        ),
        control="position",
        actuated=(0, 1),
        ctrl_range=((-2.0, 2.0), (-3.0, 3.0)),
        effort_limit=(20.0, 20.0),
        kp=(5.0, 5.0),
        kd=(0.1, 0.1),
        timestep=0.004,
        substeps=5,
    )


def problem(robot):
    """A network with every path alive, a history, a start and controls; float64."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    states = 0.5 * random(2, 3, robot.state_size)
    if robot.floating:
        turned = states[..., 3:7] + torch.tensor([1.0, 0, 0, 0])
        states[..., 3:7] = turned / turned.norm(dim=-1, keepdim=True)
    torch.manual_seed(0)
    model = FlashNerd(SIZES, robot).double()
    model.fit(*(0.3 * random(64, n) + 0.1 for n in (robot.state_size, robot.nu, robot.state_size)))
    # Increments as small as those of a real robot, so that no angle comes near its wrap.
    model.target_stats.std.copy_(torch.full_like(model.target_stats.std, 0.05))
    for layer in (model.affine, model.readout_out):
        nn.init.normal_(layer.weight, std=0.3, generator=draw)
    return model, states, 0.3 * random(2, 6, robot.nu), random(2, 5, robot.state_size)


@pytest.mark.parametrize("robot", [CartPole().robot(), drone()], ids=lambda robot: robot.name)
def test_the_gradient_of_a_rollout_with_history_equals_central_differences(robot):
    model, states, controls, weight = problem(robot)

    def objective(states, controls):
        cache = prefill(model, states[:, :2], controls[:, :2])
        predicted = rollout(model, states[:, 2], controls[:, 2:], cache=cache)
        return (predicted * weight).sum()

    inputs = [states.requires_grad_(), controls.requires_grad_()]
    gradients = torch.autograd.grad(objective(*inputs), inputs)
    for which, gradient in enumerate(gradients):
        found = torch.zeros_like(gradient)
        for index in range(gradient.numel()):
            values = []
            for sign in (1, -1):
                moved = [tensor.detach().clone() for tensor in inputs]
                moved[which].view(-1)[index] += sign * STEP
                with torch.no_grad():
                    values.append(objective(*moved))
            found.view(-1)[index] = (values[0] - values[1]) / (2 * STEP)
        assert float((gradient - found).norm() / found.norm()) < 1e-8
        # Through codec, cache and recursion: every frame of the history and every control has a say.
        assert bool((gradient.abs().amax(-1) > 1e-6).all())


def test_gradients_reach_states_and_controls_of_a_training_window():
    model, states, controls, _ = problem(CartPole().robot())
    states.requires_grad_()
    controls = controls[:, :3].clone().requires_grad_()
    model(states, controls)[:, -1].square().sum().backward()
    for tensor in (states, controls):
        assert tensor.grad is not None
        assert bool((tensor.grad.abs().amax(-1) > 0).all())
