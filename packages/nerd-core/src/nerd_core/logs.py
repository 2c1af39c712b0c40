"""Logged trajectories as they lie on disk: named columns of numbers, from CSV and npz files.

Rows are named as the reader of the file counts them: the line of a CSV file (its header is line 1), the index from
0 of an npz array. npz is read by this module itself: nerd-core does not depend on numpy.
"""

from __future__ import annotations

import ast
import csv
import math
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Log", "read_log"]

_NPY_TYPES = {
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "b1": torch.bool,
}
_INDEXED = re.compile(r"(.+)\[(\d+)\]")


@dataclass(frozen=True)
class Log:
    """The numbers of one file.

    Attributes:
        path: The file.
        arrays: Name to float64 values: (F,) of a CSV column, any shape of an npz array. An empty cell is NaN.
        lines: Line of each row in the file, shape (F,); None for npz, whose rows count from 0.
    """

    path: Path
    arrays: Mapping[str, Tensor]
    lines: Tensor | None = None

    def row(self, index: int) -> str:
        """Words for a row: its line in a CSV file, its index in an npz array."""
        return f"row {index}" if self.lines is None else f"line {int(self.lines[index])}"

    def column(self, name: str) -> Tensor:
        """Values of a column, shape (F,) or (F, width); ``name[i]`` is column i of a wider array.

        Raises:
            ValueError: There is no such column; those that there are are listed.
        """
        indexed = _INDEXED.fullmatch(name)
        if name not in self.arrays and indexed and indexed[1] in self.arrays:
            array, place = self.arrays[indexed[1]], int(indexed[2])
            if array.ndim == 2 and place < array.shape[1]:
                return array[:, place]
            raise ValueError(f"{self.path}: column {name} asked of an array of shape {tuple(array.shape)}")
        if name not in self.arrays:
            raise ValueError(f"{self.path}: no column {name!r}, expected one of {', '.join(self.arrays)}")
        return self.arrays[name]

    def columns(self, names: tuple[str, ...], width: int) -> tuple[Tensor, tuple[str, ...]]:
        """Columns side by side, shape (F, width), and the name of each.

        Raises:
            ValueError: They are not ``width`` columns of equally many rows.
        """
        parts, labels = [], []
        for name in names:
            part = self.column(name)
            if part.ndim not in (1, 2):
                raise ValueError(f"{self.path}: column {name} has shape {tuple(part.shape)}, expected rows of numbers")
            parts.append(part if part.ndim == 2 else part[:, None])
            labels += [name] if part.ndim == 1 else [f"{name}[{i}]" for i in range(part.shape[1])]
        if len(labels) != width:
            raise ValueError(f"{self.path}: columns {', '.join(labels)} are {len(labels)}, expected {width}")
        if len({len(part) for part in parts}) > 1:
            raise ValueError(f"{self.path}: columns {', '.join(labels)} have {[len(p) for p in parts]} rows")
        return torch.cat(parts, 1), tuple(labels)


def read_log(path: str | Path) -> Log:
    """Read a CSV or npz file.

    Raises:
        ValueError: Another kind of file, a damaged one, or a cell that is no number (line and column are named).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    raise ValueError(f"{path}: files of kind {path.suffix or 'unknown'} are not read, expected .csv or .npz")


def _read_csv(path: Path) -> Log:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = [name.strip() for name in next(reader, [])]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"{path}: line 1 names the columns {names}, expected different names")
            rows: list[list[float]] = []
            lines: list[int] = []
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise ValueError(
                        f"{path}: line {reader.line_num} has {len(cells)} cells, expected {len(names)} as in line 1"
                    )
                rows.append([_number(path, reader.line_num, *pair) for pair in zip(names, cells, strict=True)])
                lines.append(reader.line_num)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as CSV ({error})") from None
    table = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(names))
    return Log(path, dict(zip(names, table.T, strict=True)), torch.tensor(lines, dtype=torch.int64))


def _number(path: Path, line: int, name: str, cell: str) -> float:
    """A cell's number; an empty cell is a gap. A word in an unused column would be no fault, but is rare."""
    if not cell.strip():
        return math.nan
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{path}: line {line}, column {name}: {cell!r} is no number") from None


def _read_npz(path: Path) -> Log:
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {
                name.removesuffix(".npy"): _read_npy(path, name, archive.read(name)) for name in archive.namelist()
            }
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"{path}: not readable as npz ({error})") from None
    return Log(path, {name: array for name, array in arrays.items() if array is not None})


def _read_npy(path: Path, name: str, data: bytes) -> Tensor | None:
    """One array, float64; None for kinds that hold no numbers.

    Source: the NPY format, versions 1 to 3 (a magic string, a version, the header's length, a Python literal).
    """
    try:
        if data[:6] != b"\x93NUMPY":
            raise ValueError("no NPY header")
        size = 2 if data[6] == 1 else 4
        first = 8 + size
        start = first + int.from_bytes(data[8:first], "little")
        header = ast.literal_eval(data[first:start].decode("utf-8"))
        kind, shape = header["descr"], tuple(header["shape"])
        if not isinstance(kind, str) or kind[1:] not in _NPY_TYPES or kind[0] == ">":
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the buffer is read-only, and the conversion below copies it
            values = torch.frombuffer(data, dtype=_NPY_TYPES[kind[1:]], offset=start) if start < len(data) else None
        values = torch.empty(0) if values is None else values
        values = values.to(torch.float64, copy=True)
        if header["fortran_order"]:
            return values.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
        return values.reshape(shape)
    except (ValueError, SyntaxError, KeyError, IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path}: array {name} is damaged ({error})") from None
