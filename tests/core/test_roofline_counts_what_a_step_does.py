"""Roofline: FLOPs as torch counts them, bytes as the tensors hold them, bounds by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig
from nerd_core.cartpole import CartPole
from nerd_core.roofline import (
    Machine,
    StepCost,
    cache_bytes,
    live_bytes,
    measure_machine,
    measured_cache_bytes,
    step_cost,
)

ROBOT = CartPole().robot()
MODELS = [
    FlashNerd(FlashNerdConfig(), ROBOT),
    FlashNerd(FlashNerdConfig(width=24, heads=3, spans=(2, 5), hidden=40, readout_hidden=10), ROBOT),
    NerdBaseline(NerdBaselineConfig(), ROBOT),
    NerdBaseline(NerdBaselineConfig(width=24, heads=3, layers=3, window=7, head_hidden=10), ROBOT),
]


@pytest.mark.parametrize("model", MODELS)
def test_matrix_products_are_those_that_torch_counts(model):
    batch = 3
    options, step = {}, model.step
    if isinstance(model, NerdBaseline):
        options, step = {"full": True}, model.folded().step  # the form that is measured
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        step(torch.zeros(batch, 4), torch.zeros(batch, 1), None, model.init_cache(batch), **options)
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    assert products == batch * step_cost(model).matmul_flops


def test_the_optimized_baseline_does_most_of_the_published_work():
    """NeRD's CartPole network costs 54 MFLOP for its 10 frames; the last block's newest query alone saves some."""
    flops = step_cost(NerdBaseline(NerdBaselineConfig(), ROBOT)).matmul_flops
    by_hand = 10 * (2 * 6 * 192 + 5 * 24 * 192**2 + 4 * 192**2) + 20 * 192**2 + 2 * 192 * 64 + 2 * 64 * 4
    assert flops == by_hand
    assert 5 / 6 * 54e6 < flops < 54e6


def test_attention_by_hand():
    assert step_cost(MODELS[1]).attention_flops == 4 * 24 * (2 + 5)
    # Two blocks of 1 + … + 7 pairs, and the newest query of the last one.
    assert step_cost(MODELS[3]).attention_flops == 4 * 24 * (2 * 28 + 7)


@pytest.mark.parametrize("model", MODELS)
def test_memory_per_world_is_the_formula_s(model):
    assert cache_bytes(model) == measured_cache_bytes(model)


def test_memory_per_world_by_hand():
    model = FlashNerd(FlashNerdConfig(width=128, spans=(4, 4, 4)), ROBOT)
    assert cache_bytes(model) == 12 * 1024 + 8  # reference: (3, 4, 128) is 12 kB; and a counter
    assert cache_bytes(NerdBaseline(NerdBaselineConfig(), ROBOT)) == 10 * 6 * 4 + 8


def test_weights_are_read_once_per_batch():
    cost = StepCost(
        matmul_flops=90.0,
        attention_flops=10.0,
        weight_bytes=800.0,
        cache_bytes=40.0,
        frame_bytes=10.0,
        activation_bytes=1e9,
    )
    assert cost.flops == 100.0
    assert cost.bytes_per_world(1) == 850.0
    assert cost.bytes_per_world(16) == 100.0
    # 16 worlds: 1600 FLOPs and 1600 bytes; whichever takes longer bounds the step.
    assert cost.bound_seconds(16, Machine(flops_per_second=100.0, bytes_per_second=1600.0)) == 16.0
    assert cost.bound_seconds(16, Machine(flops_per_second=1600.0, bytes_per_second=100.0)) == 16.0


def test_live_activations_are_those_of_the_widest_product():
    # Flash: d → 3 d + 2 f beside the residual stream; the baseline: 4 d → d (or d → 4 d) for every frame.
    assert live_bytes(MODELS[1]) == 4 * (24 + 3 * 24 + 2 * 40 + 24)
    assert live_bytes(MODELS[3]) == 4 * 7 * (24 + 4 * 24 + 24)


def test_a_machine_s_peaks_are_positive():
    machine = measure_machine(torch.device("cpu"), size=64, megabytes=1, seconds=0.001)
    assert machine.flops_per_second > 0
    assert machine.bytes_per_second > 0


def test_another_kind_of_model_is_refused():
    with pytest.raises(ValueError, match="model is a Linear, expected a FlashNerd or a NerdBaseline"):
        cache_bytes(torch.nn.Linear(1, 1))
