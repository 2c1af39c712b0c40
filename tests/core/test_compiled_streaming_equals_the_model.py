"""Every form of a streaming step gives the numbers of the model's own step, and the fast ones work in place."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig, prefill, streaming
from nerd_core.cartpole import CartPole
from nerd_core.compiled import can_compile
from nerd_core.inplace import InPlaceStep, PureStep
from nerd_core.streaming import CompiledStep, EagerStep, GraphedStep, compile_streaming

ROBOT = CartPole().robot()
B = 8


class Wind(nn.Module):
    """A context encoder that passes two numbers on."""

    out_size = 2

    def forward(self, context):
        return context["wind"]


def flash(spans=(2, 3), encoder=None):
    """A small model whose every weight matters."""
    torch.manual_seed(1)
    model = FlashNerd(FlashNerdConfig(width=16, heads=2, spans=spans, hidden=24, readout_hidden=8), ROBOT, encoder)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def baseline():
    torch.manual_seed(1)
    return NerdBaseline(NerdBaselineConfig(width=16, heads=2, layers=2, window=4, block=4, head_hidden=8), ROBOT)


class Integrator(nn.Module):
    """The least that a streaming step can be: the increment is a running sum of the states."""

    robot = ROBOT

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def init_cache(self, n):
        return {"sum": torch.zeros(n, 4)}

    def step(self, state, control, context, cache):
        total = cache["sum"] + self.gain * state
        return total, {"sum": total}


@pytest.fixture
def uncompiled(monkeypatch):
    """What a machine without a C++ compiler does: the same function, the same views."""
    monkeypatch.setattr(streaming, "can_compile", lambda: False)


def largest_difference(model, step, frames, *, context=False, resets=True):
    """Largest difference of increments from the model's own step, over a stream with random resets."""
    draw = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    mine, theirs = model.init_cache(B), step.init_cache(B)
    worst = 0.0
    for t in range(frames):
        state, control = (torch.randn(B, n, generator=draw, dtype=dtype) for n in (4, 1))
        surroundings = {"wind": torch.randn(B, 2, generator=draw, dtype=dtype)} if context else None
        with torch.no_grad():
            expected, mine = model.step(state, control, surroundings, mine)
        found, theirs = step.step(state, control, surroundings, theirs)
        worst = max(worst, float((found - expected).abs().max()))
        if resets and t % 5 == 4:
            again = torch.rand(B, generator=draw) < 0.3
            mine, theirs = mine.reset(again), theirs.reset(again)
    assert all(torch.equal(a, b) for a, b in zip(mine[-2:], theirs[-2:], strict=True) if not a.is_floating_point())
    return worst


@pytest.mark.parametrize(("spans", "chunk"), [((1,), B), ((2, 2), 4), ((2, 5, 3), 4)])
def test_the_ring_in_lag_order_equals_the_model_over_200_frames_with_resets(uncompiled, spans, chunk):
    model = flash(spans).double()
    assert largest_difference(model, CompiledStep(model, B, threads=1, chunk=chunk), 200) <= 1e-12


def test_any_model_is_stepped_in_place(uncompiled):
    model = baseline().double()
    assert largest_difference(model, CompiledStep(model, B, threads=1, chunk=4), 60) <= 1e-12


def test_a_model_that_the_roofline_does_not_know_is_taken_too(uncompiled):
    step, cache = compile_streaming(Integrator(), B), Integrator().init_cache(B)
    for given, expected in ((1.0, 1.0), (2.0, 3.0)):
        delta, cache = step.step(torch.full((B, 4), given), torch.zeros(B, 1), None, cache)
        assert delta.eq(expected).all()


@pytest.mark.parametrize("make", [flash, baseline])
def test_the_static_buffers_of_a_graph_hold_the_model_s_numbers(make):
    model = make().double()
    step = GraphedStep(model, B)
    assert largest_difference(model, step, 60) <= 1e-12
    _, cache = step.step(torch.zeros(B, 4), torch.zeros(B, 1), None, step.init_cache(B))
    delta, after = step.step(torch.ones(B, 4), torch.ones(B, 1), None, cache)
    again, _ = step.step(torch.ones(B, 4), torch.ones(B, 1), None, after)
    assert after is cache
    assert again is delta


def test_surroundings_reach_every_form(uncompiled):
    model, wind = flash(encoder=Wind()).double(), {"wind": torch.zeros(B, 2, dtype=torch.float64)}
    forms = (
        CompiledStep(model, B, threads=1, chunk=4, context=wind),
        GraphedStep(model, B, context=wind),
        compile_streaming(model, B, form="eager", context=wind),
    )
    for step in forms:
        assert largest_difference(model, step, 20, context=True) <= 1e-12


def test_a_step_writes_one_slot_of_each_ring_and_copies_nothing(uncompiled):
    model = flash((2, 3))
    step = CompiledStep(model, B, threads=1, chunk=B)
    cache = model.init_cache(B)
    where = [leaf.data_ptr() for leaf in (*cache.keys, *cache.values, cache.valid)]
    for t in range(7):
        before = [ring.clone() for ring in (*cache.keys, *cache.values)]
        _, cache = step.step(torch.randn(B, 4), torch.randn(B, 1), None, cache)
        for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
            changed = [i for i in range(new.shape[1]) if not torch.equal(old[:, i], new[:, i])]
            assert changed == [t % new.shape[1]]
    assert [leaf.data_ptr() for leaf in (*cache.keys, *cache.values, cache.valid)] == where
    assert int(cache.cursor) == 7


@pytest.mark.parametrize("make", [flash, baseline])
def test_a_history_is_forked_into_the_rows_of_a_compiled_step(uncompiled, make):
    model = make().double()
    states, controls = torch.randn(1, 9, 4).double(), torch.randn(1, 9, 1).double()
    history = prefill(EagerStep(model), states, controls)
    step = CompiledStep(model, B, threads=1, chunk=4, full=True)
    state, control = torch.randn(B, 4).double(), torch.randn(B, 1).double()
    expected, _ = model.step(state, control, None, history.expand(B))
    found, _ = step.step(state, control, None, history.expand(B))
    torch.testing.assert_close(found, expected.detach(), atol=1e-12, rtol=0)
    # The fork took nothing from the history it came from.
    again, _ = step.step(state, control, None, history.expand(B))
    assert torch.equal(again, found)


def test_rows_of_another_batch_are_refused(uncompiled):
    model = flash()
    state, control = torch.zeros(B, 4), torch.zeros(B, 1)
    for step in (CompiledStep(model, B, threads=1, chunk=4), GraphedStep(model, B)):
        with pytest.raises(ValueError, match=r"cache.*expected"):
            step.step(state, control, None, model.init_cache(1))
        with pytest.raises(ValueError, match=r"state.*expected"):
            step.step(state[:1], control[:1], None, model.init_cache(B))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch is 0, expected at least 1"),
        ({"batch": 8, "threads": 0}, "threads is 0, expected at least 1"),
        ({"batch": 8, "chunk": 3}, "chunk is 3, expected a divisor"),
        ({"batch": 8, "form": "fast"}, "form is 'fast', expected one of eager, compiled"),
        ({"batch": 8, "precision": "int8"}, "precision is 'int8', expected one of"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_is_compiled(settings, message):
    with pytest.raises(ValueError, match=message):
        compile_streaming(flash(), **settings)


def test_a_context_encoder_needs_an_example():
    with pytest.raises(ValueError, match="context is None"):
        compile_streaming(flash(encoder=Wind()), B)


@pytest.mark.parametrize("batch", [1, 7, 16, 1024, 16_384, 10_007])
@pytest.mark.parametrize("make", [flash, baseline])
def test_chunks_divide_the_batch(make, batch):
    model = make()
    for threads in (1, 2):
        rows = streaming._chunk_rows(model, batch, threads)
        assert batch % rows == 0
        assert rows == batch or rows >= streaming.MIN_CHUNK


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(), reason="no C++ compiler on this machine")
@pytest.mark.parametrize("make", [flash, baseline])
def test_a_compiled_step_equals_the_model_over_200_frames_with_resets(monkeypatch, tmp_path, make):
    monkeypatch.setenv("NERD_CACHE", str(tmp_path))
    model = make()
    assert largest_difference(model, compile_streaming(model, B, threads=1, chunk=4), 200) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("make", [flash, baseline])
def test_what_a_gpu_captures_is_one_graph_without_breaks(make):
    model = make().requires_grad_(False)
    leaves, structure = pytree.tree_flatten(model.init_cache(B))
    step = InPlaceStep(PureStep(model, bfloat16=False, full=True), structure)
    whole = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    state, control = torch.randn(B, 4), torch.randn(B, 1)
    found = whole(state, control, {}, leaves)
    again, _ = pytree.tree_flatten(model.init_cache(B))
    torch.testing.assert_close(found, step(state, control, {}, again))
    assert all(torch.equal(a, b) for a, b in zip(leaves, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [flash, baseline])
def test_a_captured_graph_equals_the_model_and_allocates_nothing(make):
    model = make().cuda()
    step = compile_streaming(model, B)
    assert isinstance(step, GraphedStep)
    state, control = torch.randn(B, 4, device="cuda"), torch.randn(B, 1, device="cuda")
    mine, theirs = model.init_cache(B), step.init_cache(B)
    for _ in range(50):
        with torch.no_grad():
            expected, mine = model.step(state, control, None, mine)
        found, theirs = step.step(state, control, None, theirs)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    held = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        _, theirs = step.step(state, control, None, theirs)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
