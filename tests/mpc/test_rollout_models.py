"""Rollout models: one face, the same numbers however rows are padded, compiled or remembered."""

from functools import partial

import pytest
import torch

from nerd_core import prefill, rollout
from nerd_core.compiled import can_compile, flat_step
from nerd_coupling.terrain import scene
from nerd_mpc import dynamics
from nerd_mpc.dynamics import MjWarpRollout, MujocoRollout, NerdRollout
from nerd_mpc.platform import PlatformTask

SAMPLES, HORIZON = 6, 4


@pytest.fixture(scope="module")
def task(go2):
    return PlatformTask(go2, 0.14)


@pytest.fixture(scope="module")
def state(go2):
    """Fore feet just before the deck, so that what stands there matters."""
    state = torch.tensor(go2.home_state)
    state[0] = 0.72
    return state


@pytest.fixture(scope="module")
def action(go2):
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.rand(SAMPLES, HORIZON, go2.spec.nu, generator=generator) - 1


@pytest.fixture(scope="module")
def nerd(small_nerd, task):
    return NerdRollout(small_nerd, task, SAMPLES, compiled=False)


@pytest.fixture(autouse=True)
def forgetful(nerd):
    nerd.begin()


def history(task, state, steps=5):
    """Executed states (steps, n) and controls (steps, nu), before ``state``."""
    generator = torch.Generator().manual_seed(1)
    states = state + 0.05 * torch.randn(steps, len(state), generator=generator)
    states[:, 3:7] /= states[:, 3:7].norm(dim=-1, keepdim=True)
    controls = torch.tensor(task.robot.home_ctrl) + 0.2 * torch.randn(steps, 12, generator=generator)
    return states, controls


def test_a_prediction_is_the_core_s_rollout(nerd, small_nerd, task, state, action):
    observe = partial(small_nerd.context_encoder.observe, scene=scene(task.terrain))
    expected = rollout(small_nerd, state.expand(SAMPLES, -1), task.to_control(action), observe=observe)
    found = nerd.predict(state, action)
    assert found.shape == (SAMPLES, HORIZON + 1, 37)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert (found[:, -1] - state).abs().max() > 1e-2  # the model does something


def test_scores_are_the_rewards_of_the_predicted_states(nerd, task, state, action):
    scores = nerd.score(state, action)
    assert scores.shape == (SAMPLES, HORIZON)
    torch.testing.assert_close(scores, task.reward(nerd.predict(state, action)[:, 1:]))


def test_what_was_executed_is_the_history_of_every_plan(nerd, small_nerd, task, state, action):
    without = nerd.predict(state, action)
    states, controls = history(task, state)
    for now, control in zip(states, controls, strict=True):
        nerd.executed(now, control)
    found = nerd.predict(state, action)
    observe = partial(small_nerd.context_encoder.observe, scene=scene(task.terrain))
    cache = prefill(small_nerd, states[None], controls[None], observe=observe).expand(SAMPLES)
    expected = rollout(small_nerd, state.expand(SAMPLES, -1), task.to_control(action), observe=observe, cache=cache)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(found, without, atol=1e-4)
    assert torch.equal(nerd.predict(state, action), found)  # planning leaves no trace in the history
    nerd.begin()
    assert torch.equal(nerd.predict(state, action), without)


def test_fewer_rows_than_samples_are_padded_and_come_back_alone(nerd, state, action):
    whole = nerd.predict(state, action)
    for rows in (1, 2, 5):
        part = nerd.predict(state, action[:rows])
        assert part.shape[0] == rows
        torch.testing.assert_close(part, whole[:rows], atol=1e-6, rtol=1e-6)


def test_whatever_is_compiled_gets_one_size_and_the_wanted_threads(monkeypatch, nerd, small_nerd, task, state, action):
    seen = []

    def uncompiled(step, example, *, threads):
        flat = flat_step(step, example)

        def run(leaves):
            seen.append((threads, [tuple(leaf.shape) for leaf in leaves]))
            return flat(leaves)

        return run

    monkeypatch.setattr(dynamics, "compile_step", uncompiled)
    other = NerdRollout(small_nerd, task, SAMPLES, compiled=True, threads=3)
    for rows in (1, 4, SAMPLES):
        assert torch.equal(other.predict(state, action[:rows]), nerd.predict(state, action[:rows]))
    assert len(seen) == 3 * HORIZON
    assert all(call == seen[0] for call in seen)
    assert seen[0][0] == 3


def test_moved_to_another_deck_it_equals_one_made_for_that_deck(go2, small_nerd, task, state, action):
    high = PlatformTask(go2, 0.26)
    moved, fresh = (NerdRollout(small_nerd, t, SAMPLES, compiled=False) for t in (task, high))
    before = moved.predict(state, action)
    moved.retarget(high)
    assert torch.equal(moved.predict(state, action), fresh.predict(state, action))
    assert torch.equal(moved.score(state, action), fresh.score(state, action))
    assert not torch.equal(before, moved.predict(state, action))


def test_bfloat16_products_stay_near_float32(nerd, small_nerd, task, state, action):
    rough = NerdRollout(small_nerd, task, SAMPLES, compiled=False, precision="bfloat16")
    found, exact = rough.predict(state, action), nerd.predict(state, action)
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    # Eight bits of mantissa on increments that are a few per cent of these states.
    torch.testing.assert_close(found[..., :19], exact[..., :19], atol=2e-2, rtol=0)


def test_both_engines_agree_over_a_few_steps(task, go2, action):
    state = torch.tensor(go2.home_state)
    one = MujocoRollout(task, threads=1)
    other = MjWarpRollout(task, SAMPLES)
    plans = 0.3 * action + task.to_action(torch.tensor(go2.home_ctrl))
    a, b = one.predict(state, plans), other.predict(state, plans)
    assert a.shape == b.shape == (SAMPLES, HORIZON + 1, 37)
    # Two implementations in two precisions, each solver stopped after 10 iterations.
    torch.testing.assert_close(a[..., :19], b[..., :19], atol=2e-3, rtol=0)
    assert (a[:, -1] - state).abs().max() > 0.1
    torch.testing.assert_close(one.score(state, plans), other.score(state, plans), atol=2e-2, rtol=0)
    torch.testing.assert_close(other.predict(state, plans[:2]), b[:2])


@pytest.mark.parametrize("rows", [0, SAMPLES + 1, SAMPLES + 5])
def test_more_rows_than_samples_are_refused(nerd, task, state, action, rows):
    many = action[:1].expand(rows, -1, -1)
    for model in (nerd, MjWarpRollout(task, SAMPLES)):
        with pytest.raises(ValueError, match=rf"action has {rows} rows.*num_samples \({SAMPLES}\)"):
            model.predict(state, many)


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(), reason="no C++ compiler on this machine")
def test_a_compiled_step_gives_the_eager_states_and_is_compiled_once(
    monkeypatch, tmp_path, go2, nerd, small_nerd, task, state, action
):
    monkeypatch.setenv("NERD_CACHE", str(tmp_path))
    fast = NerdRollout(small_nerd, task, SAMPLES, compiled=True, threads=2)
    packages = list(tmp_path.iterdir())
    assert [p.suffix for p in packages] == [".pt2"]
    for model in (fast, nerd):
        for now, control in zip(*history(task, state), strict=True):
            model.executed(now, control)
    # The same float32 operations in another order, over four steps: a few units in the last place each.
    for rows in (1, 5, SAMPLES):
        found, expected = fast.predict(state, action[:rows]), nerd.predict(state, action[:rows])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(fast.score(state, action), nerd.score(state, action), atol=2e-5, rtol=1e-5)
    # Goal and scene are inputs: another deck needs no other package.
    high = PlatformTask(go2, 0.26)
    written = packages[0].stat().st_mtime_ns
    again = NerdRollout(small_nerd, high, SAMPLES, compiled=True, threads=2)
    assert list(tmp_path.iterdir()) == packages
    assert packages[0].stat().st_mtime_ns == written
    fast.retarget(high)
    fast.begin()
    torch.testing.assert_close(fast.predict(state, action), again.predict(state, action))
    eager = NerdRollout(small_nerd, high, SAMPLES, compiled=False)
    torch.testing.assert_close(again.predict(state, action), eager.predict(state, action), atol=2e-5, rtol=1e-5)
