"""What a step has to compute and to move, and what this machine could do at best.

The roofline: a step of B rows takes at least max(FLOPs / peak FLOP/s, bytes / bandwidth). Bytes are those that have to
come from memory however well the step is written: weights once per batch, the cache's slots read or written once,
states and increments. Activations can stay in the processor's caches; they are listed apart.

Source: Williams, Waterman and Patterson 2009. Chosen here: a multiplication and an addition are two FLOPs; only
matrix products and attention are counted, elementwise work is not.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .baseline import NerdBaseline
from .model import FlashNerd

__all__ = [
    "Machine",
    "StepCost",
    "cache_bytes",
    "live_bytes",
    "measure_machine",
    "measured_cache_bytes",
    "step_cost",
]

WORD = 4  # bytes of a float32
COUNTER = 8  # bytes of a row's valid count, int64


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Work of one model step of one world; only ``weight_bytes`` is shared by the rows of a batch.

    Attributes:
        matmul_flops: Matrix products.
        attention_flops: Scores and mixtures.
        weight_bytes: Weights and biases, read once per batch [B].
        cache_bytes: Slots and counters read or written [B].
        frame_bytes: State and control read, increment written [B].
        activation_bytes: Outputs of the layers, written once and read once [B].
    """

    matmul_flops: float
    attention_flops: float
    weight_bytes: float
    cache_bytes: float
    frame_bytes: float
    activation_bytes: float

    @property
    def flops(self) -> float:
        """All FLOPs of a world's step."""
        return self.matmul_flops + self.attention_flops

    def bytes_per_world(self, batch: int) -> float:
        """Bytes that a world's step must move from or to memory, in a batch of so many [B]."""
        return self.weight_bytes / batch + self.cache_bytes + self.frame_bytes

    def bound_seconds(self, batch: int, machine: "Machine") -> float:
        """The least time of a step of ``batch`` worlds on a machine [s]."""
        memory = batch * self.bytes_per_world(batch) / machine.bytes_per_second
        return max(batch * self.flops / machine.flops_per_second, memory)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a device does at best, as measured.

    Attributes:
        flops_per_second: Large float32 matrix product [FLOP/s].
        bytes_per_second: Copy of arrays beyond the caches, read and written bytes together [B/s].
    """

    flops_per_second: float
    bytes_per_second: float


def step_cost(model: Any) -> StepCost:
    """Cost of one ``step``, from the sizes of a :class:`FlashNerd` or an optimized :class:`NerdBaseline`.

    The context encoder's own work is not counted; its features are.

    Raises:
        ValueError: Another kind of model.
    """
    robot, weights = model.robot, WORD * sum(p.numel() for p in model.parameters())
    frame = WORD * (robot.state_size + robot.nu + 2 * robot.nv)
    products, attention, cache = _work(model)
    return StepCost(
        matmul_flops=sum(2.0 * rows * inputs * outputs for rows, inputs, outputs in products),
        attention_flops=float(attention),
        weight_bytes=float(weights),
        cache_bytes=float(cache),
        frame_bytes=float(frame),
        activation_bytes=sum(2.0 * WORD * rows * outputs for rows, _, outputs in products),
    )


def live_bytes(model: Any) -> int:
    """Bytes of a world's activations that are alive at once, at most: the widest product and what it is made from."""
    products, _, _ = _work(model)
    widest = max(rows * (inputs + outputs) for rows, inputs, outputs in products)
    residual = max(rows for rows, _, _ in products) * model.config.width
    return WORD * (widest + residual)


def cache_bytes(model: Any) -> int:
    """Memory of the cache per world [B], by formula.

    FlashNerd: Σ_l S_l slots of 2 d numbers. Baseline: W frames. And a counter each.
    """
    if isinstance(model, FlashNerd):
        return WORD * 2 * model.config.width * sum(model.config.spans) + COUNTER
    if isinstance(model, NerdBaseline):
        return WORD * model.config.window * model.frame_size + COUNTER
    raise _unknown(model)


def measured_cache_bytes(model: Any) -> int:
    """Memory of the cache per world [B], by the tensors: what one more world adds."""
    one, two = (sum(leaf.nbytes for leaf in pytree.tree_leaves(model.init_cache(n))) for n in (1, 2))
    return two - one


def _work(model: Any) -> tuple[list[tuple[int, int, int]], int, int]:
    """Matrix products (rows, inputs, outputs) per world, FLOPs of attention and bytes of the cache that move."""
    if isinstance(model, FlashNerd):
        config, d, out = model.config, model.config.width, model.codec.delta_size
        frame, f, r = model.embed.in_features, config.hidden, config.readout_hidden
        block = [(1, d, 3 * d + 2 * f), (1, d + f, d)]
        products = [(1, frame, d), *(block * len(config.spans)), (1, frame, out), (1, d + frame, r), (1, r, out)]
        # S - 1 slots are read, one is written; the counter is read and written.
        return products, 4 * d * sum(config.spans), cache_bytes(model) + COUNTER
    if isinstance(model, NerdBaseline):
        config, d, out = model.config, model.config.width, model.codec.delta_size
        w, frame, hidden = config.window, model.frame_size, config.head_hidden
        block = [(w, d, 3 * d), (w, d, d), (w, d, 4 * d), (w, 4 * d, d)]
        last = [(w, d, 2 * d), (1, d, d), (1, d, d), (1, d, 4 * d), (1, 4 * d, d)]
        head = [(1, d, hidden), (1, hidden, out)]  # folded: no d → d product before it
        products = [(w, frame, d), *(block * (config.layers - 1)), *last, *head]
        # Causal: position t attends to t + 1 positions, at 4 d FLOPs each.
        pairs = (config.layers - 1) * w * (w + 1) // 2 + w
        # The window is shifted: every frame is read and written.
        return products, 4 * d * pairs, 2 * cache_bytes(model)
    raise _unknown(model)


def _unknown(model: Any) -> ValueError:
    return ValueError(f"model is a {type(model).__name__}, expected a FlashNerd or a NerdBaseline")


def measure_machine(device: torch.device, *, size: int = 1024, megabytes: int = 128, seconds: float = 0.15) -> Machine:
    """Measure a device's peaks with torch's present number of threads, in a few hundred milliseconds.

    Args:
        device: The device.
        size: Rows and columns of the matrices.
        megabytes: Size of the array that is copied [MiB]; far more than the caches hold.
        seconds: Time for each of the two measurements.
    """
    left, right, product = (torch.ones(size, size, device=device) for _ in range(3))
    source = torch.ones(megabytes * 2**20 // WORD, device=device)
    target = torch.empty_like(source)
    multiply = _best(lambda: torch.mm(left, right, out=product), device, seconds)
    copy = _best(lambda: target.copy_(source), device, seconds)
    return Machine(flops_per_second=2.0 * size**3 / multiply, bytes_per_second=2.0 * source.nbytes / copy)


def _best(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Shortest time of a call, of at least three and for at least so long [s]."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def synchronize(device: torch.device) -> None:
    """Wait for a device's queue; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
