"""An episode: planned in some dynamics, executed in MuJoCo Warp, kept whatever happens."""

import math

import pytest
import torch

from nerd_core.rotation import quat_to_matrix
from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_mpc.dial import DialConfig
from nerd_mpc.dynamics import MujocoRollout, NerdRollout
from nerd_mpc.episode import run_episode, settled_start
from nerd_mpc.outputs import write_episode
from nerd_mpc.platform import PlatformTask

CONFIG = DialConfig(num_samples=8, horizon=6, num_knots=3, iterations=1, first_iterations=2)


class ShortTask(PlatformTask):
    max_decisions = 6


@pytest.fixture(scope="module")
def task(go2):
    return ShortTask(go2, 0.1)


@pytest.fixture(scope="module")
def plant(task):
    return MjWarpWorlds(task.robot, task.terrain, 1)


@pytest.fixture(scope="module")
def engine(task):
    return MujocoRollout(task, threads=1)


def run(task, dynamics, plant, seed=0, **options):
    return run_episode(task, dynamics, plant, CONFIG, seed=seed, settings={"seed": seed}, **options)


@pytest.fixture(scope="module")
def record(task, engine, plant):
    return run(task, engine, plant)


def test_all_parts_of_a_record_tell_of_the_same_decisions(task, record):
    assert record.outcome == record.summary["outcome"] == "timeout"
    assert record.summary["decisions"] == 6
    assert record.states.shape == (7, 37)
    assert record.states.dtype == torch.float32
    assert record.controls.shape == (6, 12)
    for rows in (record.planning_ms, record.reward, record.score, record.effective_samples):
        assert rows.shape == (6,)
        assert rows.isfinite().all()
    assert record.feet_on_deck.tolist() == record.held.tolist() == [0] * 6
    torch.testing.assert_close(record.reward, task.reward(record.states[1:]))
    low, high = task.control_range.unbind(-1)
    assert ((record.controls >= low) & (record.controls <= high)).all()
    assert ((record.effective_samples >= 1) & (record.effective_samples <= 8)).all()
    assert record.settings == {"seed": 0}
    assert record.on_plan_error == {}  # the engine itself planned


def test_the_executed_states_are_the_plant_s_under_the_recorded_controls(plant, record):
    plant.set_state(record.states[:1])
    states = [plant.step(control[None])[0] for control in record.controls]
    assert torch.equal(torch.stack(states), record.states[1:])


def test_the_first_control_was_committed_before_anything_was_planned(task, record):
    torch.testing.assert_close(record.controls[0], torch.tensor(task.robot.home_ctrl))
    assert not torch.allclose(record.controls[5], record.controls[0], atol=1e-2)


def test_one_seed_is_one_episode_and_another_seed_is_another(task, engine, plant, record):
    again = run(task, engine, plant)
    assert torch.equal(again.states, record.states)
    assert torch.equal(again.controls, record.controls)
    other = run(task, engine, plant, seed=1)
    assert not torch.equal(other.states[0], record.states[0])


def test_a_learned_plan_is_compared_with_the_engine_at_every_decision(task, small_nerd, plant, engine):
    dynamics = NerdRollout(small_nerd, task, CONFIG.num_samples, compiled=False)
    record = run(task, dynamics, plant)
    assert set(record.on_plan_error) == {5}  # six model steps reach no other horizon
    assert record.on_plan_error[5].shape == (6,)
    assert record.plan_decisions.tolist() == [0]
    assert record.plans_predicted.shape == record.plans_engine.shape == (1, 7, 3)
    distance = (record.plans_predicted - record.plans_engine)[0].norm(dim=-1)
    assert float(distance[0]) == 0.0
    torch.testing.assert_close(record.on_plan_error[5][0], distance[5])
    median = record.summary["on_plan_error_median_m"]["5"]
    assert median == pytest.approx(float(record.on_plan_error[5].median()), abs=1e-5)


class Forgetting(NerdRollout):
    """Executes two steps, then Ctrl-C is pressed: after the plan was compared, before it is executed."""

    steps = 0

    def executed(self, state, control):
        self.steps += 1
        if self.steps == 3:
            raise KeyboardInterrupt
        super().executed(state, control)


def test_ctrl_c_returns_the_decisions_that_were_made(task, small_nerd, plant, tmp_path):
    dynamics = Forgetting(small_nerd, task, CONFIG.num_samples, compiled=False)
    record = run(task, dynamics, plant)
    assert record.outcome == record.summary["outcome"] == "interrupted"
    assert record.summary["decisions"] == 2
    assert record.states.shape == (3, 37)
    sizes = [record.controls, record.reward, record.score, record.held, record.on_plan_error[5]]
    assert [len(rows) for rows in sizes] == [2] * 5
    write_episode(record, None, tmp_path)
    assert {"result.json", "trajectory.safetensors", "report.html"} <= {p.name for p in tmp_path.iterdir()}


def test_ctrl_c_in_the_first_decision_returns_the_start(task, engine, plant, record):
    def press(*arguments):
        raise KeyboardInterrupt

    dynamics = MujocoRollout(task, threads=1)
    dynamics.executed = press
    early = run(task, dynamics, plant)
    assert early.outcome == "interrupted"
    assert torch.equal(early.states, record.states[:1])
    assert early.controls.shape == (0, 12)
    assert early.summary["decisions"] == 0


def test_ctrl_c_while_a_decision_is_shown_keeps_that_decision(task, engine, plant, record):
    def press(now):
        if now.decision == 4:
            raise KeyboardInterrupt

    stopped = run(task, engine, plant, on_decision=press)
    assert stopped.outcome == "interrupted"
    assert torch.equal(stopped.states, record.states[:5])


def test_progress_is_shown_after_every_decision(task, engine, plant):
    shown = []
    record = run(task, engine, plant, on_decision=shown.append)
    assert [now.decision for now in shown] == [1, 2, 3, 4, 5, 6]
    assert [str(now.outcome) for now in shown] == ["None"] * 5 + ["timeout"]
    assert torch.equal(torch.stack([now.state for now in shown]), record.states[1:])


class Breaking:
    """Stands still until the robot has settled and a third decision is executed, then gives NaN."""

    def __init__(self, task):
        self.state = torch.tensor(task.robot.home_state)[None]
        self.steps = 0

    def set_state(self, state):
        self.state = state.clone()

    def step(self, control):
        self.steps += 1
        if self.steps > 50 + 2:
            self.state = torch.full_like(self.state, math.nan)
        return self.state


def test_an_executed_state_that_is_not_finite_is_an_error_that_names_it(task, engine):
    with pytest.raises(ValueError, match="executed state: not finite after decision 3"):
        run(task, engine, Breaking(task))


def test_seeds_move_the_start_by_three_centimetres_and_five_degrees_at_most(task, plant):
    starts = torch.stack([settled_start(task, plant, seed) for seed in range(12)])
    assert torch.equal(settled_start(task, plant, 3), starts[3])
    assert torch.equal(plant.state[0], starts[3])
    assert len({float(x) for x in starts[:, 0]}) == 12
    assert starts[:, 0].abs().max() <= 0.03
    assert starts[:, 0].max() - starts[:, 0].min() > 0.03  # and they use that range
    yaw = torch.rad2deg(torch.atan2(*quat_to_matrix(starts[:, 3:7])[:, :2, 0].T.flip(0)))
    assert yaw.abs().max() <= 5.0 + 0.1  # the settled robot itself is turned by less than 0.1°
    assert yaw.max() - yaw.min() > 5.0
    # Nothing else differs, and the robot stands still.
    assert (starts[:, 1] == 0).all()
    assert (starts[:, 19:] == 0).all()
    assert torch.equal(starts[:, 7:19], starts[:1, 7:19].expand(12, -1))
    assert torch.equal(starts[:, 2], starts[:1, 2].expand(12))
    up = quat_to_matrix(starts[:, 3:7])[:, 2, 2]
    torch.testing.assert_close(up, up[:1].expand(12), atol=1e-6, rtol=0)
    lowest = task.points_world(starts)[:, :4, 2].amin(-1)
    assert ((lowest > 0.01) & (lowest < 0.03)).all()
