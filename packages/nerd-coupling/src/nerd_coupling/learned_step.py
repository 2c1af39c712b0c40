"""What a learned model does in one step of a simulator, as a function of tensors alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from nerd_core import KVCache, StateCodec

__all__ = ["LearnedStep", "exported_step"]


class LearnedStep(nn.Module):
    """States, controls, rows and caches to the next states and caches: everything of a step that is torch alone.

    Rings are turned by one slot after each step, so that the slot to be overwritten is always the first and no cursor
    moves: a world that was reset late has the numbers of a fresh start, bit for bit, and a captured graph need not
    count.

    Args:
        network: The learned model.
        structure: What its caches are made of.
    """

    network: Any  # a StreamingStep, but not only of classes that are modules

    def __init__(self, network: Any, structure: pytree.TreeSpec) -> None:
        super().__init__()
        self.network, self._structure = network, structure
        self._codec = StateCodec(network.robot)

    def forward(
        self, state: Tensor, control: Tensor, rows: dict[str, Tensor] | None, forget: Tensor, leaves: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Next states, shape (B, nq + nv), and leaves of the next cache; worlds in ``forget``, (B,), start afresh."""
        cache = pytree.tree_unflatten(leaves, self._structure).reset(forget)
        delta, after = self.network.step(state, control, rows, cache)
        if isinstance(after, KVCache):
            keys, values = (tuple(ring.roll(-1, 1) for ring in part) for part in (after.keys, after.values))
            after = KVCache(keys, values, after.valid, torch.zeros_like(after.cursor))
        return self._codec.integrate(state, delta), pytree.tree_leaves(after)


def exported_step(step: LearnedStep, example: tuple[Any, ...], device: torch.device | str) -> Any:
    """The same step as a flat list of operators whose constants are on a device already.

    Written out on a CPU and then moved: in eager code the codec makes constants from Python numbers in every step,
    which copies from the host and may not stand in a CUDA graph.

    Args:
        step: The step, of a network that is a module.
        example: Inputs of :meth:`LearnedStep.forward`; their shapes are the only ones that the result takes.
        device: Where it will run.
    """
    host = copy.deepcopy(step).to("cpu").eval().requires_grad_(False)
    inputs = pytree.tree_map(lambda leaf: leaf.detach().cpu(), example)
    with torch.no_grad():
        program = torch.export.export(host, inputs, strict=False)
    if str(device) != "cpu":
        program = move_to_device_pass(program, device)
    return program.module()
