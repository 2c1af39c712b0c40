"""Planner in the loop: rollouts around the plans of an episode, proposed to the recorder."""

import pytest
import torch

from nerd_contact import PrimitiveCollider
from nerd_coupling.recording import RandomTargets
from nerd_coupling.terrain import scene
from nerd_mpc.dial import DialConfig
from nerd_mpc.dynamics import MujocoRollout
from nerd_mpc.platform import GO2_RANGE, PlatformTask
from nerd_mpc.proposals import PlannerRollouts, PlannerRolloutsConfig

PLAN = DialConfig(num_samples=8, horizon=5, num_knots=3, iterations=1, first_iterations=1)


class Watched(MujocoRollout):
    """Remembers what was executed."""

    def __init__(self, task, seen):
        super().__init__(task, threads=1)
        self._seen = seen

    def executed(self, state, control):
        self._seen.append((state, control))


@pytest.fixture
def propose(go2):
    def build(seen=None, **settings):
        settings = {"decisions": 2, "rows": 6, "plan": PLAN, **settings}
        return PlannerRollouts(
            PlannerRolloutsConfig(**settings),
            make_task=lambda height: PlatformTask(go2, height),
            make_dynamics=lambda task: Watched(task, [] if seen is None else seen),
            label="mujoco",
            stances=RandomTargets(go2, GO2_RANGE).stances,
        )

    return build


def drawn(proposal, seed=0):
    return list(proposal(torch.Generator().manual_seed(seed)))


def test_every_decision_of_an_episode_gives_its_rows(propose):
    batches = drawn(propose(episodes=2))
    assert len(batches) == 2
    for batch in batches:
        assert batch.state.shape == (2 * 6, 37)
        assert batch.control.shape == (2 * 6, 5, 12)
        assert batch.state.isfinite().all()
    assert batches[0].terrain != batches[1].terrain


def test_controls_stay_within_the_planner_s_range(propose):
    low, high = GO2_RANGE.unbind(-1)
    for batch in drawn(propose(episodes=2), seed=1):
        assert ((batch.control >= low - 1e-6) & (batch.control <= high + 1e-6)).all()


def test_heights_come_from_the_range(propose):
    for seed in range(3):
        (batch,) = drawn(propose(heights=(0.1, 0.12), decisions=1), seed)
        assert 0.1 <= batch.terrain.boxes[0].top <= 0.12


@pytest.mark.parametrize("stance_fraction", [0.0, 1.0])
def test_one_generator_is_one_batch(propose, stance_fraction):
    (first,), (again,), (other,) = (drawn(propose(stance_fraction=stance_fraction), seed) for seed in (0, 0, 1))
    assert first.terrain == again.terrain
    assert torch.equal(first.state, again.state)
    assert torch.equal(first.control, again.control)
    assert not torch.equal(first.state, other.state)


def test_two_thirds_start_where_the_robot_is_and_one_third_beside_it(propose):
    seen = []
    (batch,) = drawn(propose(seen, stance_fraction=0.0))
    assert len(seen) == 2
    for (executed, _), rows in zip(seen, batch.state.split(6), strict=True):
        assert torch.equal(rows[:4], executed.expand(4, -1))
        assert (rows[4:] != executed).any(-1).all()


def test_disturbed_starts_are_outside_of_the_ground_and_the_deck(propose, go2):
    collider = PrimitiveCollider(go2.spec, go2.probes, margin=5.0)
    for seed in range(3):
        (batch,) = drawn(propose(stance_fraction=1.0, decisions=1, rows=12), seed)
        gap = collider(batch.state, {k: v.expand(12, *v.shape[1:]) for k, v in scene(batch.terrain).items()}).gap
        assert gap.min() > -0.02  # what the recorder accepts


def test_settings_tell_proposals_apart(propose):
    assert propose().settings() == propose().settings()
    assert propose().settings() != propose(rows=9).settings()
    assert propose().settings()["dynamics"] == "mujoco"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decisions": 0}, "decisions is 0"),
        ({"rows": 2}, "rows is 2"),
        ({"episodes": 0}, "episodes is 0"),
        ({"stance_fraction": 1.5}, "stance_fraction is 1.5"),
        ({"heights": (0.3, 0.1)}, "heights is"),
        ({"plan": DialConfig(num_samples=3)}, "plan.num_samples is 3"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        PlannerRolloutsConfig(**settings)
