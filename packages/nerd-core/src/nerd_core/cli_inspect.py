"""The commands that look at things: ``nerd-core inspect`` and ``nerd-core compare``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from .artifact import load_model
from .command import print_json, say
from .comparison import Comparison, compare, held_out_rows
from .coverage import DatasetReport, coverage
from .dataset import TrajectoryDataset, check_seed
from .device import select_device
from .evaluate import affine_baseline
from .figures import check_plot, comparison_figure, coverage_figure, save_figure, training_figure
from .inspection import RunReport, inspect, kind_of
from .tables import comparison_table, dataset_tables, model_tables, run_tables

__all__ = ["Compare", "Inspect", "Rollouts"]

AFFINE_TRAJECTORIES = 2000


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what is in a dataset, a run or a model; nothing is changed.

    Tables go to standard error. The last line on standard output is one JSON document.

    Example: nerd-core inspect cartpole-data --plot coverage.png
    """

    path: tyro.conf.Positional[Path]
    """Folder of a dataset, a run or a model."""
    plot: Path | None = None
    """Figure to write (.png, .svg or .pdf): coverage of a dataset, curves of a run."""

    def run(self) -> None:
        """Look, print tables, then the JSON document."""
        kind = kind_of(self.path)
        if self.plot is not None:
            if kind == "model":
                raise ValueError("plot: a model has no figure; expected a dataset or a run")
            check_plot(self.plot)
        report = inspect(self.path)
        if isinstance(report, DatasetReport):
            tables = dataset_tables(report)
            figure = self.plot and coverage_figure(report, coverage(TrajectoryDataset.open(self.path), report))
        elif isinstance(report, RunReport):
            tables, figure = run_tables(report), self.plot and training_figure(report)
        else:
            tables, figure = model_tables(report), None
        _finish(tables, figure, self.plot, {"command": "inspect", "kind": kind, **asdict(report)})


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Which rollouts are judged; what ``eval`` and ``compare`` share."""

    horizons: tuple[int, ...] = (1, 15, 100, 200)
    """Steps H; those beyond the trajectories are left out."""
    start: int = 0
    """Frame that rollouts start from."""
    history: int = 0
    """True frames before the start that the model has seen."""
    max_trajectories: int = 4096
    """Trajectories to evaluate, at most."""
    seed: int = 0
    """Seed of the bootstrap."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def check(self) -> None:
        """Refuse what no evaluation could use, before anything is loaded."""
        if self.max_trajectories < 1:
            raise ValueError(f"--max-trajectories is {self.max_trajectories}, expected at least 1")
        check_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class Compare(Rollouts):
    """Rollout error of several models on the same held-out trajectories, with paired ratios to the first.

    Only trajectories that none of the models was trained on are used. The last line on standard
    output is one JSON document.

    Example: nerd-core compare run-a run-b --dataset cartpole-data --plot compare.png
    """

    models: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders or model folders."""
    dataset: Path
    """Dataset folder."""
    plot: Path | None = None
    """Figure of E_H over H to write (.png, .svg or .pdf)."""

    def run(self) -> None:
        """Compare, print the table, then the JSON document."""
        self.check()
        if not self.models:
            raise ValueError("models: got none, expected at least one run or model folder")
        if self.plot is not None:
            check_plot(self.plot)
        names = _labels(self.models)
        dataset, device = TrajectoryDataset.open(self.dataset), select_device(self.device)
        loaded = {name: load_model(path, robot=dataset.robot) for name, path in zip(names, self.models, strict=True)}
        manifests = {name: manifest for name, (_, manifest) in loaded.items()}
        rows, known, knowing = held_out_rows(dataset, manifests)
        everything = dataset.load()
        fit = (known if len(known) else rows)[:AFFINE_TRAJECTORIES]
        affine = affine_baseline(dataset.robot, everything.select(fit))
        encoders = {name: model.context_encoder for name, (model, _) in loaded.items()}
        found = compare(
            {name: model.to(device) for name, (model, _) in loaded.items()},
            everything.select(rows[: self.max_trajectories], device),
            horizons=self.horizons,
            observers={name: encoder.observe for name, encoder in encoders.items() if encoder is not None},  # type: ignore[misc]
            start=self.start,
            history=self.history,
            affine=affine.to(device),
            seed=self.seed,
        )
        document = {
            "command": "compare",
            "dataset_digest": dataset.digest,
            "engine": dataset.manifest["engine"],
            "held_out_from": list(knowing),
            "affine_fitted_on": "training split" if len(known) else "evaluation data",
            "definition": "sqrt(mean over trajectories and channels of (error / sigma)^2)",
            "ratio": f"E_H over that of {names[0]}, paired bootstrap over trajectories",
            "device": str(device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seed": self.seed,
            **_comparison_json(found, manifests),
        }
        figure = self.plot and comparison_figure(found)
        parameters = {name: manifest["parameters"] for name, manifest in manifests.items()}
        _finish([comparison_table(found, parameters)], figure, self.plot, document)


def _finish(tables: Iterable[Table], figure: Any, plot: Path | None, document: dict[str, Any]) -> None:
    """Tables to standard error, the figure to its file, the document to standard output."""
    if plot is not None:
        save_figure(figure, plot)
    console = Console(stderr=True)
    # A log file has no width; rich would squeeze the tables into 80 columns.
    console.width = console.width if console.is_terminal else 110
    for table in tables:
        console.print(table)
    if plot is not None:
        say(f"figure: {plot}")
    print_json(document)


def _comparison_json(found: Comparison, manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    rows = ("at_step", "low", "high", "median", "diverged", "ratio", "ratio_low", "ratio_high")
    models = [
        {
            "name": model.name,
            "architecture": manifests[model.name]["architecture"],
            "parameters": manifests[model.name]["parameters"],
            "weights_sha256": manifests[model.name]["weights_sha256"],
            "horizons": [
                {"horizon": horizon, **{row: getattr(model, row)[horizon - 1] for row in rows}}
                for horizon in found.horizons
            ],
            "curve": {row: getattr(model, row) for row in ("at_step", "low", "high")},
        }
        for model in found.models
    ]
    return asdict(found) | {"models": models}


def _labels(paths: Sequence[Path]) -> list[str]:
    """The folders' names from where their paths part, so that tables and legends stay short.

    Raises:
        ValueError: A folder is given twice.
    """
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        twice = next(path for path, own in zip(paths, parts, strict=True) if parts.count(own) > 1)
        raise ValueError(f"models: {twice} is given twice, expected different folders")
    shared = 0
    while all(len(own) > shared + 1 and own[shared] == parts[0][shared] for own in parts):
        shared += 1
    return ["/".join(own[shared:]) for own in parts]
