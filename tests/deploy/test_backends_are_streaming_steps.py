import tracemalloc

import numpy as np
import pytest
import torch

from nerd_core import prefill, rollout
from nerd_core.artifact import load_model
from nerd_deploy import OnnxStep, ServedStep, open_backend
from nerd_deploy.scenario import draw_scenario


@pytest.fixture
def walk(walker_nerd):
    """The walker's model, its artifact as a streaming step, a scenario, and a function that sees contacts."""
    model, _ = load_model(walker_nerd[0])
    scenario = draw_scenario(model, 5, 12)

    def observe(state):
        scene = {name: value[:1].expand(len(state), *value.shape[1:]) for name, value in scenario.scene.items()}
        return model.context_encoder.observe(state, scene)

    return model, ServedStep(walker_nerd[1]), scenario, observe


@torch.no_grad()
def test_the_rollout_of_nerd_core_takes_an_artifact_for_a_model(walk):
    model, served, scenario, observe = walk
    truth = rollout(model, scenario.start, scenario.controls, observe=observe)
    found = rollout(served, scenario.start, scenario.controls, observe=observe)
    np.testing.assert_allclose(found, truth, atol=5e-6)
    assert served.robot == model.robot


@torch.no_grad()
def test_a_known_past_forks_as_in_torch(walk):
    model, served, scenario, observe = walk
    states = rollout(model, scenario.start, scenario.controls, observe=observe)[:1, :7]
    futures = []
    for step in (model, served):
        past = prefill(step, states[:, :6], scenario.controls[:1, :6], observe=observe)
        start, plans = states[:, 6].expand(5, -1), scenario.controls[:, 6:]
        futures.append(rollout(step, start, plans, observe=observe, cache=past.expand(5)))
    np.testing.assert_allclose(futures[1], futures[0], atol=5e-6)
    alone = rollout(served, states[:, 6].expand(5, -1), scenario.controls[:, 6:], observe=observe)
    assert (alone - futures[1]).abs().max() > 1e-4


@torch.no_grad()
def test_a_reset_gives_another_history_and_leaves_the_one_it_came_from(walk):
    model, served, scenario, observe = walk
    mask = torch.tensor([True, False, False, True, False])
    states, controls = scenario.start[:, None].expand(-1, 4, -1), scenario.controls[:, :4]
    found = []
    for step in (model, served):
        cache = prefill(step, states, controls, observe=observe)
        other = cache.reset(mask)
        now = (scenario.start, scenario.controls[:, 4], observe(scenario.start))
        found.append((step.step(*now, cache)[0], step.step(*now, other)[0]))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, atol=5e-6)
    changed = (found[1][0] - found[1][1]).abs().amax(-1)
    assert (changed[mask] > 2e-5).all()
    assert (changed[~mask] == 0).all()


def test_histories_of_one_step_do_not_mix(walk):
    _, served, scenario, observe = walk
    one, other = served.init_cache(5), served.init_cache(5)
    now = (scenario.start, scenario.controls[:, 0], observe(scenario.start))
    first, one = served.step(*now, one)
    for _ in range(3):
        _, one = served.step(*now, one)
    np.testing.assert_array_equal(served.step(*now, other)[0], first)
    with pytest.raises(ValueError, match=r"state is float32 of shape \(5, 37\), expected float32 of shape \(2, 37\)"):
        served.step(*now, served.init_cache(2))


def test_another_robot_is_refused(cartpole_nerd, walker_nerd):
    robot = load_model(walker_nerd[0])[0].robot
    assert ServedStep(walker_nerd[1], robot=robot).robot == robot
    with pytest.raises(ValueError, match="made for another robot: "):
        ServedStep(cartpole_nerd[1], robot=robot)


def test_a_backend_that_does_not_load_is_named_and_never_replaced(cartpole_nerd):
    import onnxruntime

    offered = onnxruntime.get_available_providers()
    for name, provider in (("ort-cuda", "CUDAExecutionProvider"), ("ort-tensorrt", "TensorrtExecutionProvider")):
        if provider in offered:
            continue
        with pytest.raises(ValueError, match=f"backend is '{name}', but {provider} does not load here"):
            open_backend(cartpole_nerd[1], name)
        with pytest.raises(ValueError, match=provider):
            OnnxStep(cartpole_nerd[1], provider=provider)
    with pytest.raises(ValueError, match="backend is 'tensorrt', expected one of ort-cpu, ort-cuda, ort-tensorrt"):
        open_backend(cartpole_nerd[1], "tensorrt")
    with pytest.raises(ValueError, match="threads is 0, expected at least 1"):
        open_backend(cartpole_nerd[1], threads=0)


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_runtime_that_falls_back_is_caught(cartpole_nerd, monkeypatch):
    import onnxruntime

    # As onnxruntime does where the provider's library is there and a library that it needs is not.
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with pytest.raises(ValueError, match="'CUDAExecutionProvider', onnxruntime fell back to 'CPUExecutionProvider'"):
        open_backend(cartpole_nerd[1], "ort-cuda")


def test_a_step_allocates_next_to_nothing(walker_nerd):
    worlds = 512
    step = OnnxStep(walker_nerd[1], worlds)
    blank = {t["name"]: np.zeros([worlds, *t["shape"][1:]], t["dtype"]) for t in step.manifest["inputs"] if t["shape"]}
    state, control = blank["state"], blank["control"]
    state[:, 3] = 1
    out = np.empty_like(state)
    ring = next(value for name, value in blank.items() if name.startswith("keys_"))
    step.step(state, control, blank, out=out)
    tracemalloc.start()
    for _ in range(5):
        step.step(state, control, blank, out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert min(ring.nbytes, state.nbytes, ring[:, 0].nbytes) > 30_000
    assert peak < 10_000


def test_a_row_that_is_not_finite_leaves_the_others_as_they_were(cartpole_nerd):
    draw = np.random.default_rng(0)
    states = draw.normal(0, 0.3, (6, 7, 4)).astype(np.float32)
    control = np.zeros((7, 1), np.float32)
    sound, spoiled = OnnxStep(cartpole_nerd[1], 7), OnnxStep(cartpole_nerd[1], 7)
    for t, state in enumerate(states):
        other = state.copy()
        if t == 2:
            other[3] = np.nan
        if t == 4:
            spoiled.reset([3])
        a, b = sound.step(state, control), spoiled.step(other, control)
        rest = np.arange(7) != 3
        np.testing.assert_array_equal(a[rest], b[rest])
        assert np.isfinite(b[3]).all() == (t not in (2, 3))
