"""Figures of datasets, runs and comparisons; matplotlib comes with the extra ``nerd-core[plot]``.

Each function returns a matplotlib figure, drawn without pyplot's global state; :func:`save_figure` writes it.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .comparison import Comparison, Curve
from .coverage import ChannelStatistics, Coverage, DatasetReport
from .inspection import RunReport
from .storage import TEMPORARY_SUFFIX, check_writable

__all__ = ["check_plot", "comparison_figure", "coverage_figure", "save_figure", "training_figure"]

# Okabe and Ito's colours, told apart with every common colour blindness; lines differ in dashes too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
_INK, _FAINT, _GRID = "#2b2f36", "#6f7680", "#e8ebee"
_DPI, _PLANE = 150, 4.6  # [1/inch], side of the coverage plane [inch]
_UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Suffixes, and what keeps the same figure the same bytes."""


def check_plot(path: Path) -> None:
    """Refuse a figure's path before any work is done.

    Raises:
        ValueError: It exists, its folder does not, its suffix is unknown, or matplotlib is missing.
    """
    if path.suffix.removeprefix(".") not in _UNDATED:
        expected = ", ".join(f".{suffix}" for suffix in _UNDATED)
        raise ValueError(f"plot: {path} has suffix {path.suffix!r}, expected one of {expected}")
    if path.exists() or path.is_symlink():
        raise ValueError(f"plot: {path} exists; a figure is never overwritten")
    if not path.parent.is_dir():
        raise ValueError(f"plot: {path.parent} is no folder, expected one to write {path.name} into")
    check_writable(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("plot: matplotlib is not installed; install nerd-core[plot]") from None


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, whole or not at all; the suffix gives the format.

    Raises:
        ValueError: As :func:`check_plot`.
    """
    check_plot(path)
    from matplotlib import rc_context

    suffix, buffer = path.suffix.removeprefix("."), io.BytesIO()
    with rc_context({"svg.hashsalt": "nerd-core"}):
        figure.savefig(buffer, format=suffix, metadata=_UNDATED[suffix])
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.write_bytes(buffer.getvalue())
    os.replace(temporary, path)


def coverage_figure(report: DatasetReport, coverage: Coverage) -> Any:
    """Where a dataset has been: a histogram of each channel, the first position against its velocity."""
    channels = (*report.states, *report.controls)
    columns = min(6, max(3, math.ceil(math.sqrt(len(channels)))))
    rows = math.ceil(len(channels) / columns)
    width, height = 2.05 * columns, max(1.5 * rows + 0.6, _PLANE)
    figure = _figure(width + _PLANE, height)
    # The plane stays about square beside many rows of histograms.
    halves = (_PLANE, height - _PLANE) if height > 1.2 * _PLANE else (height,)
    grid = figure.add_gridspec(len(halves), 2, width_ratios=(width, _PLANE), height_ratios=halves)
    left = figure.add_subfigure(grid[:, 0])
    panels = left.subplots(rows, columns, squeeze=False).flatten()
    for axes, channel, counts in zip(panels, channels, coverage.counts, strict=False):
        _histogram(axes, channel, counts, _COLOURS[0] if channel in report.states else _COLOURS[1])
    for axes in panels[len(channels) :]:
        axes.set_axis_off()
    left.suptitle(
        f"{report.robot}: {report.trajectories:,} trajectories, {report.transitions:,} transitions; share of frames, "
        "controls in orange",
        fontsize=10,
        color=_INK,
    )
    right = figure.add_subfigure(grid[0, 1])
    _plane(right, report.states[coverage.position], report.states[coverage.velocity], coverage.plane)
    return figure


def training_figure(report: RunReport) -> Any:
    """A run's curves: losses, held-out rollout error at each horizon, learning rate.

    Raises:
        ValueError: The run has no evaluation yet.
    """
    rows = report.evaluations
    if not rows:
        raise ValueError("plot: this run holds no evaluation yet, expected at least one line in metrics.jsonl")
    figure = _figure(8.4, 7.6)
    losses, errors, rates = figure.subplots(3, 1, sharex=True, height_ratios=(3, 4, 1.6))
    steps = [row["step"] for row in rows]
    _line(losses, steps, [row["val_loss"] for row in rows], 0, "held out, one step", marker="o")
    # The two phases minimise different losses at different rates: their curves do not join.
    phases = {"teacher": "training, teacher-forced", "recursive": "training, recursive"}
    for index, (phase, label) in enumerate(phases.items(), 1):
        part = [row for row in rows if row["phase"] == phase]
        if part:
            _line(losses, [r["step"] for r in part], [r["loss"] for r in part], index, label, marker="o")
            _line(rates, [r["step"] for r in part], [r["lr"] for r in part], index, None, marker="o")
    for index, horizon in enumerate(sorted(rows[0]["rollout_error"], key=int)):
        found = [row["rollout_error"].get(horizon) for row in rows]
        _line(errors, steps, found, index, f"$E_{{{horizon}}}$", marker="o")
    mean = _numbers(row["rollout_error_mean"] for row in rows)
    errors.plot(steps, mean, color=_INK, linewidth=1.6, linestyle=(0, (3, 1)), label="mean over 1..max")
    if report.best is not None:
        place = report.best["step"], report.best["rollout_error_mean"]
        errors.plot(*place, "*", color=_INK, markersize=13, label="best")
    for axes, words in ((losses, "loss"), (errors, "held-out rollout error [σ]"), (rates, "learning rate")):
        _style(axes)
        _log(axes, "y")
        _label(axes, None, words)
        _legend(axes)
        if report.boundary is not None:
            axes.axvline(report.boundary, color=_FAINT, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
    if report.boundary is not None:
        losses.annotate(
            "recursive phase begins",
            (report.boundary, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=_FAINT,
        )
    rates.set_xlim(0, max(report.total_steps, 1) * 1.02)
    rates.set_xlabel(f"updates (of {report.total_steps:,})", fontsize=10, color=_INK)
    figure.suptitle(f"{report.robot}: training run", fontsize=11, color=_INK)
    return figure


def comparison_figure(comparison: Comparison) -> Any:
    """E_H over H, both logarithmic, with bootstrap 95 % bands and both baselines."""
    figure = _figure(8.4, 4.8)
    axes = figure.subplots()
    steps = list(range(1, len(comparison.zero_increment) + 1))
    marks = [horizon - 1 for horizon in comparison.horizons]
    for index, model in enumerate(comparison.models):
        colour = _COLOURS[index % len(_COLOURS)]
        _line(axes, steps, model.at_step, index, model.name, marker="o", markevery=marks)
        axes.fill_between(steps, _numbers(model.low), _numbers(model.high), color=colour, alpha=0.2, linewidth=0)
    baselines: list[tuple[str, Curve | None, Any]] = [
        ("no motion", comparison.zero_increment, (0, (5, 3))),
        ("affine", comparison.affine, (0, (1, 2))),
    ]
    for label, curve, dashes in baselines:
        if curve is not None:
            axes.plot(steps, _numbers(curve), color=_FAINT, linewidth=1.5, linestyle=dashes, label=label)
    _style(axes)
    _log(axes, "x")
    _log(axes, "y")
    axes.set_xlim(0.94, len(steps) * 1.06)
    _label(axes, "model steps H", "rollout error $E_H$ [σ]")
    _legend(axes)
    axes.set_title(f"{comparison.num_trajectories:,} trajectories; bands: 95 % bootstrap", fontsize=10, color=_INK)
    return figure


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _histogram(axes: Any, channel: ChannelStatistics, counts: Tensor, colour: str) -> None:
    _style(axes)
    axes.grid(False)
    axes.stairs((counts.double() / counts.sum()).tolist(), _edges(channel, len(counts)), fill=True, color=colour)
    axes.set_ylim(bottom=0)
    axes.set_yticks([])
    axes.locator_params(axis="x", nbins=3)
    axes.tick_params(labelsize=7)
    axes.set_title(channel.name + (" (idle)" if channel.idle else ""), fontsize=8, color=_INK)
    axes.set_xlabel(f"[{channel.unit}]", fontsize=8, color=_INK, labelpad=1)


def _plane(figure: Any, position: ChannelStatistics, velocity: ChannelStatistics, counts: Tensor) -> None:
    from matplotlib.colors import LogNorm

    axes = figure.subplots()
    _style(axes)
    axes.grid(False)
    image = axes.pcolormesh(
        _edges(position, len(counts)),
        _edges(velocity, len(counts)),
        counts.T.double().where(counts.T > 0, math.nan).tolist(),
        cmap="cividis",
        norm=LogNorm(vmin=1, vmax=max(2, int(counts.max()))),
        rasterized=True,
    )
    bar = figure.colorbar(image, ax=axes, location="top", shrink=0.9, pad=0.02)
    bar.set_label("frames per cell; white: never visited", fontsize=9, color=_INK)
    bar.ax.tick_params(labelsize=8)
    _label(axes, f"{position.name} [{position.unit}]", f"{velocity.name} [{velocity.unit}]")


def _edges(channel: ChannelStatistics, bins: int) -> list[float]:
    """Bounds of the bins of :func:`nerd_core.coverage.coverage`."""
    room = channel.max - channel.min if channel.max > channel.min else 1.0
    return [channel.min + room * index / bins for index in range(bins + 1)]


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(which="both", colors=_INK, labelsize=9, color=_FAINT)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _label(axes: Any, x: str | None, y: str) -> None:
    if x is not None:
        axes.set_xlabel(x, fontsize=10, color=_INK)
    axes.set_ylabel(y, fontsize=10, color=_INK)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        # Beside the axes, where it hides no data.
        axes.legend(
            fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.005, 1.03), labelcolor=_INK, handlelength=3
        )


def _line(axes: Any, x: Sequence[float], y: Iterable[float | None], index: int, label: str | None, **how: Any) -> None:
    axes.plot(
        x,
        _numbers(y),
        color=_COLOURS[index % len(_COLOURS)],
        linestyle=_DASHES[index % len(_DASHES)],
        linewidth=1.8,
        markersize=4,
        label=label,
        **how,
    )


def _log(axes: Any, axis: str) -> None:
    """A logarithmic axis, if it shows any positive number."""
    limits = axes.dataLim.intervalx if axis == "x" else axes.dataLim.intervaly
    if limits[1] > 0 and math.isfinite(limits[1]):
        getattr(axes, f"set_{axis}scale")("log")


def _numbers(values: Iterable[float | None]) -> list[float]:
    """Gaps where a number is not finite."""
    return [math.nan if value is None else value for value in values]
