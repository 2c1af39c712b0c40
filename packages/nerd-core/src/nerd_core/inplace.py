"""Steps as functions that overwrite the memory they are given, which is what compilers and graphs want."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .baseline import NerdBaseline
from .model import Block, KVCache

__all__ = ["InPlaceStep", "PureStep", "RingStep", "in_lag_order"]


class PureStep(nn.Module):
    """A model's ``step`` with its options bound; the baseline in its folded form, which has fewer products."""

    model: Any  # a module, but of any class that has a step

    def __init__(self, model: Any, *, bfloat16: bool, full: bool) -> None:
        super().__init__()
        self.model, self.full = model.folded() if isinstance(model, NerdBaseline) else model, full
        self._precision = torch.bfloat16 if bfloat16 else torch.float32
        takes_full = "full" in inspect.signature(model.step).parameters
        self._options = {"full": True} if full and takes_full else {}

    def products(self, device: torch.device) -> torch.autocast:
        """Where the blocks' products run in the chosen precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._precision == torch.bfloat16)

    def forward(
        self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None, cache: Any
    ) -> tuple[Tensor, Any]:
        """Increment, shape (B, 2·nv), and the new cache."""
        with self.products(state.device):
            return self.model.step(state, control, context, cache, **self._options)


class InPlaceStep(nn.Module):
    """Any model's step, which overwrites the leaves of its cache and returns the increment alone."""

    def __init__(self, pure: PureStep, structure: pytree.TreeSpec) -> None:
        super().__init__()
        self.pure, self._structure = pure, structure

    def forward(self, state: Tensor, control: Tensor, context: dict[str, Tensor], leaves: list[Tensor]) -> Tensor:
        """Increment, shape (B, 2·nv)."""
        delta, after = self.pure(state, control, context, pytree.tree_unflatten(leaves, self._structure))
        for old, new in zip(leaves, pytree.tree_leaves(after), strict=True):
            old.copy_(new)
        return delta


class RingStep(nn.Module):
    """:meth:`FlashNerd.step` on the slots of the ring in lag order, of which only the first is written."""

    def __init__(self, pure: PureStep) -> None:
        super().__init__()
        self.pure = pure

    def forward(self, state: Tensor, control: Tensor, context: dict[str, Tensor], memory: list[Tensor]) -> Tensor:
        """Increment, shape (B, 2·nv); ``memory`` as :func:`in_lag_order` gives it."""
        model, slots, valid = self.pure.model, iter(memory[:-1]), memory[-1]
        with self.pure.products(state.device):
            frame = model.frame(state, control, context)
            h = model._embed(frame)
            for block in model.blocks:
                keys, values = ([next(slots) for _ in range(block.span)] for _ in range(2))
                h = self._block(block, h, keys, values, valid)
        valid.add_(1)
        return model.increment(state, self._readout(h, frame).to(state.dtype))

    def _readout(self, h: Tensor, frame: Tensor) -> Tensor:
        # The affine path and the last layer read side by side: one product in place of two.
        model = self.pure.model
        hidden = F.silu(model.readout_in(torch.cat([model.norm(h), frame], -1)))
        weight = torch.cat([model.readout_out.weight, model.affine.weight], 1)
        return F.linear(torch.cat([hidden, frame], -1), weight, model.readout_out.bias + model.affine.bias)

    def _block(self, block: Block, x: Tensor, keys: list[Tensor], values: list[Tensor], valid: Tensor) -> Tensor:
        q, k, v, gated = block._project(x)
        k, v = k.to(keys[0].dtype), v.to(values[0].dtype)
        keys[0].copy_(k)
        values[0].copy_(v)
        score = [(q * past).sum(-1) + block.lag_bias[:, lag] for lag, past in enumerate([k, *keys[1:]])]  # (B, H) each
        if not self.pure.full:
            score[1:] = [
                torch.where((lag <= valid)[:, None], s, -torch.inf) for lag, s in enumerate(score[1:], start=1)
            ]
        # Softmax over the few lags by hand, divided last: everything stays elementwise.
        top = score[0]
        for s in score[1:]:
            top = torch.maximum(top, s)
        weight = [(s - top).exp() for s in score]
        total, mixed = weight[0], weight[0][..., None] * v
        for w, past in zip(weight[1:], values[1:], strict=True):
            total, mixed = total + w, mixed + w[..., None] * past
        mixed = (mixed / total[..., None]).flatten(-2)  # (B, d)
        return x + block.project_out(torch.cat([mixed.to(gated.dtype), gated], -1))


def in_lag_order(cache: Any, phase: int) -> list[Tensor]:
    """Leaves that :class:`RingStep` takes at a phase of the cursor; any other cache's own leaves."""
    if not isinstance(cache, KVCache):
        return pytree.tree_leaves(cache)
    rings = [ring for pair in zip(cache.keys, cache.values, strict=True) for ring in pair]
    slots = [ring[:, (phase - lag) % ring.shape[1]] for ring in rings for lag in range(ring.shape[1])]
    return [*slots, cache.valid]
