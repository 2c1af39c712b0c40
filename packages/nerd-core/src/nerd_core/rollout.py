"""Recursive prediction: a streaming step, a codec and a function that looks at the surroundings."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .codec import StateCodec
from .robot import RobotSpec

__all__ = ["Observe", "StreamingStep", "prefill", "rollout"]

Observe = Callable[[Tensor], Mapping[str, Tensor]]
"""States, shape (B, nq + nv), to the named tensors that the context encoder reads, leading shape (B,)."""


class StreamingStep(Protocol):
    """The narrow waist: anything that advances a robot one model step from a frame and a cache.

    What a cache is made of is the step's own affair; it is a value, passed in and returned.
    """

    robot: RobotSpec

    def init_cache(self, n: int) -> Any:
        """Empty history for ``n`` worlds."""
        ...

    def step(
        self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None, cache: Any
    ) -> tuple[Tensor, Any]:
        """Increment of one model step, shape (B, 2·nv), and the new cache."""
        ...


def prefill(step: StreamingStep, states: Tensor, controls: Tensor, *, observe: Observe | None = None) -> Any:
    """Cache after a known history.

    Args:
        step: The model.
        states: States that were seen, shape (B, T, nq + nv).
        controls: Controls held after each of them, shape (B, T, nu).
        observe: Gives the context of a batch of states; None for models without one.
    """
    cache = step.init_cache(states.shape[0])
    for t in range(states.shape[1]):
        context = None if observe is None else observe(states[:, t])
        _, cache = step.step(states[:, t], controls[:, t], context, cache)
    return cache


def rollout(
    step: StreamingStep,
    state: Tensor,
    controls: Tensor,
    *,
    observe: Observe | None = None,
    cache: Any = None,
) -> Tensor:
    """Predicted states, shape (B, T + 1, nq + nv), the first of which is ``state``.

    Args:
        step: The model.
        state: Start states, shape (B, nq + nv).
        controls: Controls, shape (B, T, nu).
        observe: Gives the context of a batch of states; None for models without one.
        cache: History of the B worlds; None for none.
    """
    codec = StateCodec(step.robot)
    cache = step.init_cache(state.shape[0]) if cache is None else cache
    states = [state]
    for t in range(controls.shape[1]):
        context = None if observe is None else observe(state)
        delta, cache = step.step(state, controls[:, t], context, cache)
        state = codec.integrate(state, delta)
        states.append(state)
    return torch.stack(states, 1)
