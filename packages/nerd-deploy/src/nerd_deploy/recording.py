"""Recording of golden data from a model, in torch."""

from __future__ import annotations

from typing import Any

import torch

from nerd_core import FlashNerd

from .golden import Golden
from .scenario import draw_scenario
from .signature import CONTEXT_NAMES

__all__ = ["record_golden"]

WORLDS = 3
STEPS = 32
LIMIT = 1e3  # of a state's entries, in SI units; further out, rounding says nothing


@torch.no_grad()
def record_golden(model: FlashNerd, *, seed: int = 0) -> Golden:
    """Recursive steps of a few worlds near their home, a reset in the middle.

    Args:
        model: The network, float32, in evaluation mode.
        seed: Seed of starts and controls.

    Raises:
        ValueError: The model leaves all bounds within these steps.
    """
    run = draw_scenario(model, WORLDS, STEPS, seed=seed)
    encoder: Any = model.context_encoder
    cache, state = model.init_cache(WORLDS), run.start
    states, deltas, seen = [state], [], []
    for t in range(STEPS):
        if t == run.reset_at:
            cache = cache.reset(run.reset)
        context = None if encoder is None else encoder.observe(state, run.scene)
        if context is not None:
            seen.append({name: context[name] for name in CONTEXT_NAMES})
        delta, cache = model.step(state, run.controls[:, t], context, cache)
        state = model.codec.integrate(state, delta)
        states.append(state)
        deltas.append(delta)
    path = torch.stack(states, 1)
    if not bool((path.abs() < LIMIT).all()):
        raise ValueError(f"model: its state exceeds {LIMIT:g} within {STEPS} steps from its home, nothing to compare")
    names = CONTEXT_NAMES if seen else ()
    return Golden(
        state=path.numpy(),
        control=run.controls.numpy(),
        delta=torch.stack(deltas, 1).numpy(),
        context={name: torch.stack([rows[name] for rows in seen], 1).numpy() for name in names},
        reset_at=run.reset_at,
        reset=run.reset.numpy(),
    )
