import math

import pytest
import torch

from nerd_core.cartpole import CartPole
from nerd_core.dataset import Trajectories
from nerd_core.evaluate import channel_names, evaluate, state_channels, state_error
from nerd_core.robot import Body, Joint, RobotSpec

CART = CartPole()
ROBOT = CART.robot()


class Oracle:
    """The true CartPole, off by a fixed offset per step in chosen increment channels."""

    def __init__(self, offset=(0.0, 0.0, 0.0, 0.0)):
        self.robot, self.offset = ROBOT, torch.tensor(offset, dtype=torch.float64)

    def init_cache(self, n):
        return n

    def step(self, state, control, context, cache):
        delta = CART.step(state, control) - state
        return delta + self.offset, cache


def data(rows=32, steps=20):
    states, controls = CART.record(rows, steps, torch.Generator().manual_seed(0))
    return Trajectories(states, controls, {})


def floating():
    return RobotSpec(
        name="box",
        floating=True,
        bodies=(Body(name="base", parent=-1), Body(name="wheel", parent=0)),
        joints=(Joint(name="axle", kind="hinge", body=1, axis=(0.0, 1.0, 0.0)),),
        control="effort",
        actuated=(0,),
        ctrl_range=((-1.0, 1.0),),
        effort_limit=(1.0,),
        timestep=0.01,
        substeps=1,
    )


def test_the_true_dynamics_have_no_error():
    found = evaluate(Oracle(), data(), horizons=(1, 20))
    assert all(row.at_step < 1e-12 and row.diverged == 0 for row in found.horizons)


def test_the_error_of_a_constant_offset_is_that_of_hand_arithmetic():
    truth = data()
    offset = 1e-3
    found = evaluate(Oracle((offset, 0, 0, 0)), truth, horizons=(1, 10))
    # Only x is off, by H times the offset (the rail is far), one channel of four.
    sigma = float(truth.states[..., 0].flatten().std())
    for row in found.horizons:
        expected = row.horizon * offset / sigma / 2
        assert row.at_step == pytest.approx(expected, rel=1e-6)
        assert row.median == pytest.approx(expected, rel=1e-6)
        assert row.low == pytest.approx(expected, rel=1e-6)
    mean = math.sqrt(sum(h * h for h in range(1, 11)) / 10)
    assert found.horizons[1].mean_to_step == pytest.approx(mean * offset / sigma / 2, rel=1e-6)
    assert found.sigma["rail"] == pytest.approx(sigma)


def test_angles_are_compared_the_short_way_round():
    one, other = torch.tensor([0.0, 3.1, 0.0, 0.0]), torch.tensor([0.0, -3.1, 0.0, 0.0])
    error = state_error(ROBOT, one, other)
    assert float(error[1]) == pytest.approx(6.2 - 2 * math.pi, abs=1e-6)


def test_orientation_error_is_a_rotation_vector_and_blind_to_the_sign_of_the_quaternion():
    robot, angle = floating(), 0.3
    true = torch.zeros(robot.state_size, dtype=torch.float64)
    true[3] = 1.0
    predicted = true.clone()
    predicted[3], predicted[5] = -math.cos(angle / 2), -math.sin(angle / 2)
    predicted[:3] = torch.tensor([1.0, 2.0, 3.0])
    error = dict(zip(channel_names(robot), state_error(robot, predicted, true), strict=True))
    assert len(error) == 2 * robot.nv
    assert float(error["rotation_y"]) == pytest.approx(angle)
    assert float(error["rotation_x"]) == float(error["rotation_z"]) == 0
    assert float(error["position_world_z"]) == 3


def test_channels_that_never_move_are_left_out_and_named():
    states = torch.randn(8, 5, 4, dtype=torch.float64)
    states[..., 2] = 0.5
    found = evaluate(Oracle(), Trajectories(states, torch.zeros(8, 4, 1).double(), {}), horizons=(1,))
    assert found.idle_channels == ("rail_vel",)
    assert math.isfinite(found.horizons[0].at_step)


def test_a_row_that_is_not_finite_is_reported_and_the_mean_is_withheld():
    class Broken(Oracle):
        def step(self, state, control, context, cache):
            delta, cache = super().step(state, control, context, cache)
            delta[0] = torch.nan
            return delta, cache

    (row,) = evaluate(Broken(), data(), horizons=(5,)).horizons
    assert row.at_step is None
    assert row.diverged == pytest.approx(1 / 32)
    assert row.median < 1e-12


def test_history_before_the_start_reaches_the_model_and_nothing_after_it():
    class Recorder(Oracle):
        def __init__(self):
            super().__init__()
            self.seen = []

        def step(self, state, control, context, cache):
            self.seen.append(control[0])
            return super().step(state, control, context, cache)

    truth, model = data(), Recorder()
    evaluate(model, truth, horizons=(3,), start=7, history=2)
    assert torch.equal(torch.stack(model.seen), truth.controls[0, 5:10])


def test_the_context_belongs_to_the_rows_own_scene():
    class Looker(Oracle):
        def step(self, state, control, context, cache):
            assert torch.equal(context["wind"], state.new_tensor(range(32)))
            return super().step(state, control, context, cache)

    truth = data()._replace(scenes={"wind": torch.arange(32).double()})
    evaluate(Looker(), truth, horizons=(2,), observe=lambda state, scene: scene)


def test_standard_deviations_use_wrapped_angles():
    states = torch.tensor([[0.0, math.pi + 0.1, 0.0, 0.0]], dtype=torch.float64)
    assert float(state_channels(ROBOT, states)[0, 1]) == pytest.approx(0.1 - math.pi)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"horizons": (21,)}, "horizons"),
        ({"start": 20}, "start"),
        ({"start": 2, "history": 3}, "history"),
    ],
)
def test_horizons_and_starts_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        evaluate(Oracle(), data(), **options)
