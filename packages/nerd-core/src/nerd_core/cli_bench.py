"""The command that measures speed: ``nerd-core bench``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from .artifact import build_model, load_model
from .baseline import NerdBaseline, NerdBaselineConfig
from .bench import Contender, Measurement, Settings, measure, reference_of
from .cartpole import CartPole
from .command import print_json
from .device import select_device
from .model import FlashNerdConfig

__all__ = ["Bench", "speed_table"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Speed of the bare model: env-steps per second at several batch sizes, beside the roofline.

    Without models, a FlashNerd and the optimized NeRD baseline on CartPole, of the sizes that the flags say; untrained
    weights are as fast as trained ones. The last line on standard output is one JSON document.

    Example: nerd-core bench --batch 16 1024
    """

    models: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders or model folders."""
    baseline: bool = True
    """Put the optimized NeRD baseline beside them."""
    flash: FlashNerdConfig = field(default_factory=FlashNerdConfig)
    nerd: NerdBaselineConfig = field(default_factory=NerdBaselineConfig)
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)
    device: str = "auto"
    """auto, cpu or cuda."""

    def run(self) -> None:
        """Measure, print the table, then the JSON document."""
        device = select_device(self.device)
        contenders = [Contender(c.name, c.model.to(device)) for c in self.contenders()]
        console = Console(stderr=True)
        console.width = console.width if console.is_terminal else 130
        document, rows = measure(contenders, self.settings, device)
        console.print(speed_table(rows, contenders))
        print_json({"command": "bench", **document})

    def contenders(self) -> list[Contender]:
        """The models to measure, on the CPU."""
        if self.models:
            found = [Contender(str(path), _load(path)) for path in dict.fromkeys(self.models)]
        else:
            found = [Contender(_title(self.flash), build_model(self.flash, CartPole().robot()))]
        if self.baseline and not any(isinstance(c.model, NerdBaseline) for c in found):
            found.append(Contender(_title(self.nerd), build_model(self.nerd, found[0].model.robot)))
        return found


def speed_table(rows: Sequence[Measurement], contenders: Sequence[Contender]) -> Table:
    """The measurements as a table."""
    table = Table(title=f"Q_B, env-steps per second; ratio to {contenders[reference_of(contenders)].name}")
    table.add_column("model", overflow="fold")
    for head in ("form", "batch", "steps/s", "slowest – fastest", "ms/step", "GFLOP/s", "GB/s", "roofline", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.batch != row.batch:
            table.add_section()
        table.add_row(
            row.model,
            row.form,
            f"{row.batch:,}",
            f"{row.steps_per_s:,.0f}",
            f"{row.low:,.0f} – {row.high:,.0f}",
            f"{row.ms_per_step:.3g}",
            f"{row.flops_per_s / 1e9:.3g}",
            f"{row.bytes_per_s / 1e9:.2g}",
            f"{row.roofline:.1%}",
            f"{row.ratio:.3g}×",
        )
    return table


def _load(path: Path) -> Any:
    model, _ = load_model(path)
    if model.context_encoder is not None:
        raise ValueError(
            f"{path}: reads its surroundings ({model.context_encoder.kind}), expected a model without; "
            "nerd-mpc measures those inside the planner"
        )
    return model


def _title(config: FlashNerdConfig | NerdBaselineConfig) -> str:
    if isinstance(config, NerdBaselineConfig):
        return f"nerd-baseline {config.width} × {config.layers}"
    return f"flash-nerd {config.width} × {','.join(map(str, config.spans))}"
