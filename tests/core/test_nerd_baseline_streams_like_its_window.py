"""Every streaming form of the baseline is its window pass, whatever was reset when."""

import pytest
import torch
from torch import nn

from nerd_core import NerdBaseline, NerdBaselineConfig
from nerd_core.baseline import PlainNerd, WindowCache
from nerd_core.cartpole import CartPole

BATCH, STEPS = 6, 60
SIZES = NerdBaselineConfig(width=24, heads=3, layers=3, block=12, head_hidden=16)
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def network(dtype, sizes=SIZES):
    torch.manual_seed(1)
    model = NerdBaseline(sizes, CartPole().robot())
    # Large enough for attention and positions to matter, unlike NeRD's start.
    for parameter in model.network.parameters():
        nn.init.normal_(parameter, mean=0.1, std=sizes.width**-0.5)
    return model.to(dtype).eval()


def random_frames(batch, steps, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    state = torch.randn(batch, steps, 4, generator=draw, dtype=torch.float64)
    control = torch.randn(batch, steps, 1, generator=draw, dtype=torch.float64)
    return state.to(dtype), control.to(dtype)


def stream(form, state, control, resets):
    cache, deltas = form.init_cache(len(state)), []
    for t in range(state.shape[1]):
        cache = cache.reset(resets[:, t])
        delta, cache = form.step(state[:, t], control[:, t], None, cache)
        deltas.append(delta)
    return torch.stack(deltas, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@torch.no_grad()
def test_every_form_equals_the_window_of_up_to_ten_frames_since_the_last_reset(dtype, tolerance):
    model = network(dtype)
    state, control = random_frames(BATCH, STEPS, dtype)
    resets = torch.rand(BATCH, STEPS, generator=torch.Generator().manual_seed(2)) < 0.06
    resets[0] = False
    expected = torch.empty_like(state)
    lengths = set()
    for row in range(BATCH):
        begin = 0
        for t in range(STEPS):
            begin = t if resets[row, t] else begin
            seen = slice(max(begin, t - 9), t + 1)
            lengths.add(seen.stop - seen.start)
            window = model(state[row : row + 1, seen], control[row : row + 1, seen])
            expected[row, t] = model.increment(state[row, t], window[0, -1])
    assert lengths == set(range(1, 11))
    for form in (model, PlainNerd(model), model.folded(), PlainNerd(model.folded())):
        streamed = stream(form, state, control, resets)
        assert float((streamed - expected).abs().max()) <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@torch.no_grad()
def test_the_form_for_full_windows_equals_the_general_one(dtype, tolerance):
    model = network(dtype)
    state, control = random_frames(BATCH, 25, dtype)
    cache = model.init_cache(BATCH)
    for t in range(10):
        _, cache = model.step(state[:, t], control[:, t], None, cache)
    fast = cache
    for t in range(10, 25):
        expected, cache = model.step(state[:, t], control[:, t], None, cache)
        found, fast = model.step(state[:, t], control[:, t], None, fast, full=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        assert all(torch.equal(a, b) for a, b in zip(fast, cache, strict=True))


@torch.no_grad()
def test_positions_and_nine_past_frames_matter_and_the_tenth_past_does_not():
    model = network(torch.float64)
    state, control = random_frames(1, 12, torch.float64)
    never = torch.zeros(1, 12, dtype=torch.bool)
    before = stream(model, state, control, never)[0, -1]

    def change_at(age):
        moved = control.clone()
        moved[0, -1 - age] += 1.0
        return float((stream(model, state, moved, never)[0, -1] - before).abs().max())

    assert all(change_at(age) > 1e-9 for age in range(10))
    assert change_at(10) == 0
    short = model.increment(state[0, -1], model(state[:, -9:], control[:, -9:])[0, -1])
    assert float((short - before).abs().max()) > 1e-9
    model.network.position.add_(torch.randn_like(model.network.position))
    assert float((stream(model, state, control, never)[0, -1] - before).abs().max()) > 1e-9


@torch.no_grad()
def test_resetting_one_world_changes_no_bit_of_the_others_and_forgets_a_nan():
    model = network(torch.float32)
    for form in (model, PlainNerd(model)):
        state, control = random_frames(4, 14, torch.float32)
        poisoned = state.clone()
        poisoned[2, 5] = torch.nan
        clean, dirty, fresh = form.init_cache(4), form.init_cache(4), form.init_cache(1)
        for t in range(14):
            if t == 6:
                dirty = dirty.reset(torch.tensor([False, False, True, False]))
            expected, clean = form.step(state[:, t], control[:, t], None, clean)
            found, dirty = form.step(poisoned[:, t], control[:, t], None, dirty)
            assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
            if t >= 6:
                alone, fresh = form.step(state[2:3, t], control[2:3, t], None, fresh)
                torch.testing.assert_close(found[2:3], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_one_history_forks_into_many_equal_ones():
    model = network(torch.float64)
    state, control = random_frames(1, 6, torch.float64)
    cache = model.init_cache(1)
    for t in range(5):
        _, cache = model.step(state[:, t], control[:, t], None, cache)
    single, _ = model.step(state[:, 5], control[:, 5], None, cache)
    many, _ = model.step(state[:, 5].expand(7, -1), control[:, 5].expand(7, -1), None, cache.expand(7))
    torch.testing.assert_close(many, single.expand(7, -1), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="expected 1 to expand"):
        cache.expand(7).expand(7)


@torch.no_grad()
def test_a_step_leaves_the_cache_that_it_was_given_as_it_was():
    model = network(torch.float64)
    state, control = random_frames(2, 11, torch.float64)
    cache = model.init_cache(2)
    for t in range(11):
        before = WindowCache(*(leaf.clone() for leaf in cache))
        _, after = model.step(state[:, t], control[:, t], None, cache)
        assert all(torch.equal(a, b) for a, b in zip(cache, before, strict=True))
        cache = after


class Step(nn.Module):
    def __init__(self, model, full):
        super().__init__()
        self.model, self.full = model, full

    def forward(self, state, control, cache):
        return self.model.step(state, control, None, cache, full=self.full)


@pytest.mark.parametrize("full", [False, True])
@torch.no_grad()
def test_the_step_exports_with_an_open_batch_size(full):
    model = network(torch.float64).folded()
    state, control = random_frames(5, 13, torch.float64)
    caches = [model.init_cache(5)]
    for t in range(12):
        caches.append(model.step(state[:, t], control[:, t], None, caches[-1])[1])
    three = (state[:3, 0], control[:3, 0], WindowCache(*(leaf[:3] for leaf in caches[10])))
    rows = torch.export.Dim("rows", min=2)
    shapes = ({0: rows}, {0: rows}, WindowCache({0: rows}, {0: rows}))
    exported = torch.export.export(Step(model, full), three, dynamic_shapes=shapes).module()
    for t in (10, 12) if full else (0, 4, 9, 12):
        found, after = exported(state[:, t], control[:, t], caches[t])
        expected, cache = model.step(state[:, t], control[:, t], None, caches[t])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(after, cache, strict=True))
