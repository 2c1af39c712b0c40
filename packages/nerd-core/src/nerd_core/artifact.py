"""A released model: a folder with ``weights.safetensors`` and ``manifest.json``, format version 1.

Keys of the manifest: ``format``, ``format_version``, ``name``, ``robot``, ``robot_digest``,
``architecture`` and ``config`` (the network), ``context`` (``kind`` and ``config`` of the context
encoder, or null), ``parameters`` (trained numbers), ``weights_sha256``, ``datasets`` (digests of
the training data), ``training``, ``metrics`` and ``versions``. Nothing is pickled. Two saves of the
same model give the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .baseline import NerdBaseline, NerdBaselineConfig
from .model import FlashNerd, FlashNerdConfig
from .robot import RobotSpec
from .storage import (
    TEMPORARY_SUFFIX,
    as_json,
    publish_directory,
    read_json,
    read_tensors,
    readable,
    sha256_of,
    write_json,
    write_tensors,
)

__all__ = ["Model", "ModelConfig", "build_model", "context_json", "load_context_encoder", "load_model", "save_model"]

Model = FlashNerd | NerdBaseline
ModelConfig = FlashNerdConfig | NerdBaselineConfig

FORMAT = "nerd-model"
FORMAT_VERSION = 1
ARCHITECTURES: dict[str, type[ModelConfig]] = {"flash-nerd": FlashNerdConfig, "nerd-baseline": NerdBaselineConfig}
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
BEST = "best"
ADDED_SETTINGS = {"readout_sharpness": 0.0}
"""Settings that models from before they existed lack, and what those models have."""
CONTEXT_GROUP = "nerd_core.context"
META_KEYS = ("name", "datasets", "training", "metrics")


def build_model(config: ModelConfig, robot: RobotSpec, context_encoder: nn.Module | None = None) -> Model:
    """A fresh network of the kind that ``config`` describes.

    Args:
        config: Sizes; their type picks the architecture.
        robot: The robot; its codec gives tokens and increments.
        context_encoder: Reads the surroundings; None for robots that touch nothing.
    """
    if isinstance(config, NerdBaselineConfig):
        return NerdBaseline(config, robot, context_encoder)
    return FlashNerd(config, robot, context_encoder)


def save_model(
    path: str | Path,
    model: Model,
    meta: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write a model folder, atomically.

    Args:
        path: Folder to create.
        model: The network, its context encoder included.
        meta: JSON values under ``name``, ``datasets``, ``training`` and ``metrics``; each optional.
        overwrite: Replace an existing folder.

    Returns:
        ``path``.

    Raises:
        ValueError: ``path`` exists, ``meta`` has other keys, or ``model`` is a folded copy.
    """
    path, meta = Path(path), dict(meta or {})
    if isinstance(model, NerdBaseline) and model.is_folded:
        raise ValueError("model: a folded copy is for inference only, expected the model that it was made from")
    if unknown := sorted(meta.keys() - set(META_KEYS)):
        raise ValueError(f"meta: unknown keys {unknown}, expected some of {list(META_KEYS)}")
    if path.exists() and not overwrite:
        raise ValueError(f"path: {path} exists; an artifact is never overwritten")
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    digest = write_tensors(temporary / WEIGHTS, model.state_dict())
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": meta.get("name", model.robot.name),
        "robot": model.robot.to_json(),
        "robot_digest": model.robot.digest(),
        "architecture": _architecture(model.config),
        "config": asdict(model.config),
        "context": context_json(model.context_encoder),
        "parameters": model.num_parameters,
        "weights_sha256": digest,
        "datasets": meta.get("datasets", []),
        "training": meta.get("training", {}),
        "metrics": meta.get("metrics", {}),
        "versions": {"torch": torch.__version__},
    }
    write_json(temporary / MANIFEST, as_json(manifest))
    publish_directory(temporary, path, overwrite=overwrite)
    return path


def load_model(path: str | Path, *, robot: RobotSpec | None = None) -> tuple[Model, dict[str, Any]]:
    """Read a model folder back.

    Args:
        path: The folder, or a run folder, whose best model is taken.
        robot: If given, the model must have been made for exactly this robot.

    Returns:
        The model in evaluation mode on the CPU, and its manifest.

    Raises:
        ValueError: Missing or damaged files, a newer format, another robot (every difference is
            listed), unknown settings, or a context encoder whose package is not installed.
    """
    path = Path(path)
    path = path / BEST if (path / BEST).is_dir() else path
    with readable(path / MANIFEST):
        return _load(path, robot)


def _load(path: Path, robot: RobotSpec | None) -> tuple[Model, dict[str, Any]]:
    manifest = read_json(path / MANIFEST, what="model manifest")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not a model (format {manifest.get('format')!r})")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: model format_version {manifest.get('format_version')!r}, this nerd-core reads {FORMAT_VERSION}"
        )
    wanted = {"robot", "robot_digest", "architecture", "config", "context", "weights_sha256"}
    if absent := sorted(wanted - manifest.keys()):
        raise ValueError(f"{path}: model manifest lacks {', '.join(absent)}")
    kinds = {"name": str, "parameters": int, "datasets": list, "training": dict, "metrics": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise ValueError(f"{path}: model manifest's {key} is {manifest.get(key)!r}, expected a {kind.__name__}")
    made_for = RobotSpec.from_json(manifest["robot"])
    if made_for.digest() != manifest["robot_digest"]:
        raise ValueError(f"{path}: the robot in this model's manifest was edited")
    if robot is not None and (gaps := made_for.differences(robot)):
        raise ValueError(f"{path}: made for another robot: {'; '.join(gaps)}")
    known = list(ARCHITECTURES)
    if manifest["architecture"] not in known:
        raise ValueError(f"{path}: architecture {manifest['architecture']!r}, expected one of {', '.join(known)}")
    weights = path / WEIGHTS
    if not weights.exists():
        raise ValueError(f"{weights}: no such weights file")
    if sha256_of(weights) != manifest["weights_sha256"]:
        raise ValueError(f"{weights}: truncated or edited, its SHA-256 is not the manifest's")
    config = _config_from_json(path, ARCHITECTURES[manifest["architecture"]], manifest["config"])
    model = build_model(config, made_for, load_context_encoder(manifest["context"], made_for))
    try:
        model.load_state_dict(read_tensors(weights, what="weights file"), strict=True)
    except RuntimeError as error:
        raise ValueError(f"{weights}: does not fit its manifest: {_one_line(error)}") from None
    return model.eval(), manifest


def context_json(encoder: nn.Module | None) -> dict[str, Any] | None:
    """Name and settings of a context encoder, from its ``kind`` and ``config_json()``.

    Raises:
        ValueError: The encoder has none, so a saved model could not be loaded again.
    """
    if encoder is None:
        return None
    kind, describe = getattr(encoder, "kind", None), getattr(encoder, "config_json", None)
    if not isinstance(kind, str) or not callable(describe):
        raise ValueError(
            f"context_encoder: to be saved, {type(encoder).__name__} needs config_json() and kind, "
            f"a name of the entry point group {CONTEXT_GROUP!r}"
        )
    return as_json({"kind": kind, "config": describe()})


def load_context_encoder(description: Mapping[str, Any] | None, robot: RobotSpec) -> nn.Module | None:
    """Build the encoder that :func:`context_json` described, through the installed plugins.

    Args:
        description: ``kind``, a name of the entry point group, and ``config``; or None.
        robot: The robot that the encoder looks at.

    Raises:
        ValueError: No installed package offers this kind, or it refuses the settings.
    """
    if description is None:
        return None
    kind = description.get("kind")
    plugins = {entry.name: entry for entry in entry_points(group=CONTEXT_GROUP)}
    if kind not in plugins:
        offered = ", ".join(sorted(plugins)) or "none"
        raise ValueError(
            f"context {kind!r}: no installed package offers it (installed: {offered}); "
            "contact encoders come with the package nerd-contact"
        )
    return plugins[kind].load()(dict(description.get("config", {})), robot)


def _architecture(config: ModelConfig) -> str:
    return next(name for name, kind in ARCHITECTURES.items() if isinstance(config, kind))


def _config_from_json(path: Path, kind: type[ModelConfig], data: Mapping[str, Any]) -> ModelConfig:
    known = {field.name for field in fields(kind)}
    added: dict[str, Any] = {key: value for key, value in ADDED_SETTINGS.items() if key in known}
    data = added | dict(data)
    if data.keys() != known:
        unknown, absent = sorted(data.keys() - known), sorted(known - data.keys())
        raise ValueError(f"{path}: config has unknown keys {unknown} and lacks {absent}")
    return kind(**data)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
