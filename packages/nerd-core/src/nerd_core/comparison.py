"""Several models on the same trajectories: E_H side by side, and ratios whose intervals are paired.

Trajectories differ far more than models do. The bootstrap therefore draws trajectories once, for
every model and every horizon: a ratio's interval says how sure it is that one model beats another,
where two separate intervals that overlap say nothing.

Chosen here: the ratio of a draw is sqrt(mean of squared errors / the first model's mean); its
interval holds the middle 95 % of the draws. Definition of E_H: :mod:`nerd_core.evaluate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dataset import Trajectories, TrajectoryDataset
from .evaluate import (
    DIVERGED,
    IDLE,
    SceneObserver,
    ZeroIncrement,
    channel_names,
    channel_sigma,
    fitting_horizons,
    squared_error,
)
from .rollout import StreamingStep
from .windows import seeded_generator

__all__ = ["Comparison", "ModelErrors", "compare", "held_out_rows", "paired_errors"]

Curve = tuple[float | None, ...]
"""One number per step H = 1..max; None where it is not finite."""


@dataclass(frozen=True, kw_only=True)
class ModelErrors:
    """Errors of one model; every curve holds steps H = 1..max.

    Attributes:
        name: Its label.
        at_step: E_H.
        low: Lower end of its bootstrap 95 % interval over trajectories.
        high: Upper end.
        median: Median over trajectories of the per-trajectory error.
        diverged: Share of trajectories that are not finite or beyond 10 σ.
        ratio: E_H over that of the first model.
        ratio_low: Lower end of its paired 95 % interval.
        ratio_high: Upper end.
    """

    name: str
    at_step: Curve
    low: Curve
    high: Curve
    median: Curve
    diverged: tuple[float, ...]
    ratio: Curve
    ratio_low: Curve
    ratio_high: Curve


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        horizons: Steps H that were asked for and fit.
        models: In the order given; the first is the denominator of the ratios.
        zero_increment: E_H of a model that predicts no motion, H = 1..max.
        affine: E_H of the affine baseline; None if there is none.
        sigma: σ by channel name, in the channel's SI unit.
        idle_channels: Channels that never move and are left out.
        num_trajectories: Trajectories evaluated.
        start: Frame that the rollouts start from.
    """

    horizons: tuple[int, ...]
    models: tuple[ModelErrors, ...]
    zero_increment: Curve
    affine: Curve | None
    sigma: dict[str, float]
    idle_channels: tuple[str, ...]
    num_trajectories: int
    start: int


def held_out_rows(
    dataset: TrajectoryDataset, manifests: Mapping[str, Mapping[str, Any]]
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Trajectories that none of the models was trained on.

    A model trained on this dataset knows all but its own held-out split; to any other model every
    trajectory is new.

    Args:
        dataset: The dataset.
        manifests: Label to a model's manifest.

    Returns:
        Sorted trajectories held out from all models, sorted trajectories that some model was trained
        on, and the labels of the models that were trained on this dataset.

    Raises:
        ValueError: None is left, or a manifest does not tell its split.
    """
    count = dataset.num_trajectories
    new, knowing = torch.ones(count, dtype=torch.bool), []
    for name, manifest in manifests.items():
        if dataset.digest not in manifest["datasets"]:
            continue
        made = manifest["training"]
        if not {"val_fraction", "seed"} <= made.keys():
            raise ValueError(f"{name}: trained on this dataset, but its manifest does not tell with which split")
        knowing.append(name)
        trained, _ = dataset.split(made["val_fraction"], made["seed"])
        new[trained] = False
    if not bool(new.any()):
        raise ValueError(
            f"dataset: none of its {count} trajectories is held out from all of {', '.join(knowing)}: they were "
            "trained with different splits; expected models of one split, or a dataset none of them was trained on"
        )
    return new.nonzero()[:, 0], (~new).nonzero()[:, 0], tuple(knowing)


def compare(
    models: Mapping[str, StreamingStep],
    trajectories: Trajectories,
    *,
    horizons: Sequence[int] = (1, 15, 100, 200),
    observers: Mapping[str, SceneObserver] | None = None,
    start: int = 0,
    history: int = 0,
    affine: StreamingStep | None = None,
    seed: int = 0,
    resamples: int = 1000,
) -> Comparison:
    """Roll every model out over the same trajectories.

    Args:
        models: Label to model; ratios are to the first.
        trajectories: Evaluation data.
        horizons: Steps H to report; those beyond the end of the trajectories are left out. Curves
            reach from 1 to the longest.
        observers: Label to what gives the context of states in their scenes, for models that look.
        start: Frame to start from; 0 starts without history, as after a reset.
        history: True frames before ``start`` that fill the caches.
        affine: The affine baseline, see :func:`nerd_core.evaluate.affine_baseline`.
        seed: Seed of the bootstrap.
        resamples: Bootstrap resamples over trajectories.

    Raises:
        ValueError: No model, models of different robots, or a start or horizons that do not fit.
    """
    if not models:
        raise ValueError("models: got none, expected at least one")
    first, robot = next(iter(models)), next(iter(models.values())).robot
    for name, model in models.items():
        if gaps := robot.differences(model.robot):
            raise ValueError(f"models: {name} is of another robot than {first}: {'; '.join(gaps)}")
    chosen = fitting_horizons(trajectories, horizons, start=start, history=history)
    sigma = channel_sigma(robot, trajectories.states)

    def squared(model: StreamingStep, look: SceneObserver | None) -> Tensor:
        found = squared_error(model, trajectories, chosen[-1], sigma, observe=look, start=start, history=history)
        return found.cpu()

    looks = observers or {}
    errors = {name: squared(model, looks.get(name)) for name, model in models.items()}
    named = list(zip(channel_names(robot), sigma.tolist(), strict=True))
    return Comparison(
        horizons=tuple(chosen),
        models=paired_errors(errors, seed=seed, resamples=resamples),
        zero_increment=_curve(squared(ZeroIncrement(robot), None).mean(0).sqrt()),
        affine=None if affine is None else _curve(squared(affine, None).mean(0).sqrt()),
        sigma=dict(named),
        idle_channels=tuple(name for name, spread in named if not spread > IDLE),
        num_trajectories=len(trajectories.states),
        start=start,
    )


def paired_errors(errors: Mapping[str, Tensor], *, seed: int = 0, resamples: int = 1000) -> tuple[ModelErrors, ...]:
    """Curves of models whose errors on the same trajectories are known; ratios are to the first.

    Args:
        errors: Label to squared errors per trajectory and step, shapes (N, H), as
            :func:`nerd_core.evaluate.squared_error` gives them.
        seed: Seed of the bootstrap.
        resamples: Bootstrap resamples over trajectories, the same ones for every model.
    """
    reference = next(iter(errors.values()))
    draws = _draws(len(reference), resamples, seed)
    return tuple(_errors(name, error, reference, draws) for name, error in errors.items())


def _draws(rows: int, resamples: int, seed: int) -> Tensor:
    """How often each bootstrap draw holds each trajectory, (resamples, rows)."""
    drawn = torch.randint(rows, (resamples, rows), generator=seeded_generator(seed, "compare"))
    return torch.zeros(resamples, rows, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(resamples, rows, dtype=torch.float64)
    )


def _errors(name: str, squared: Tensor, reference: Tensor, draws: Tensor) -> ModelErrors:
    """From squared errors per trajectory and step, (N, H), of this model and of the first one."""
    resampled = _resampled_means(squared, draws)
    error, ratio = resampled.sqrt(), (resampled / _resampled_means(reference, draws)).sqrt()
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = error.quantile(ends, 0)
    ratio_low, ratio_high = ratio.quantile(ends, 0)
    diverged = ~squared.isfinite() | (squared > DIVERGED**2)
    return ModelErrors(
        name=name,
        at_step=_curve(squared.mean(0).sqrt()),
        low=_curve(low),
        high=_curve(high),
        median=_curve(squared.nan_to_num(nan=torch.inf).median(0).values.sqrt()),
        diverged=tuple(diverged.double().mean(0).tolist()),
        ratio=_curve((squared.mean(0) / reference.mean(0)).sqrt()),
        ratio_low=_curve(ratio_low),
        ratio_high=_curve(ratio_high),
    )


def _resampled_means(squared: Tensor, draws: Tensor) -> Tensor:
    """Mean over each draw's trajectories, (resamples, H); infinite where a drawn one is not finite."""
    finite = squared.isfinite()
    means = draws @ squared.where(finite, 0.0) / len(squared)
    return means.where(draws @ (~finite).double() == 0, torch.inf)


def _curve(values: Tensor) -> Curve:
    return tuple(value if abs(value) < float("inf") else None for value in values.tolist())
