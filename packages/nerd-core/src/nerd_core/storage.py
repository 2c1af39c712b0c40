"""Files that are either whole or absent: atomic JSON, atomic safetensors, hashes.

Every artifact of this project is written to a temporary sibling name and renamed, so a process that
is killed at any moment never leaves a file that could be mistaken for a finished one.

Tensors are written in the safetensors layout by :func:`write_tensors` itself, because
``safetensors.torch.save_file`` needs numpy, which nerd-core does not depend on. Reading goes
through safetensors' own ``safe_open``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

TEMPORARY_SUFFIX = ".tmp"
RETIRED_SUFFIX = ".old"

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(path: Path) -> None:
    """See that ``path`` could be created, before any work is done for it.

    Tried rather than asked: permission bits say nothing about a full or read-only file system, nor to root.

    Raises:
        ValueError: The nearest existing parent is not a folder, or nothing can be written there.
    """
    there = next(p for p in path.absolute().parents if os.path.lexists(p))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".nerd-", dir=there))
    except OSError as error:
        raise ValueError(
            f"out: {path} cannot be created, {there} is not a folder that can be written ({error.strerror})"
        ) from None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``document`` in one step; a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what an edited manifest breaks while it is read into one ValueError that names the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path}: not readable ({type(error).__name__}: {error}), expected the file as it was written"
        ) from None
    except ValueError as error:
        if str(path.parent) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from None


def read_json(path: Path, *, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.
        what: Words that name the file to the user, for example ``"dataset manifest"``.

    Raises:
        ValueError: The file is missing, is not JSON, or is not an object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: no such {what}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: this {what} is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: this {what} must hold a JSON object")
    return document


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write named tensors as one safetensors file, atomically and with the same bytes every time.

    Args:
        path: Destination; replaced in one step.
        tensors: Named tensors of any device; stored in name order, contiguous, on the CPU.

    Returns:
        Hex SHA-256 of the file.

    Raises:
        ValueError: A dtype that the format cannot hold.
    """
    stored = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in stored.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"tensors[{name!r}]: dtype {tensor.dtype} cannot be stored")
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the data block starts 8-byte aligned
    digest = hashlib.sha256()
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with open(temporary, "wb") as file:
        for chunk in (len(head).to_bytes(8, "little"), head, *map(_bytes_of, stored.values())):
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return digest.hexdigest()


def read_tensors(path: Path, *, what: str) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file onto the CPU.

    Raises:
        ValueError: The file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: no such {what}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: this {what} is damaged ({error})") from None


def publish_directory(temporary: Path, path: Path, *, overwrite: bool = False) -> None:
    """Rename a finished folder to its final name.

    Args:
        temporary: The folder that was written, a sibling of ``path``.
        path: The final name.
        overwrite: Replace an existing folder. A kill between the two renames leaves the old one
            under :func:`recover_directory`'s eyes.

    Raises:
        ValueError: ``path`` exists and ``overwrite`` is false.
    """
    if not path.exists():
        os.rename(temporary, path)
        return
    if not overwrite:
        raise ValueError(f"path: {path} exists; an artifact is never overwritten")
    retired = path.with_name(path.name + RETIRED_SUFFIX)
    shutil.rmtree(retired, ignore_errors=True)
    os.rename(path, retired)
    os.rename(temporary, path)
    shutil.rmtree(retired)


def recover_directory(path: Path) -> None:
    """Undo what a kill inside :func:`publish_directory` may have left behind."""
    retired = path.with_name(path.name + RETIRED_SUFFIX)
    if retired.exists() and not path.exists():
        os.rename(retired, path)
    for leftover in (retired, path.with_name(path.name + TEMPORARY_SUFFIX)):
        shutil.rmtree(leftover, ignore_errors=True)


def list_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """Leaf by leaf differences of two JSON objects, one ``key: stored, not wanted`` each."""
    found: list[str] = []
    for key in sorted({*stored, *wanted}):
        name = f"{prefix}{key}"
        if key not in stored or key not in wanted:
            found.append(f"{name}: {'missing' if key not in stored else 'not expected'}")
            continue
        old, new = stored[key], wanted[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += list_differences(old, new, prefix=f"{name}.")
        elif old != new:
            found.append(f"{name}: {old!r}, not {new!r}")
    return found


def as_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """The object as it reads back from a file: tuples become lists, keys become strings."""
    return json.loads(json.dumps(document, allow_nan=False))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory without a copy; the tensor must outlive the view."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
