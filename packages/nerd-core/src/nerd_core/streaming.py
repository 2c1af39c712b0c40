"""Forms of a streaming step: eager, compiled for the CPU, captured on a GPU.

All give the numbers of the model's own ``step``. The fast ones own the cache that they are given: they overwrite it
in place and return it, so that a step allocates nothing but its increment. Copy a cache that must outlive the step;
``reset`` and ``expand`` give new ones anyway.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .baseline import NerdBaseline
from .compiled import can_compile, compile_step, flat_step
from .device import uses_bfloat16
from .inplace import InPlaceStep, PureStep, RingStep, in_lag_order
from .model import FlashNerd, KVCache
from .roofline import live_bytes, step_cost

__all__ = ["CompiledStep", "EagerStep", "GraphedStep", "compile_streaming"]

LIVE_BYTES = 2**20
"""Activations of a chunk of rows that one thread may keep alive: they should not leave its caches."""
MIN_CHUNK = 32
"""Fewer rows than this make the matrix products inefficient."""
THREAD_FLOPS = 4e6
"""Work of a step for which another thread is worth its barriers."""


def compile_streaming(
    model: Any,
    batch: int,
    *,
    form: str = "compiled",
    precision: str = "float32",
    threads: int | None = None,
    chunk: int | None = None,
    context: Mapping[str, Tensor] | None = None,
    full: bool = False,
) -> "EagerStep | CompiledStep | GraphedStep":
    """A form of a model's step for one batch size, where its weights are.

    Args:
        model: A module that is a StreamingStep; it is put into evaluation mode and its weights are frozen.
        batch: Rows B of every later call.
        form: ``eager``; or ``compiled``, which on a GPU is one captured graph.
        precision: ``float32``; ``bfloat16`` products in the blocks; or ``auto``, bfloat16 where it pays.
        threads: CPU threads; None for as many as the work is worth.
        chunk: Rows of a chunk on the CPU; None for what fits the caches.
        context: Example of the surroundings, leading shape (B,), for models with a context encoder.
        full: The caller's word that every row has seen the receptive field: leaves out what only shorter histories
            need. Not checked.

    Raises:
        ValueError: A batch, number of threads or chunk below 1, an unknown form or precision, or a context encoder
            without an example.
    """
    for name, value in (("batch", batch), ("threads", threads), ("chunk", chunk)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    for name, value, known in (
        ("form", form, ("eager", "compiled")),
        ("precision", precision, ("auto", "float32", "bfloat16")),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    if getattr(model, "context_encoder", None) is not None and context is None:
        raise ValueError("context is None, expected an example for this model's context encoder")
    model.eval().requires_grad_(False)
    device = next(model.parameters()).device
    bfloat16 = uses_bfloat16(precision, device)
    if form == "eager":
        return EagerStep(model, bfloat16=bfloat16, full=full)
    if device.type == "cuda":
        return GraphedStep(model, batch, bfloat16=bfloat16, context=context, full=full)
    threads = threads or _worthwhile_threads(model, batch)
    chunk = chunk or _chunk_rows(model, batch, threads)
    return CompiledStep(model, batch, threads=threads, chunk=chunk, bfloat16=bfloat16, context=context, full=full)


class EagerStep:
    """A model's own ``step``, without gradients; the cache that it is given stays as it was.

    Attributes:
        robot: The robot.
    """

    def __init__(self, model: Any, *, bfloat16: bool = False, full: bool = False) -> None:
        self.robot, self.init_cache = model.robot, model.init_cache
        self._step = PureStep(model, bfloat16=bfloat16, full=full)

    @torch.no_grad()
    def step(
        self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None, cache: Any
    ) -> tuple[Tensor, Any]:
        """Increment, shape (B, 2·nv), and the new cache."""
        return self._step(state, control, context, cache)


class CompiledStep:
    """Ahead-of-time compiled step on the CPU for one batch size; uncompiled where there is no C++ compiler.

    Rows go through the whole step in chunks, so that activations stay in the processor's caches. The ring of a
    :class:`FlashNerd` reaches the compiled function as views in lag order. The views rotate from call to call, so no
    cached pair is ever copied and no cursor is compiled in.

    Attributes:
        robot: The robot.
        batch: Rows B.
        chunk: Rows of a chunk.
        threads: Threads of the generated loops. Library products take torch's number: call within
            ``nerd_core.device.threads(step.threads)``.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        *,
        threads: int,
        chunk: int,
        bfloat16: bool = False,
        context: Mapping[str, Tensor] | None = None,
        full: bool = False,
    ) -> None:
        if batch % chunk:
            raise ValueError(f"chunk is {chunk}, expected a divisor of the batch ({batch})")
        self.robot, self.init_cache = model.robot, model.init_cache
        self.batch, self.chunk, self.threads = batch, chunk, threads
        self._names = tuple(context or ())
        self._cache: Any = None
        self._cursor, self._views = 0, {}
        pure = PureStep(model, bfloat16=bfloat16, full=full)
        if isinstance(model, FlashNerd):
            self._period, step = math.lcm(*model.config.spans), RingStep(pure)
        else:
            self._period, step = 1, InPlaceStep(pure, pytree.tree_structure(model.init_cache(1)))
        # Views of an example's cache, with its strides; where one is written, no two inputs may share memory.
        memory = [
            torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).zero_()
            for view in in_lag_order(model.init_cache(chunk), 0)
        ]
        like = next(model.parameters())
        state, control = (like.new_zeros(chunk, n) for n in (self.robot.state_size, self.robot.nu))
        surroundings = {name: tensor[:chunk].clone() for name, tensor in (context or {}).items()}
        example = (state, control, surroundings, memory)
        self._run = compile_step(step, example, threads=threads) if can_compile() else flat_step(step, example)

    def _bind(self, cache: Any) -> None:
        """Own a cache from now on."""
        leaves, structure = pytree.tree_flatten(cache)
        if shapes := [tuple(leaf.shape) for leaf in leaves if leaf.dim() and len(leaf) != self.batch]:
            raise ValueError(f"cache has leaves of shapes {shapes}, expected {self.batch} rows, as this step has")
        self._cache = pytree.tree_unflatten([leaf.contiguous() for leaf in leaves], structure)
        self._cursor = int(cache.cursor) if isinstance(cache, KVCache) else 0
        self._views = {}

    def _memory(self) -> list[tuple[Tensor, ...]]:
        """What the compiled function reads and writes now, per chunk of rows."""
        phase = self._cursor % self._period
        if phase not in self._views:
            pieces = (view.split(self.chunk) for view in in_lag_order(self._cache, phase))
            self._views[phase] = list(zip(*pieces, strict=True))
        return self._views[phase]

    @torch.no_grad()
    def step(
        self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None, cache: Any
    ) -> tuple[Tensor, Any]:
        """Increment, shape (B, 2·nv), and the cache, overwritten in place."""
        if cache is not self._cache:
            self._bind(cache)
        given = [state, control, *((context or {})[name] for name in self._names)]
        if rows := [len(tensor) for tensor in given if len(tensor) != self.batch]:
            raise ValueError(f"state, control or context has {rows[0]} rows, expected {self.batch}, as this step has")
        pieces = zip(*(tensor.contiguous().split(self.chunk) for tensor in given), strict=True)
        deltas = [self._run([*now, *past])[0] for now, past in zip(pieces, self._memory(), strict=True)]
        if isinstance(self._cache, KVCache):
            # A new counter: caches that were expanded or reset share theirs with the history that they came from.
            self._cache = self._cache._replace(cursor=self._cache.cursor + 1)
            self._cursor += 1
        return deltas[0] if len(deltas) == 1 else torch.cat(deltas), self._cache


class GraphedStep:
    """One captured CUDA graph for one batch size: static buffers, one launch and no allocation per step.

    The increment and the cache that a step returns are the graph's own buffers; the next step overwrites them. On a
    CPU the same function runs uncaptured: slow, for tests.

    Attributes:
        robot: The robot.
        batch: Rows B.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        *,
        bfloat16: bool = False,
        context: Mapping[str, Tensor] | None = None,
        full: bool = False,
    ) -> None:
        self.robot, self.init_cache, self.batch = model.robot, model.init_cache, batch
        self._cache = model.init_cache(batch)
        self._leaves, structure = pytree.tree_flatten(self._cache)
        like = next(model.parameters())
        self._state, self._control, self._delta = (
            like.new_zeros(batch, n) for n in (self.robot.state_size, self.robot.nu, 2 * self.robot.nv)
        )
        self._context = {name: tensor.clone() for name, tensor in (context or {}).items()}
        step: Any = InPlaceStep(PureStep(model, bfloat16=bfloat16, full=full), structure)
        if like.device.type == "cuda":
            step = torch.compile(step, fullgraph=True, dynamic=False)

        def run() -> None:
            self._delta.copy_(step(self._state, self._control, self._context, self._leaves))

        with torch.no_grad():
            self._replay = _capture(run) if like.device.type == "cuda" else run
        for leaf in self._leaves:  # what warming up wrote
            leaf.zero_()

    @torch.no_grad()
    def step(
        self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None, cache: Any
    ) -> tuple[Tensor, Any]:
        """Increment, shape (B, 2·nv), and the cache, both overwritten by the next step."""
        given = {"state": state, "control": control, **(context or {})}
        mine = {"state": self._state, "control": self._control, **self._context}
        if cache is not self._cache:
            given |= {f"cache leaf {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(cache))}
            mine |= {f"cache leaf {i}": leaf for i, leaf in enumerate(self._leaves)}
        for name, buffer in mine.items():
            if given[name].shape != buffer.shape:  # copy_ would broadcast
                raise ValueError(f"{name} has shape {tuple(given[name].shape)}, expected {tuple(buffer.shape)}")
            buffer.copy_(given[name])
        self._replay()
        return self._delta, self._cache


def _capture(run: Callable[[], None]) -> Callable[[], None]:
    """Record a function on static CUDA buffers as a graph, after warming up beside the current stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _worthwhile_threads(model: Any, batch: int) -> int:
    cores = os.cpu_count() or 1
    return int(min(cores, max(1, batch * step_cost(model).flops // THREAD_FLOPS))) if _is_known(model) else cores


def _chunk_rows(model: Any, batch: int, threads: int) -> int:
    """The largest divisor of the batch whose activations fit the caches; the batch where there is no good one."""
    fit = max(MIN_CHUNK, threads * LIVE_BYTES // live_bytes(model)) if _is_known(model) else batch
    if batch <= fit:
        return batch
    best = max(n for n in range(1, fit + 1) if batch % n == 0)
    return best if best >= MIN_CHUNK else batch


def _is_known(model: Any) -> bool:
    """Whether the roofline knows this kind of model's work."""
    return isinstance(model, FlashNerd | NerdBaseline)
