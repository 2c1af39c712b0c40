"""The ``nerd-deploy`` command: export a model to ONNX, verify the export, look at it, run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from .artifact import MODEL, SUFFIX
from .cli_inspect import Doctor, Inspect, Lint
from .cli_run import Bench, Rollout
from .command import BAD_INPUT, INTERRUPTED, NOT_PASSED, parse_command, print_json, say

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model's streaming step for batches of any size: a folder with golden data, or one ONNX file.

    Example: nerd-deploy export go2-run --out go2.nerd
    """

    model: tyro.conf.Positional[Path]
    """Run folder or model folder."""
    out: Path
    """What to create: a folder if the name ends in .nerd, else a file."""

    def run(self) -> int:
        """Export and report."""
        from nerd_deploy import export_artifact, export_onnx

        folder = self.out.suffix == SUFFIX
        manifest = (export_artifact if folder else export_onnx)(self.model, self.out)
        size = (self.out / MODEL if folder else self.out).stat().st_size
        context = manifest["context"]
        seen = f", {context['rows']} contact rows" if context else ""
        say(
            f"{self.out}: {manifest['name']}, {manifest['model']['parameters']:,} parameters, dt "
            f"{manifest['dt']:g} s{seen}, {size / 1e6:.2f} MB"
        )
        say(f"next: nerd-deploy verify {self.model} {self.out}")
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
    """The exported file, or the folder of an artifact."""
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
        say(f"{self.onnx}: {word} ({found['verdict']}): {found['reason']}")
        print_json(found)
        return 0 if found["passed"] else NOT_PASSED

    def _starts(self) -> dict[str, Any]:
        if self.data is None:
            return {}
        from nerd_core import TrajectoryDataset
        from nerd_core.artifact import load_model

        robot = load_model(self.model)[0].robot
        shard = TrajectoryDataset.open(self.data, robot=robot).load_shard(0)
        return {"start": shard.states[:, 0], "scene": shard.scenes or None}


Command = (
    Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Lint, tyro.conf.subcommand("lint")]
    | Annotated[Rollout, tyro.conf.subcommand("rollout")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)

DESCRIPTION = (
    "Example: nerd-deploy export go2-run --out go2.nerd; nerd-deploy verify go2-run go2.nerd\n\n"
    "Neural robot dynamics as ONNX files that are served without torch."
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``nerd-deploy``.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv``.
    """
    command = parse_command("nerd-deploy", Command, DESCRIPTION, arguments)
    try:
        code = command.run()
    except (ValueError, OSError, ImportError) as error:
        say(f"nerd-deploy: error: {' '.join(str(error).split())}")
        code = BAD_INPUT
    except KeyboardInterrupt:
        say("nerd-deploy: interrupted")
        code = INTERRUPTED
    if code:
        raise SystemExit(code)


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
