"""What the commands that look at things print: tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from .comparison import Comparison, Curve
from .coverage import DatasetReport, FieldRange
from .inspection import ModelReport, RunReport

__all__ = ["comparison_table", "dataset_tables", "model_tables", "run_tables"]

SHOWN_ROWS = 24


def dataset_tables(report: DatasetReport) -> Iterable[Table]:
    """Facts, channels, surroundings, rejections and shards of a dataset."""
    size = sum(shard["bytes"] for shard in report.shards)
    rejected = sum(report.rejected.values())
    yield _facts(
        f"dataset of {report.robot}",
        {
            "trajectories": f"{report.trajectories:,} of {report.horizon} steps of {report.dt:.6g} s",
            "transitions": f"{report.transitions:,}",
            "engine": _settings(report.engine),
            "versions": _settings(report.versions),
            "seed": str(report.seed),
            "digest": f"{report.digest} (verified: every shard has its size and SHA-256)",
            "robot digest": report.robot_digest,
            "shards": f"{len(report.shards)}, {_size(size)}",
            "idle channels": ", ".join(c.name for c in (*report.states, *report.controls) if c.idle) or "none",
            "not finite": "none, in any state, control or scene",
            "rejected": f"{rejected:,} ({rejected / max(rejected + report.trajectories, 1):.2%} of those recorded)",
        },
    )
    yield _table(
        "channels",
        ("channel", "unit", "min", "mean", "std", "max"),
        [
            (
                channel.name + (" (idle)" if channel.idle else ""),
                channel.unit,
                *(f"{value + 0.0:.4g}" for value in (channel.min, channel.mean, channel.std, channel.max)),  # no -0
            )
            for channel in (*report.states, *report.controls)
        ],
    )
    if report.scenes:
        yield _table("surroundings", ("field", "shape", "type", "min", "max"), map(_field, report.scenes))
    if report.rejected:
        yield _table("rejected", ("reason", "trajectories"), [(k, f"{v:,}") for k, v in report.rejected.items()])
    shards = [(s["file"], f"{s['rows']:,}", _size(s["bytes"])) for s in report.shards]
    yield _table("shards", ("file", "trajectories", "size"), _thinned(shards))


def run_tables(report: RunReport) -> Iterable[Table]:
    """Facts of a run and its evaluations."""
    share = report.step / max(report.total_steps, 1)
    saved = "none yet" if report.checkpoint_step is None else f"at update {report.checkpoint_step:,}"
    yield _facts(
        f"training run of {report.robot}",
        {
            "progress": f"update {report.step:,} of {report.total_steps:,} ({share:.0%})",
            "checkpoint": saved,
            "evaluations": f"{len(report.evaluations)}{', the last line is cut short' if report.cut_short else ''}",
            "best": _best(report),
            "recursive phase": "none" if report.boundary is None else f"from update {report.boundary:,}",
            "model": f"{report.architecture}: {_settings(report.model)}",
            "context": report.context or "none",
            "started from": report.init_from or "scratch",
            "settings": _settings(report.settings),
            "robot digest": report.robot_digest,
            "datasets": "\n".join(report.datasets),
        },
    )
    if report.evaluations:
        horizons = sorted(report.evaluations[0]["rollout_error"], key=int)
        heads = ("update", "phase", "lr", "loss", "held-out loss", *(f"E_{h}" for h in horizons), "mean 1..max")
        rows = [
            (
                f"{row['step']:,}{' *' if row is report.best else ''}",
                row["phase"],
                _digits(row["lr"]),
                _digits(row["loss"]),
                _digits(row["val_loss"]),
                *(_digits(row["rollout_error"].get(h)) for h in horizons),
                _digits(row["rollout_error_mean"]),
            )
            for row in report.evaluations
        ]
        starred = next((i for i, row in enumerate(report.evaluations) if row is report.best), None)
        yield _table("evaluations (* best)", heads, _thinned(rows, keep=starred))


def _best(report: RunReport) -> str:
    if report.best is None:
        return "none: no rollout error was finite" if report.evaluations else "none yet"
    where = "" if report.best_model else "; its model folder is missing"
    return f"update {report.best['step']:,}, mean rollout error {_digits(report.best['rollout_error_mean'])}{where}"


def model_tables(report: ModelReport) -> Iterable[Table]:
    """Facts of a model."""
    cache = f"{report.cache_bytes:,} B per world, its counter of 8 B included"
    if report.cache_bytes_formula is not None:
        spans, width = report.config["spans"], report.config["width"]
        terms = f"({' + '.join(map(str, spans))}) · 2 · {width} · 4 B"
        cache += f"\nby formula Σ S · 2 · d · 4 B = {terms} = {report.cache_bytes_formula:,} B"
    yield _facts(
        f"model {report.name}",
        {
            "robot": f"{report.robot}, model step {report.dt:.6g} s",
            "architecture": f"{report.architecture}: {_settings(report.config)}",
            "parameters": f"{report.parameters:,}: {', '.join(f'{k} {v:,}' for k, v in report.parts.items())}",
            "receptive field": f"{report.receptive_field} time samples",
            "context": "none" if report.context is None else _context(report.context),
            "cache": cache,
            "metrics": _settings(report.metrics) or "none recorded",
            "trained": _settings(report.training) or "not told",
            "datasets": "\n".join(report.datasets) or "none told",
            "robot digest": report.robot_digest,
            "weights": f"{report.weights_sha256} (verified)",
            "versions": _settings(report.versions),
        },
    )


def _context(context: Mapping[str, Any]) -> str:
    return f"{context['kind']}: {_settings(context['config'])}"


def comparison_table(found: Comparison, parameters: Mapping[str, int]) -> Table:
    """Errors of all models side by side, horizon by horizon, with the baselines below them."""
    table = _table(
        f"rollout error E_H, {found.num_trajectories:,} trajectories; ratio to {found.models[0].name}, paired",
        ("H", "model", "parameters", "E_H", "95 %", "ratio", "95 % paired", "diverged"),
        [],
        left=2,
    )
    for horizon in found.horizons:
        at = horizon - 1
        for index, model in enumerate(found.models):
            ratio = (
                ("1", "") if index == 0 else (_digits(model.ratio[at]), _span(model.ratio_low, model.ratio_high, at))
            )
            table.add_row(
                "" if index else str(horizon),
                model.name,
                f"{parameters[model.name]:,}",
                _digits(model.at_step[at]),
                _span(model.low, model.high, at),
                *ratio,
                f"{model.diverged[at]:.1%}",
            )
        table.add_row("", "no motion", "", _digits(found.zero_increment[at]))
        if found.affine is not None:
            table.add_row("", "affine", "", _digits(found.affine[at]))
        table.add_section()
    return table


def _facts(title: str, facts: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    """Words in the first ``left`` columns, numbers in the others."""
    table = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _thinned(rows: Sequence[Sequence[str]], keep: int | None = None) -> list[Sequence[str]]:
    """At most about 24 rows: evenly spaced ones, the last and the one to ``keep``."""
    stride = -(-len(rows) // SHOWN_ROWS)
    chosen = {len(rows) - 1, *range(0, len(rows), max(stride, 1)), *([] if keep is None else [keep])}
    return [rows[index] for index in sorted(chosen)]


def _field(field: FieldRange) -> tuple[str, ...]:
    return field.name, str(list(field.shape)), field.dtype, _digits(field.min), _digits(field.max)


def _settings(settings: Mapping[str, Any]) -> str:
    """Names and values on one line; a long list or a group only by its size."""

    def short(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6g}"
        if isinstance(value, Mapping):
            return f"{{{_settings(value)}}}"
        if isinstance(value, (list, tuple)) and (len(value) > 8 or any(isinstance(v, Mapping) for v in value)):
            return f"{len(value)} entries"
        return str(value)

    return ", ".join(f"{name} {short(value)}" for name, value in settings.items())


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} B"


def _span(low: Curve, high: Curve, at: int) -> str:
    return f"{_digits(low[at])} – {_digits(high[at])}"


def _digits(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
