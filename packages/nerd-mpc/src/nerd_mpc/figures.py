"""Figures of an executed episode as PNG files in memory, without pyplot's global state."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nerd_coupling.terrain import Box, Terrain

if TYPE_CHECKING:
    from nerd_mpc.episode import EpisodeRecord

__all__ = ["plots"]

# Okabe and Ito's colours, told apart with every common colour blindness.
_BLUE, _ORANGE, _GREEN, _RED, _SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
_INK, _FAINT, _DECK = "#2b2f36", "#8b919a", "#c9d3da"
_HORIZON_COLOURS = {5: _SKY, 10: _BLUE, 20: _RED}
_WIDE, _DPI = 9.6, 150  # [inch], [1/inch]
_CLEARANCE = 0.15  # [m] base above the deck in a success
_SHOWN_PLANS = 6


def plots(record: EpisodeRecord) -> dict[str, bytes]:
    """Every figure of an episode.

    A value that is not finite leaves a gap; a figure without any value says so.

    Args:
        record: The executed episode.

    Returns:
        PNG files by name: ``climb`` (base height, base x and feet over time), ``planning_time``,
        ``score`` (with effective samples), ``on_plan_error``, ``plans`` (predicted against engine).
    """
    drawings = {
        "climb": (_draw_climb, 3, 5.6),
        "planning_time": (_draw_planning_time, 1, 2.7),
        "score": (_draw_score, 2, 4.0),
        "on_plan_error": (_draw_on_plan_error, 1, 3.0),
        "plans": (_draw_plans, 1, 3.6),
    }
    return {name: _png(record, draw, rows, height) for name, (draw, rows, height) in drawings.items()}


def decision_period(record: EpisodeRecord) -> float:
    """Time between two decisions [s], 0.02 s where the settings do not tell."""
    return float(record.settings.get("plan", {}).get("dt", 0.02))


def deck_box(record: EpisodeRecord) -> Box | None:
    """The platform of the episode's height, or None where the settings name no height."""
    height = record.settings.get("height")
    return None if height is None else Terrain.platform(float(height)).boxes[0]


def _png(record: EpisodeRecord, draw: Any, rows: int, height: float) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDE, height), dpi=_DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = [axes for (axes,) in figure.subplots(rows, 1, sharex=True, squeeze=False)]
    for axes in panels:
        _style(axes)
    draw(record, *panels)
    buffer = io.BytesIO()
    # Without the name of the program, a URL, the same record gives the same bytes everywhere.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axes.grid(True, color="#e8ebee", linewidth=0.8)
    axes.set_axisbelow(True)


def _label(axes: Any, x: str | None, y: str, *, legend: bool = True) -> None:
    if x is not None:
        axes.set_xlabel(x, fontsize=10, color=_INK)
    axes.set_ylabel(y, fontsize=10, color=_INK)
    if legend and axes.get_legend_handles_labels()[0]:
        # Beside the axes, where it hides no data.
        axes.legend(
            fontsize=9,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1.005, 1.03),
            labelcolor=_INK,
        )


def _absent(axes: Any, what: str) -> None:
    axes.set_yticks([])
    axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", color=_FAINT)


def _finite(values: Tensor) -> Tensor:
    return values[torch.isfinite(values)]


def _limits(axes: Any, values: Iterable[Tensor], *, least: float, margin: float = 0.08) -> None:
    """Limits of y from finite values alone, at least ``least`` apart: one wild value, kept."""
    finite = torch.cat([_finite(v.double().flatten()) for v in values])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, least)
    room = max(high - low, least)
    middle = 0.5 * (low + high)
    axes.set_ylim(middle - (0.5 + margin) * room, middle + (0.5 + margin) * room)


def _spans(held: Tensor) -> list[tuple[int, int]]:
    """First and one past the last decision of every run with ``held`` > 0."""
    spans: list[tuple[int, int]] = []
    for i, count in enumerate(held.tolist()):
        if count > 0 and spans and spans[-1][1] == i:
            spans[-1] = (spans[-1][0], i + 1)
        elif count > 0:
            spans.append((i, i + 1))
    return spans


def _draw_climb(record: EpisodeRecord, height: Any, forward: Any, feet: Any) -> None:
    dt, deck = decision_period(record), deck_box(record)
    time = torch.arange(len(record.states)) * dt
    base = record.states[:, :3].double().cpu()
    height.plot(time, base[:, 2], color=_BLUE, linewidth=2.0, label="base")
    forward.plot(time, base[:, 0], color=_BLUE, linewidth=2.0, label="base")
    marks = [base[:, 2]]
    if deck is not None:
        height.axhline(deck.top, color=_INK, linewidth=1.4, label="deck")
        needed = deck.top + _CLEARANCE
        height.axhline(needed, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)), label="needed")
        marks.append(torch.tensor([0.0, needed]))
        low, high = _extent(deck)
        forward.axhspan(low, high, color=_DECK, alpha=0.45, linewidth=0, label="above deck")
    _limits(height, marks, least=0.2)
    _limits(forward, [base[:, 0], torch.tensor([0.0, 1.4])], least=0.5)
    feet.step(time[1:], record.feet_on_deck.double().cpu(), where="post", color=_ORANGE, linewidth=2.0)
    feet.set_ylim(-0.3, 4.3)
    feet.set_yticks(range(5))
    for axes in (height, forward, feet):
        for n, (start, end) in enumerate(_spans(record.held)):
            # ``held`` of decision i judges the state after it.
            axes.axvspan(
                (start + 1) * dt - 0.5 * dt,
                end * dt + 0.5 * dt,
                color=_GREEN,
                alpha=0.16,
                linewidth=0,
                label="success held" if n == 0 and axes is height else None,
            )
    _label(height, None, "height z [m]")
    _label(forward, None, "forward x [m]")
    _label(feet, "time [s]", "feet on deck")
    feet.set_xlim(0.0, max(float(time[-1]), dt))


def _draw_planning_time(record: EpisodeRecord, axes: Any) -> None:
    spent = record.planning_ms.double().cpu()
    number = torch.arange(len(spent))
    later = _finite(spent[1:])
    axes.plot(number[1:], spent[1:], color=_SKY, linewidth=1.0)
    axes.plot(number[1:], spent[1:], ".", color=_BLUE, markersize=5, label="decision")
    if len(later):
        median, p90 = (float(torch.quantile(later, q)) for q in (0.5, 0.9))
        axes.axhline(median, color=_INK, linewidth=1.4, label=f"median {median:.1f} ms")
        axes.axhline(p90, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)), label=f"p90 {p90:.1f} ms")
        axes.set_ylim(0.0, 1.12 * float(later.max()))
    else:
        _absent(axes, "no planning time after the first decision")
    period = 1000.0 * decision_period(record)
    if len(later) and period < axes.get_ylim()[1]:
        axes.axhline(period, color=_RED, linewidth=1.4, linestyle=":", label=f"real time {period:.0f} ms")
    if len(spent) and math.isfinite(float(spent[0])):
        # Off the scale: more refinements, and kernels that are compiled or loaded.
        axes.plot([], [], " ", label=f"first {float(spent[0]):.0f} ms,\nnot counted")
    _label(axes, "decision", "planning time [ms]")
    axes.set_xlim(0, max(1, len(spent) - 1))


def _draw_score(record: EpisodeRecord, score: Any, samples: Any) -> None:
    number = torch.arange(len(record.score))
    score.plot(
        number,
        record.score.double().cpu(),
        color=_BLUE,
        linewidth=1.8,
        label="plan, predicted mean",
    )
    score.plot(number, record.reward.double().cpu(), color=_ORANGE, linewidth=1.8, label="state, executed")
    _limits(score, [record.score.cpu(), record.reward.cpu()], least=0.05)
    samples.plot(number, record.effective_samples.double().cpu(), color=_GREEN, linewidth=1.8)
    most = _finite(record.effective_samples.double().cpu())
    samples.set_ylim(0.0, 1.12 * float(most.max()) if len(most) else 1.0)
    _label(score, None, "reward per step")
    _label(samples, "decision", "effective samples")
    samples.set_xlim(0, max(1, len(number) - 1))


def _draw_on_plan_error(record: EpisodeRecord, axes: Any) -> None:
    held_out = record.summary.get("held_out_error") or {}
    drawn = []
    for horizon, errors in sorted(record.on_plan_error.items()):
        values = 1000.0 * errors.double().cpu()
        if not len(_finite(values)):
            continue
        colour = _HORIZON_COLOURS.get(horizon, _GREEN)
        number = record.plan_decisions.cpu()
        if len(number) != len(values):
            number = torch.arange(len(values))
        middle = float(_finite(values).median())
        axes.plot(
            number,
            values,
            color=colour,
            linewidth=1.7,
            label=f"{horizon} steps, median {middle:.0f} mm",
        )
        drawn.append(values)
        reference = held_out.get(str(horizon), held_out.get(horizon))
        if isinstance(reference, int | float) and math.isfinite(reference):
            axes.axhline(
                1000.0 * reference,
                color=colour,
                linewidth=1.3,
                linestyle=(0, (4, 3)),
                label=f"{horizon} steps, held out {1000.0 * reference:.0f} mm",
            )
            drawn.append(torch.tensor([1000.0 * reference]))
    if drawn:
        high = float(_finite(torch.cat([d.double() for d in drawn])).max())
        axes.set_ylim(0.0, 1.08 * max(high, 1e-3))
    else:
        _absent(axes, "no plan was replayed in the engine")
    _label(axes, "decision", "base position error [mm]")
    axes.set_xlim(0, max(1, len(record.controls) - 1))


def _draw_plans(record: EpisodeRecord, axes: Any) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    deck = deck_box(record)
    base = record.states[:, :3].double().cpu()
    if deck is not None:
        low, high = _extent(deck)
        axes.add_patch(Rectangle((low, 0.0), high - low, deck.top, facecolor=_DECK, edgecolor=_FAINT, zorder=0.8))
        axes.text(0.5 * (low + high), 0.5 * deck.top, "deck", ha="center", va="center", color=_INK)
    axes.axhline(0.0, color=_FAINT, linewidth=1.4)
    axes.plot(base[:, 0], base[:, 2], color=_FAINT, linewidth=1.2, label="executed")
    total = len(record.plan_decisions)
    shown = sorted({round(i * (total - 1) / (_SHOWN_PLANS - 1)) for i in range(_SHOWN_PLANS)})
    shown = [i for i in shown if i >= 0 and record.plans_engine.shape[1]]
    period = decision_period(record)
    for n, i in enumerate(shown):
        colour = colormaps["viridis"](0.85 * n / max(1, len(shown) - 1))
        engine, model = record.plans_engine[i].cpu(), record.plans_predicted[i].cpu()
        start = period * int(record.plan_decisions[i])
        axes.plot(engine[:, 0], engine[:, 2], color=colour, linewidth=2.2, label=f"plan at {start:.2f} s")
        axes.plot(model[:, 0], model[:, 2], color=colour, linewidth=1.8, linestyle=(0, (3, 1.6)))
        axes.plot(engine[:1, 0], engine[:1, 2], "o", color=colour, markersize=5)
    if shown:
        axes.plot([], [], color=_INK, linewidth=2.2, label="in the engine")
        axes.plot([], [], color=_INK, linewidth=1.8, linestyle=(0, (3, 1.6)), label="in the model")
    axes.set_aspect("equal", adjustable="datalim")
    _label(axes, "forward x [m]", "height z [m]")


def _extent(box: Box) -> tuple[float, float]:
    """Smallest and largest world x of a box [m]."""
    c, s = abs(math.cos(box.yaw)), abs(math.sin(box.yaw))
    reach = c * box.half_size[0] + s * box.half_size[1]
    return box.center[0] - reach, box.center[0] + reach
