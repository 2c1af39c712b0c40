"""What is served: a folder ``NAME.nerd``, or one exported file. Open :func:`read_artifact` first.

::

    NAME.nerd/
      model.onnx      the sealed file of nerd_deploy.manifest
      manifest.json   what that file says of itself, and the SHA-256 of the other two
      golden.npz      recursive steps that torch computed; see nerd_deploy.golden

``manifest.json``, format version 1: the keys of the file's own manifest, but ``format`` is
``nerd-artifact`` and ``format_version`` counts on its own; ``files`` (name to ``sha256`` and
``bytes``); ``golden`` (``steps``, ``worlds``, ``reset_at``, how far onnxruntime was from torch
when it was made, ``single_step`` and ``recursive``, and the ``tolerance``). Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .golden import Golden, read_golden
from .manifest import canonical_json, check_seal, metadata_entries, read_manifest

__all__ = ["Artifact", "model_bytes", "read_artifact", "write_artifact"]

FORMAT = "nerd-artifact"
FORMAT_VERSION = 1
SUFFIX = ".nerd"
MANIFEST, MODEL, GOLDEN = "manifest.json", "model.onnx", "golden.npz"

_OWN_KEYS = ("format", "format_version", "files", "golden")


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A checked artifact in memory.

    Attributes:
        where: Words that name it to the user.
        model: Content of the exported file.
        manifest: What the exported file says of itself.
        document: ``manifest.json`` of the folder; None for a single file.
        golden: Recorded steps; None for a single file.
    """

    where: str
    model: bytes
    manifest: Mapping[str, Any]
    document: Mapping[str, Any] | None
    golden: Golden | None


def read_artifact(source: str | Path | bytes) -> Artifact:
    """Read and check a folder, a file or a file's content.

    Args:
        source: Folder ``NAME.nerd``, exported file, or the content of one.

    Raises:
        ValueError: Missing, truncated, edited, foreign, or of a newer format version.
    """
    if isinstance(source, bytes):
        return _single("source", source)
    path = Path(source)
    return _folder(path) if path.is_dir() else _single(str(path), _bytes(path))


def model_bytes(source: str | Path | bytes) -> tuple[str, bytes]:
    """Words that name an artifact, and its ONNX file; of a folder, every file is checked.

    Raises:
        ValueError: As :func:`read_artifact`, but the manifest of a single file is left to the
            runtime.
    """
    if not isinstance(source, bytes) and Path(source).is_dir():
        found = _folder(Path(source))
        return found.where, found.model
    where = "source" if isinstance(source, bytes) else str(source)
    data = source if isinstance(source, bytes) else _bytes(Path(source))
    check_seal(data, where)
    return where, data


def write_artifact(
    out: Path, model: bytes, manifest: Mapping[str, Any], golden: bytes, told: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a folder that is whole from the moment it has its name.

    Args:
        out: Folder to create.
        model: Content of the exported file.
        manifest: What the file says of itself.
        golden: Content of ``golden.npz``.
        told: What ``manifest.json`` says of it.

    Returns:
        The document of ``manifest.json``.

    Raises:
        ValueError: ``out`` exists.
    """
    contents = {MODEL: model, GOLDEN: golden}
    files = {name: {"sha256": _sha256(data), "bytes": len(data)} for name, data in contents.items()}
    own = {"format": FORMAT, "format_version": FORMAT_VERSION, "files": files, "golden": dict(told)}
    document = {**manifest, **own}
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
        for name, data in {**contents, MANIFEST: text.encode()}.items():
            with open(temporary / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        # A rename would replace an empty folder without a word.
        if out.exists():
            raise ValueError(f"out: {out} exists; an artifact is never overwritten")
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return document


def _single(where: str, data: bytes) -> Artifact:
    check_seal(data, where)
    manifest = read_manifest(metadata_entries(data, where), where)
    return Artifact(where=where, model=data, manifest=manifest, document=None, golden=None)


def _folder(path: Path) -> Artifact:
    document = _document(path)
    contents = {name: _file(path / name, document["files"][name]) for name in (MODEL, GOLDEN)}
    check_seal(contents[MODEL], str(path / MODEL))
    manifest = read_manifest(metadata_entries(contents[MODEL], str(path / MODEL)), str(path / MODEL))
    described = {key: value for key, value in document.items() if key not in _OWN_KEYS}
    within = {key: value for key, value in manifest.items() if key not in _OWN_KEYS}
    if canonical_json(described) != canonical_json(within):
        keys = sorted(k for k in {*described, *within} if described.get(k) != within.get(k))
        raise ValueError(f"{path / MANIFEST}: edited; {', '.join(keys)} are not those inside {MODEL}")
    golden = read_golden(contents[GOLDEN], manifest, str(path / GOLDEN))
    return Artifact(where=str(path), model=contents[MODEL], manifest=manifest, document=document, golden=golden)


def _document(path: Path) -> dict[str, Any]:
    """``manifest.json``, as far as it can be judged without the other files."""
    where = path / MANIFEST
    try:
        document = json.loads(where.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise ValueError(f"{where}: no such file; {path} is not an artifact of nerd-deploy") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{where}: not of the format {FORMAT!r}; {path} is not an artifact of nerd-deploy")
    if document.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{where}: format_version {document.get('format_version')!r}, this nerd-deploy reads {FORMAT_VERSION}"
        )
    files = document.get("files")
    if not isinstance(files, dict) or set(files) != {MODEL, GOLDEN}:
        raise ValueError(f"{where}: files is {_short(files)}, expected {MODEL} and {GOLDEN}")
    if not isinstance(document.get("golden"), dict):
        raise ValueError(f"{where}: golden is {_short(document.get('golden'))}, expected an object")
    return document


def _file(path: Path, told: Any) -> bytes:
    data = _bytes(path)
    if not isinstance(told, dict) or told.get("sha256") != _sha256(data) or told.get("bytes") != len(data):
        raise ValueError(f"{path}: truncated or edited, its SHA-256 is not that of {MANIFEST}; export the model again")
    return data


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"{path}: no such file") from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
