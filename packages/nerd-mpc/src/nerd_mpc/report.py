"""The page that tells how an episode went: one HTML file with tables, figures and a film strip."""

from __future__ import annotations

import base64
import html
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import Tensor

from nerd_mpc.figures import decision_period, plots
from nerd_mpc.video import film_strip

if TYPE_CHECKING:
    from nerd_mpc.episode import EpisodeRecord

__all__ = ["plots", "write_report"]

_FILE = "report.html"
_ENDINGS = {
    "climbed": "Climbed",
    "timeout": "Did not climb: time ran out",
    "fell": "Did not climb: the robot fell",
    "off-deck": "Did not climb: the robot left the deck",
    "non-finite": "Did not climb: the state stopped being finite",
    "interrupted": "Interrupted",
    "penetration": "Did not climb: the robot sank into the ground by more than 3 cm",
}
_CAPTIONS = {
    "climb": (
        "The climb",
        "Base of the robot and its feet, as executed in the engine. Green: every condition of a "
        "success holds; it must hold for 0.5 s without a break.",
    ),
    "plans": (
        "Chosen plans, model against engine",
        "Path of the base along plans that the planner chose: dashed as the model predicted it, "
        "solid as the engine moves it from the same state under the same controls.",
    ),
    "on_plan_error": (
        "On-plan error",
        "Distance between those two paths after 5, 10 and 20 steps. Dashed: the model's median "
        "error on held-out trajectories, where it is known.",
    ),
    "planning_time": (
        "Planning time",
        "Wall time of each decision. The first one starts from nothing and is not counted.",
    ),
    "score": (
        "Planner",
        "Predicted mean reward of the chosen plan, reward of the executed state, and how many "
        "samples share the weight of an update.",
    ),
}
# Result and setting keys with a better name than their own.
_NAMES = {
    "time_to_top_s": "time to the top [s]",
    "longest_hold": "longest hold [decisions]",
    "deepest_penetration_m": "deepest penetration [m]",
    "peak_effort_fraction": "peak effort, of its limit",
    "planning_ms": "planning time [ms]",
    "on_plan_error_median_m": "on-plan error, median [m], steps",
    "held_out_error": "held-out error [m], steps",
    "height": "deck height [m]",
    "dt": "control period [s]",
    "p90": "90 %",
    "p99": "99 %",
}
_STYLE = """
:root { color-scheme: light; --ink: #1f2329; --soft: #5f6872; --line: #e2e6ea; --good: #00795a;
  --bad: #b34700; --card: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 4px; }
h1::before { content: ""; display: inline-block; width: .62em; height: .62em; margin-right: .4em;
  border-radius: 50%; background: var(--bad); }
h1.climbed::before { background: var(--good); }
h2 { font-size: 1.15rem; margin: 0 0 2px; }
p { margin: 0 0 12px; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 20px 0; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .875rem; }
section { padding: 18px 20px; margin: 16px 0; }
img, video { display: block; width: 100%; height: auto; }
video { max-width: 900px; margin: 12px auto 0; border-radius: 6px; background: #dfe3e7; }
figure { margin: 0 auto; max-width: 960px; }
.strip { overflow-x: auto; }
.strip img { min-width: 900px; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 0 40px; }
table { width: 100%; border-collapse: collapse; font-size: .925rem; align-self: start; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; padding: 5px 0; border-top: 1px solid var(--line); vertical-align: top; }
th { font-weight: 400; color: var(--soft); padding-right: 16px; }
td { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
"""


def write_report(
    record: EpisodeRecord,
    frames: Tensor | None,
    out_dir: str | Path,
    *,
    video: str | None = None,
) -> Path:
    """Write ``report.html``: one file that needs no other, except the video it may link.

    Args:
        record: The executed episode.
        frames: Pictures of every k-th executed state from the first on, as ``render_episode``
            makes them, shape (ceil((D + 1) / k), H, W, 3) uint8; None leaves the film strip out.
        out_dir: Folder of the report, made if it does not exist.
        video: File name of a video in the same folder, or None.

    Returns:
        Path of the page.

    Raises:
        ValueError: If the page exists, or the number of frames fits no k.
    """
    path = Path(out_dir) / _FILE
    if path.exists():
        raise ValueError(f"out_dir: {path} exists; an artifact is never overwritten")
    page = _page(record, frames, video)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_FILE}.tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def headline(record: EpisodeRecord) -> str:
    """One sentence: how it ended, on which deck, and when."""
    ending = _ENDINGS.get(record.outcome, f"Ended as {record.outcome}")
    terrain, height = record.settings.get("terrain"), record.settings.get("height")
    deck = " ".join(
        part
        for part in (
            "" if terrain is None else str(terrain),
            "" if height is None else f"({_number(height)} m)",
        )
        if part
    )
    seconds = record.summary.get("time_to_top_s")
    if record.outcome != "climbed":
        return f"{ending}, on {deck}" if deck else ending
    at = f" in {seconds:.2f} s" if isinstance(seconds, int | float) else ""
    return f"{ending} {deck or 'the deck'}{at}"


def _page(record: EpisodeRecord, frames: Tensor | None, video: str | None) -> str:
    settings = record.settings
    words = [str(settings.get(key, "")) for key in ("robot", "dynamics")]
    about = f"{words[0]}, planned in {words[1]}" if all(words) else " ".join(filter(None, words))
    title = html.escape(headline(record))
    climbed = ' class="climbed"' if record.outcome == "climbed" else ""
    parts = [
        f"<h1{climbed}>{title}</h1>",
        f"<p>{html.escape(about)}, seed {html.escape(_text(settings.get('seed')))}</p>",
        _tiles(record),
        _film(record, frames, video),
    ]
    images = plots(record)
    for name, (heading, words_below) in _CAPTIONS.items():
        parts.append(
            f"<section><h2>{html.escape(heading)}</h2><p>{html.escape(words_below)}</p>"
            f"<figure>{_image(images[name], heading)}</figure></section>"
        )
    parts.append(
        '<section class="tables">'
        f"{_table('Results', _flat(record.summary))}{_table('Settings', _flat(settings))}</section>"
    )
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _tiles(record: EpisodeRecord) -> str:
    """The handful of numbers that a reader looks for first."""
    later = record.planning_ms[1:].double()
    hold = _largest(record.held)
    effort = record.summary.get("peak_effort_fraction")
    tiles = [
        ("reached the top", _unit(record.summary.get("time_to_top_s"), "s")),
        ("most feet on deck", _unit(_largest(record.feet_on_deck))),
        ("longest hold", _unit(None if hold is None else hold * decision_period(record), "s")),
        ("planning, median", _unit(_quantile(later, 0.5), "ms")),
        ("planning, 90 %", _unit(_quantile(later, 0.9), "ms")),
        ("peak effort, of its limit", _unit(None if effort is None else 100.0 * effort, "%")),
    ]
    for horizon, errors in sorted(record.on_plan_error.items())[-1:]:
        middle = _quantile(1000.0 * errors.double(), 0.5)
        tiles.insert(5, (f"on-plan error, {horizon} steps", _unit(middle, "mm")))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in tiles
        )
        + "</div>"
    )


def _film(record: EpisodeRecord, frames: Tensor | None, video: str | None) -> str:
    """The film strip, and the video below it."""
    inside = ""
    if frames is not None:
        every = _frame_step(len(frames), len(record.states))
        period = decision_period(record)
        # State i follows decision i - 1; nothing was judged before the first.
        feet = [None, *record.feet_on_deck.tolist()][: len(record.states) : every]
        strip = film_strip(
            frames,
            [i * every * period for i in range(len(frames))],
            captions=["" if count is None else f"{int(count)} feet up" for count in feet],
        )
        inside += f'<div class="strip">{_image(strip, "Film strip of the episode")}</div>'
    if video is not None:
        inside += f'<video controls muted playsinline src="{html.escape(quote(video))}"></video>'
    return f"<section><h2>Film</h2>{inside}</section>" if inside else ""


def _frame_step(frames: int, states: int) -> int:
    """The smallest k such that every k-th of the states makes so many frames."""
    for every in range(1, states + 1):
        if math.ceil(states / every) == frames:
            return every
    raise ValueError(f"frames has {frames} pictures: no every k-th of {states} states are that many")


def _image(png: bytes, alternative: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{html.escape(alternative)}" src="data:image/png;base64,{data}">'


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(value)}</td></tr>' for name, value in rows
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Rows of a JSON object, inner objects with their name in front."""
    for key, value in document.items():
        name = f"{prefix}{_NAMES.get(str(key), str(key).replace('_', ' '))}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}: ")
        else:
            yield name, _text(value)


def _text(value: Any) -> str:
    """A JSON value for a reader."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value) or "none"
    return str(value)


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "n/a"


def _unit(value: float | None, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return "n/a"
    digits = f"{value:.0f}" if abs(value) >= 100.0 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def _largest(values: Tensor) -> int | None:
    return int(values.max()) if len(values) else None


def _quantile(values: Tensor, q: float) -> float | None:
    finite = values[torch.isfinite(values)]
    return float(finite.quantile(q)) if len(finite) else None
