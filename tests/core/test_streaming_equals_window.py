"""The cached step and the whole-window pass are the same function."""

import itertools

import pytest
import torch

from nerd_core import Body, FlashNerd, FlashNerdConfig, Joint, RobotSpec

BATCH, STEPS = 8, 200


def quadruped() -> RobotSpec:
    legs = 12
    return RobotSpec(
        name="twelve-hinges",
        floating=True,
        bodies=(
            Body(name="base", parent=-1),
            *(Body(name=f"link{i}", parent=0) for i in range(legs)),
        ),
        joints=tuple(
            Joint(name=f"hinge{i}", kind="hinge", body=i + 1, axis=(0.0, 1.0, 0.0), range=(-2.0, 2.0))
            for i in range(legs)
        ),
        control="position",
        actuated=tuple(range(legs)),
        ctrl_range=((-2.0, 2.0),) * legs,
        effort_limit=(20.0,) * legs,
        kp=(40.0,) * legs,
        kd=(1.0,) * legs,
        timestep=0.005,
        substeps=4,
    )


def random_frames(robot, batch, steps, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(batch, steps, robot.state_size, generator=generator, dtype=torch.float64)
    state[..., 3:7] /= state[..., 3:7].norm(dim=-1, keepdim=True)
    control = torch.randn(batch, steps, robot.nu, generator=generator, dtype=torch.float64)
    return state.to(dtype), control.to(dtype)


def network(spans, dtype, seed=1, **sizes):
    torch.manual_seed(seed)
    model = FlashNerd(FlashNerdConfig(spans=spans, **sizes), quadruped())
    # A zero last layer would hide everything that the blocks do.
    torch.nn.init.normal_(model.readout_out.weight, std=0.1)
    for block in model.blocks:
        torch.nn.init.normal_(block.lag_bias)
    return model.to(dtype).eval()


@pytest.mark.parametrize("spans", [(3, 3), (4, 4, 4), (2, 5, 3), (1, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@torch.no_grad()
def test_a_stream_with_random_resets_equals_the_window_since_each_reset(spans, dtype, tolerance):
    model = network(spans, dtype)
    state, control = random_frames(model.robot, BATCH, STEPS, dtype)
    resets = torch.rand(BATCH, STEPS, generator=torch.Generator().manual_seed(2)) < 0.05
    cache, worst = model.init_cache(BATCH), 0.0
    begins = [0] * BATCH
    streamed = []
    for t in range(STEPS):
        cache = cache.reset(resets[:, t])
        delta, cache = model.step(state[:, t], control[:, t], None, cache)
        streamed.append(delta)
    streamed = torch.stack(streamed, 1)
    for row in range(BATCH):
        begins = [0, *resets[row].nonzero().flatten().tolist(), STEPS]
        for first, end in itertools.pairwise(begins):
            if first == end:
                continue
            part = slice(first, end)
            window = model(state[row : row + 1, part], control[row : row + 1, part])
            whole = model.increment(state[row : row + 1, part], window)
            worst = max(worst, float((whole[0] - streamed[row, part]).abs().max()))
    assert worst <= tolerance


@pytest.mark.parametrize("spans", [(3, 3), (4, 4, 4), (2, 5, 3), (1,)])
@torch.no_grad()
def test_the_receptive_field_is_one_plus_the_sum_of_spans_less_one(spans):
    model = network(spans, torch.float64)
    field = model.config.receptive_field
    assert field == 1 + sum(s - 1 for s in spans)
    state, control = random_frames(model.robot, 1, field + 4, torch.float64)
    before = model(state, control)[0, -1]

    def change_at(age: int) -> float:
        moved = control.clone()
        moved[0, -1 - age] += 1.0
        return float((model(state, moved)[0, -1] - before).abs().max())

    assert change_at(field - 1) > 0
    assert change_at(field) == 0


@torch.no_grad()
def test_resetting_one_world_changes_no_bit_of_the_others_and_forgets_a_nan():
    model = network((4, 4), torch.float32)
    state, control = random_frames(model.robot, 4, 12, torch.float32)
    poisoned = state.clone()
    poisoned[2, 5] = torch.nan
    clean, dirty = model.init_cache(4), model.init_cache(4)
    for t in range(12):
        if t == 6:
            dirty = dirty.reset(torch.tensor([False, False, True, False]))
            fresh = model.init_cache(1)
        expected, clean = model.step(state[:, t], control[:, t], None, clean)
        found, dirty = model.step(poisoned[:, t], control[:, t], None, dirty)
        others = [0, 1, 3]
        assert torch.equal(found[others], expected[others])
        if t >= 6:
            alone, fresh = model.step(state[2:3, t], control[2:3, t], None, fresh)
            torch.testing.assert_close(found[2:3], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_phase_of_the_ring_does_not_matter():
    model = network((3, 5), torch.float64)
    state, control = random_frames(model.robot, 2, 9, torch.float64)
    everyone = torch.ones(2, dtype=torch.bool)
    results = []
    for phase in range(5):
        cache = model.init_cache(2)
        for t in range(phase):
            _, cache = model.step(state[:, t], control[:, t], None, cache)
        cache = cache.reset(everyone)
        for t in range(9):
            delta, cache = model.step(state[:, t], control[:, t], None, cache)
        results.append(delta)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_one_history_forks_into_many_equal_ones():
    model = network((3, 3), torch.float64)
    state, control = random_frames(model.robot, 1, 6, torch.float64)
    cache = model.init_cache(1)
    for t in range(5):
        _, cache = model.step(state[:, t], control[:, t], None, cache)
    single, _ = model.step(state[:, 5], control[:, 5], None, cache)
    many, _ = model.step(state[:, 5].expand(7, -1), control[:, 5].expand(7, -1), None, cache.expand(7))
    torch.testing.assert_close(many, single.expand(7, -1), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="expected 1 to expand"):
        cache.expand(7).expand(7)


def test_sizes_that_cannot_work_are_refused():
    for wrong in ({"spans": ()}, {"spans": (3, 0)}, {"width": 100, "heads": 3}, {"hidden": 0}):
        with pytest.raises(ValueError, match="expected"):
            FlashNerdConfig(**wrong)
