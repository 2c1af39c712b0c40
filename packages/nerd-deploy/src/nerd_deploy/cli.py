"""The ``nerd-deploy`` command: export a model to ONNX, verify the export."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

NOT_PASSED, BAD_INPUT, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model's streaming step as one ONNX file for batches of any size.

    Example: nerd-deploy export go2-run --out go2.onnx
    """

    model: tyro.conf.Positional[Path]
    """Run folder or model folder."""
    out: Path
    """File to create."""

    def run(self) -> int:
        """Export and report."""
        from nerd_deploy import export_onnx

        manifest = export_onnx(self.model, self.out)
        context = manifest["context"]
        seen = f", {context['rows']} contact rows" if context else ""
        _say(
            f"{self.out}: {manifest['name']}, {manifest['model']['parameters']:,} parameters, dt "
            f"{manifest['dt']:g} s{seen}, {self.out.stat().st_size / 1e6:.2f} MB"
        )
        _say(f"next: nerd-deploy verify {self.model} {self.out}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare an exported file with its model, recursively, with a reset half-way.

    Exit code 0 only if it passes, 1 if it drifts. The last line on standard output is one JSON
    document.

    Example: nerd-deploy verify go2-run go2.onnx
    """

    model: tyro.conf.Positional[Path]
    """Run folder or model folder that the file was made from."""
    onnx: tyro.conf.Positional[Path]
    """The exported file."""
    data: Path | None = None
    """Dataset folder to take start states and their surroundings from."""
    steps: int = 200
    """Recursive steps."""
    batches: tuple[int, ...] = (1, 3, 64)
    """Batch sizes."""
    tolerance: float = 1e-4
    """Largest difference allowed, in SI units."""
    strict: bool = False
    """Accept nothing but float32 within the tolerance, even of a model that amplifies rounding."""
    seed: int = 0
    """Seed of starts and controls."""
    motion: float = 0.05
    """Half range of the controls: joint targets [rad], or efforts as a share of the largest one."""
    provider: str = "CPUExecutionProvider"
    """Execution provider of onnxruntime."""

    def run(self) -> int:
        """Verify, print the table, then the JSON document."""
        from nerd_deploy import verify_onnx

        found = verify_onnx(
            self.model,
            self.onnx,
            steps=self.steps,
            batches=self.batches,
            tolerance=self.tolerance,
            strict=self.strict,
            seed=self.seed,
            motion=self.motion,
            provider=self.provider,
            progress=True,
            **self._starts(),
        )
        console = Console(stderr=True)
        # A log file has no width; rich would squeeze the table into 80 columns.
        console.width = console.width if console.is_terminal else 100
        console.print(_table(found))
        word = "passed" if found["passed"] else "NOT PASSED"
        _say(f"{self.onnx}: {word} ({found['verdict']}): {found['reason']}")
        sys.stdout.write(json.dumps(found, allow_nan=False) + "\n")
        return 0 if found["passed"] else NOT_PASSED

    def _starts(self) -> dict[str, Any]:
        if self.data is None:
            return {}
        from nerd_core import TrajectoryDataset
        from nerd_core.artifact import load_model

        robot = load_model(self.model)[0].robot
        shard = TrajectoryDataset.open(self.data, robot=robot).load_shard(0)
        return {"start": shard.states[:, 0], "scene": shard.scenes or None}


Command = Annotated[Export, tyro.conf.subcommand("export")] | Annotated[Verify, tyro.conf.subcommand("verify")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``nerd-deploy``.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv``.
    """
    command = _parse(arguments)
    try:
        code = command.run()
    except (ValueError, OSError, ImportError) as error:
        _say(f"nerd-deploy: error: {' '.join(str(error).split())}")
        code = BAD_INPUT
    except KeyboardInterrupt:
        _say("nerd-deploy: interrupted")
        code = INTERRUPTED
    if code:
        raise SystemExit(code)


def _parse(arguments: list[str] | None) -> Export | Verify:
    """The command that a command line asks for; tyro's box about a wrong one becomes one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                Command,  # type: ignore[arg-type]
                prog="nerd-deploy",
                description=(
                    "Example: nerd-deploy export go2-run --out go2.onnx; "
                    "nerd-deploy verify go2-run go2.onnx\n\n"
                    "Neural robot dynamics as ONNX files that are served without torch."
                ),
                args=arguments,
            )
    except SystemExit as end:
        if end.code == BAD_INPUT:
            text = re.sub(r"\x1b\[[0-9;]*m", "", box.getvalue())
            lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
            said = re.split(r"\n[─-]{4,}\n", "\n".join(lines))
            first = said[0 if "╭" in text or len(said) == 1 else 1]  # without Unicode the title comes first
            _say(f"nerd-deploy: error: {' '.join(first.split())}; see nerd-deploy --help")
        raise


def _table(found: dict[str, Any]) -> Table:
    worlds = sum(row["batch"] for row in found["batches"])
    table = Table(
        title=f"{found['name']}: {worlds} worlds, {found['steps']} recursive steps, tolerance {found['tolerance']:g}"
    )
    for head in ("step", "ONNX - torch", "median", "beyond", "torch 32 - 64", "median", "beyond"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in found["drift"]:
        both = (row["onnx_from_torch"], row["torch_float32_from_float64"])
        cells = [(_digits(r["max"]), _digits(r["median"]), str(r["beyond"])) for r in both]
        table.add_row(str(row["step"]), *cells[0], *cells[1])
    single = found["single_step"]
    caption = f"single steps: {_digits(single['max_abs'])} (torch 32 - 64: "
    caption += f"{_digits(single['torch_float32_from_float64'])})"
    if found["float64"] is not None:
        caption += f"; float64 copy, recursive: {_digits(found['float64']['max_abs'])}"
    table.caption = caption
    return table


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
