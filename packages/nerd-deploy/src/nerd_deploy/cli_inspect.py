"""Commands that look: inspect, lint, doctor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .command import NOT_PASSED, print_json, say

__all__ = ["Doctor", "Inspect", "Lint"]


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Check an artifact, compute its golden data again and say what it is.

    Exit code 1 if the golden data comes out otherwise. The last line on standard output is one JSON
    document.

    Example: nerd-deploy inspect go2.nerd
    """

    artifact: tyro.conf.Positional[Path]
    """Folder of an artifact, or exported file."""

    def run(self) -> int:
        """Check and report."""
        from .artifact import read_artifact
        from .golden import replay
        from .onnx_step import OnnxStep

        found = read_artifact(self.artifact)
        step = OnnxStep(found.model)
        manifest = found.manifest
        check = None
        if found.golden is not None and found.document is not None:
            again, tolerance = replay(step, found.golden), found.document["golden"].get("tolerance")
            if not isinstance(tolerance, float | int):
                raise ValueError(f"{self.artifact}: golden.tolerance is {tolerance!r}, expected a number")
            check = {
                "passed": again.single_step <= tolerance,
                "single_step": _json(again.single_step),
                "recursive": _json(again.recursive),
                "tolerance": tolerance,
            }
        Console(stderr=True).print(_card(manifest, self.artifact))
        for kind in ("inputs", "outputs"):
            Console(stderr=True).print(_tensors(manifest, kind))
        passed = check is None or check["passed"]
        if check is not None:
            word = "as torch computed it" if passed else "NOT as torch computed it"
            drift = f"single steps {_digits(check['single_step'])}, recursive {_digits(check['recursive'])}"
            say(f"golden data: {word}: {drift} (tolerance {check['tolerance']:.1e})")
        print_json({"command": "inspect", "golden": check, "manifest": found.document or manifest})
        return 0 if passed else NOT_PASSED


@dataclass(frozen=True, kw_only=True)
class Lint:
    """Look for what may fail elsewhere: untested operators, paths, float64, external data, open sizes.

    Exit code 1 if there is anything. The last line on standard output is one JSON document.

    Example: nerd-deploy lint go2.nerd
    """

    artifact: tyro.conf.Positional[Path]
    """Folder of an artifact, or exported file."""

    def run(self) -> int:
        """Look and report."""
        from .lint import lint_artifact

        found = lint_artifact(self.artifact)
        for finding in found:
            say(f"{self.artifact}: {finding.rule}: {finding.where}: {finding.text}")
        say(f"{self.artifact}: {len(found) or 'no'} finding{'' if len(found) == 1 else 's'}")
        print_json({"command": "lint", "findings": [finding._asdict() for finding in found]})
        return NOT_PASSED if found else 0


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Try every backend in a process of its own; say what is missing and how to get it.

    Exit code 1 if the default, ort-cpu, does not work. The last line on standard output is one JSON
    document.

    Example: nerd-deploy doctor
    """

    only: tuple[str, ...] = ()
    """Names of those to try; all by default."""
    timeout: float = 120.0
    """Seconds that each may take."""

    def run(self) -> int:
        """Try and report."""
        from .doctor import PROBES, examine

        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout is {self.timeout}, expected a positive number of seconds")
        known = [probe.name for probe in PROBES]
        if unknown := [name for name in self.only if name not in known]:
            raise ValueError(f"only has {', '.join(unknown)}, expected some of {', '.join(known)}")
        chosen = [probe for probe in PROBES if not self.only or probe.name in self.only]
        found = examine(chosen, timeout=self.timeout)
        for row in found:
            told = row.get("version") or f"{row['missing']}; to get it: {row['how']}"
            say(f"{row['name']:<13} {'works' if row['works'] else 'no':<6} {told}")
        print_json({"command": "doctor", "backends": found})
        broken = [row for row in found if row["name"] == "ort-cpu" and not row["works"]]
        return NOT_PASSED if broken else 0


def _card(manifest: Mapping[str, Any], path: Path) -> Table:
    table = Table(title=str(path), show_header=False)
    context, limits = manifest.get("context"), manifest.get("limits", {})
    rows = {
        "robot": manifest["name"],
        "model step": f"{manifest['dt']:g} s",
        "parameters": f"{manifest['model'].get('parameters', 0):,}",
        "weights": manifest["model"].get("weights_sha256", "")[:16],
        "spans": ", ".join(map(str, manifest["spans"])),
        "contacts": f"{context['rows']} rows, {context['kind']}" if context else "none",
        "integration": manifest.get("integration", ""),
        "precision": manifest["precision"],
        "most worlds": f"{limits['batch']:,}" if "batch" in limits else "not told",
        "made by": ", ".join(f"{k} {v}" for k, v in manifest.get("versions", {}).items()),
    }
    for key, value in rows.items():
        table.add_row(key, Text(value))
    return table


def _tensors(manifest: Mapping[str, Any], kind: str) -> Table:
    table = Table(title=kind)
    for head in ("name", "type", "shape", "entries and units"):
        table.add_column(head)
    for tensor in manifest[kind]:
        pairs = zip(tensor.get("entries", []), tensor.get("units", []), strict=False)
        told = ", ".join(f"{name} [{unit}]" for name, unit in pairs)
        told = told or tensor.get("meaning") or (f"[{tensor['unit']}]" if "unit" in tensor else "")
        # Text, because rich takes a unit in brackets for markup.
        table.add_row(tensor["name"], tensor["dtype"], " x ".join(map(str, tensor["shape"])) or "1", Text(told))
    return table


def _json(value: float) -> float | None:
    return value if value < float("inf") else None


def _digits(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"
