"""What a training does to a model that it starts from: normalisers re-estimated, parameters frozen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .artifact import Model
from .baseline import NerdBaseline
from .normalizer import Normalizer, Total, alone

__all__ = ["freeze", "refit_normalizers"]


@torch.no_grad()
def refit_normalizers(model: Model, state: Tensor, control: Tensor, after: Tensor, total: Total = alone) -> None:
    """Estimate the normalisers anew and rewrite the layers beside them, so that predictions stay what they were.

    ::

        old token  x = g x' + c     g = a' a σ'/σ    c = a (μ' - μ)/σ       W x + b = (W g) x' + (b + W c)
        old target y: y' = a' (a σ y + μ - μ')/σ'

    with μ, σ, a the mean, standard deviation and mask of a channel, primes marking the new ones. What changes is
    how the loss weighs the channels and how well scaled the inputs are. A channel that begins to move starts
    without influence; one that no longer moves is predicted as its new mean.

    Chosen here: the rewriting. Normalisers refitted without it hand the network inputs of another scale, and what
    it had learned is lost before the first update.

    Args:
        model: The network; changed in place.
        state: Sample of training states, shape (N, nq + nv).
        control: Controls, shape (N, nu).
        after: The states one model step later, shape (N, nq + nv).
        total: Sums over the processes that hold a part of the sample each.
    """
    tokens, targets = _copy(model.token_stats), _copy(model.target_stats)
    model.token_stats.fit(model.codec.encode(state, control), total)
    if isinstance(model, NerdBaseline):
        delta = model.codec.differentiate(after, state)
        readers, writer, others = [(model.network.embed, 0)], model.network.head_out, []
    else:
        delta = model._residual(state, after)
        readers = [(model.embed, 0), (model.affine, 0), (model.readout_in, model.config.width)]
        writer, others = model.affine, [model.readout_out]
    model.target_stats.fit(delta, total)
    _rescale_inputs(readers, tokens, model.token_stats)
    _rescale_outputs(writer, others, targets, model.target_stats)


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Take parameters out of the training.

    Args:
        model: The network; the parameters' ``requires_grad`` is cleared.
        prefixes: Dotted beginnings of parameter names, for example ``embed`` or ``blocks.0``.

    Raises:
        ValueError: A prefix that names no parameter, or prefixes that leave none to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(_begins(name, prefix) for name in names):
            raise ValueError(f"freeze: {prefix!r} names no parameter, expected one of {', '.join(_choices(names))}")
    for name, parameter in model.named_parameters():
        if any(_begins(name, prefix) for prefix in prefixes):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze: {', '.join(prefixes)} leaves no parameter, expected some to train")


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _choices(names: Sequence[str]) -> list[str]:
    """The modules to choose from: the outermost ones, and the members of lists of modules."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            if depth == 1 or parts[depth - 1].isdigit():
                found[".".join(parts[:depth])] = None
    return list(found)


def _copy(stats: Normalizer) -> tuple[Tensor, Tensor, Tensor]:
    return stats.mean.clone(), stats.std.clone(), stats.active.clone()


def _rescale_inputs(
    readers: Sequence[tuple[nn.Linear, int]], old: tuple[Tensor, Tensor, Tensor], new: Normalizer
) -> None:
    """Layers with the column at which their token begins."""
    mean, std, active = old
    gain, offset = new.active * active * new.std / std, active * (new.mean - mean) / std
    for layer, first in readers:
        columns = layer.weight[:, first : first + len(mean)]
        layer.bias.add_(columns @ offset)
        columns.mul_(gain)


def _rescale_outputs(
    writer: nn.Linear, others: Sequence[nn.Linear], old: tuple[Tensor, Tensor, Tensor], new: Normalizer
) -> None:
    """Layers whose outputs add up to the target; the shift goes to one of them."""
    mean, std, active = old
    gain, offset = new.active * active * std / new.std, new.active * (mean - new.mean) / new.std
    for layer in (writer, *others):
        layer.weight.mul_(gain[:, None])
        layer.bias.mul_(gain)
    writer.bias.add_(offset)
