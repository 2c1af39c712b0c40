"""What is in a folder: a run's progress, a model's sizes, or a dataset (:mod:`.coverage`). Nothing is written.

:func:`inspect` tells from the folder's files which of the three it is. Every report is a frozen
dataclass whose ``asdict`` is a JSON document.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .artifact import Model, load_model
from .coverage import DatasetReport, count_bad, inspect_dataset
from .dataset import MANIFEST
from .model import FlashNerd
from .robot import RobotSpec
from .run import BEST, CHECKPOINT, METRICS
from .storage import read_json, readable
from .train import CONFIG

__all__ = [
    "ModelReport",
    "RunReport",
    "inspect",
    "inspect_model",
    "inspect_run",
    "kind_of",
]

BYTES = 4
"""Bytes of a float32 number."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What :func:`inspect_run` found.

    Attributes:
        robot: Name of the robot.
        robot_digest: SHA-256 of its description.
        datasets: Digests of the training data.
        settings: The run's training settings.
        architecture: Kind of network.
        model: Sizes of the network.
        context: Kind of context encoder; None without one.
        init_from: Model folder that the run started from; None if from scratch.
        step: Last update that an evaluation or the checkpoint knows of.
        total_steps: Updates of both phases together.
        boundary: Update at which the recursive phase starts; None if the run has one phase.
        checkpoint_step: Update that a resume goes on from; None before the first checkpoint.
        evaluations: Lines of ``metrics.jsonl``, in order.
        cut_short: The last line is incomplete: the run was killed while writing it, or writes now.
        best: The evaluation with the least held-out rollout error; None if none was finite.
        best_model: A model folder ``best`` exists.
    """

    robot: str
    robot_digest: str
    datasets: tuple[str, ...]
    settings: dict[str, Any]
    architecture: str
    model: dict[str, Any]
    context: str | None
    init_from: str | None
    step: int
    total_steps: int
    boundary: int | None
    checkpoint_step: int | None
    evaluations: tuple[dict[str, Any], ...]
    cut_short: bool
    best: dict[str, Any] | None
    best_model: bool


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """What :func:`inspect_model` found.

    Attributes:
        name: Name of the model.
        robot: Name of the robot.
        robot_digest: SHA-256 of its description.
        dt: Model step [s].
        architecture: Kind of network.
        config: Its sizes.
        parameters: Trained numbers.
        parts: Trained numbers of each part.
        receptive_field: Time samples that can influence a prediction.
        context: ``kind`` and ``config`` of the context encoder; None without one.
        cache_bytes_formula: Bytes that one world's cache takes by Σ S·2·d·4 over the blocks' spans S,
            keys and values of width d in float32; None for networks without rings.
        cache_bytes: Bytes of one world that the cache really takes, its counter of 8 B included.
        datasets: Digests of the training data.
        training: Settings that it was trained with.
        metrics: Held-out error when it was saved.
        weights_sha256: SHA-256 of the weights, which agrees with the file.
        versions: Versions of the libraries that saved it.
    """

    name: str
    robot: str
    robot_digest: str
    dt: float
    architecture: str
    config: dict[str, Any]
    parameters: int
    parts: dict[str, int]
    receptive_field: int
    context: dict[str, Any] | None
    cache_bytes_formula: int | None
    cache_bytes: int
    datasets: tuple[str, ...]
    training: dict[str, Any]
    metrics: dict[str, Any]
    weights_sha256: str
    versions: dict[str, Any]


def kind_of(path: str | Path) -> str:
    """Whether a folder is a ``dataset``, a ``run`` or a ``model``.

    Raises:
        ValueError: It is none of them.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path}: {what}, expected the folder of a dataset, a run or a model")
    if (path / MANIFEST).exists():
        kinds = {"nerd-dataset": "dataset", "nerd-model": "model"}
        found = read_json(path / MANIFEST, what="manifest").get("format")
        if found not in kinds:
            raise ValueError(f"{path}: manifest's format is {found!r}, expected one of {', '.join(kinds)}")
        return kinds[found]
    if (path / CONFIG).exists():
        return "run"
    raise ValueError(f"{path}: holds no {MANIFEST} and no {CONFIG}, expected a dataset, a run or a model")


def inspect(path: str | Path) -> DatasetReport | RunReport | ModelReport:
    """Look into a folder of any kind.

    Raises:
        ValueError: It is no dataset, run or model, or is damaged; the message names the file.
    """
    look = {"dataset": inspect_dataset, "run": inspect_run, "model": inspect_model}
    return look[kind_of(path)](path)


def inspect_run(path: str | Path) -> RunReport:
    """Read a run folder, one that is being written included.

    Raises:
        ValueError: Not a run, or damaged files.
    """
    path = Path(path)
    config = read_json(path / CONFIG, what="run")
    with readable(path / CONFIG):
        settings = dict(config["train"])
        robot = RobotSpec.from_json(config["robot"])
        steps, recursive = int(settings["steps"]), int(settings["recursive_steps"])
        context = config["context"]
        datasets, init_from = tuple(config["datasets"]), config["init_from"]
        kind = None if context is None else str(context["kind"])
        architecture, model = config.get("architecture", "flash-nerd"), dict(config["model"])
    with readable(path / METRICS):
        evaluations, cut_short = _evaluations(path / METRICS)
        finite = [row for row in evaluations if row["rollout_error_mean"] is not None]
        last = [int(row["step"]) for row in evaluations[-1:]]
    checkpoint = _checkpoint_step(path / CHECKPOINT)
    return RunReport(
        robot=robot.name,
        robot_digest=robot.digest(),
        datasets=datasets,
        settings=settings,
        architecture=architecture,
        model=model,
        context=kind,
        init_from=init_from,
        step=max([0, *last, *([] if checkpoint is None else [checkpoint])]),
        total_steps=steps + recursive,
        boundary=steps if steps and recursive else None,
        checkpoint_step=checkpoint,
        evaluations=evaluations,
        cut_short=cut_short,
        best=min(finite, key=lambda row: row["rollout_error_mean"], default=None),
        best_model=(path / BEST / MANIFEST).exists(),
    )


def inspect_model(path: str | Path) -> ModelReport:
    """Load a model folder and say what it is.

    Raises:
        ValueError: Damaged, unknown, of a context whose package is not installed, or with weights
            that are not finite.
    """
    model, manifest = load_model(path)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: weights {name!r} hold {count_bad(tensor)}")
    parts: dict[str, int] = {}
    for name, weights in model.named_parameters():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + weights.numel()
    config = model.config
    return ModelReport(
        name=manifest["name"],
        robot=model.robot.name,
        robot_digest=model.robot.digest(),
        dt=model.robot.dt,
        architecture=manifest["architecture"],
        config=asdict(config),
        parameters=model.num_parameters,
        parts=parts,
        receptive_field=config.receptive_field,
        context=manifest["context"],
        cache_bytes_formula=(
            sum(span * 2 * model.config.width * BYTES for span in model.config.spans)
            if isinstance(model, FlashNerd)
            else None
        ),
        cache_bytes=_cache_bytes(model, 2) - _cache_bytes(model, 1),
        datasets=tuple(manifest["datasets"]),
        training=manifest["training"],
        metrics=manifest["metrics"],
        weights_sha256=manifest["weights_sha256"],
        versions=manifest.get("versions", {}),
    )


def _evaluations(path: Path) -> tuple[tuple[dict[str, Any], ...], bool]:
    """Lines of ``metrics.jsonl``, and whether the last one is incomplete."""
    if not path.exists():
        return (), False
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number == len(lines):
                return tuple(rows), True
            raise ValueError(f"{path}: line {number} is not valid JSON, expected one evaluation a line") from None
    return tuple(rows), False


def _checkpoint_step(path: Path) -> int | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return int(file.get_tensor("step"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: this checkpoint is damaged ({error})") from None


def _cache_bytes(model: Model, worlds: int) -> int:
    def size(value: Any) -> int:
        return value.nbytes if isinstance(value, Tensor) else sum(map(size, value))

    return size(model.init_cache(worlds))
