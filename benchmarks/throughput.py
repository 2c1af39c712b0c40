"""Q_B, ours over the optimized NeRD, on CartPole: at least 10 times at every batch, 55 times at the best one.

Run from the repository's root, alone on the machine:

    uv run python benchmarks/throughput.py --label cpu-2cores

Every architecture of the ablation and the baseline are compiled alike and measured in turns, repeat by repeat. Writes
benchmarks/results/throughput-<label>.json with machine, threads, versions and commit; the last line on standard
output is the summary.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from provenance import commit
from rich.console import Console

from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig
from nerd_core.bench import Contender, Settings, measure
from nerd_core.cartpole import CartPole
from nerd_core.cli_bench import speed_table
from nerd_core.command import print_json, speaking_plainly
from nerd_core.device import select_device

TARGETS = {"every batch": 10.0, "best batch": 55.0}

ARCHITECTURES = {
    "flash 64 × (2,2), hidden 128": FlashNerdConfig(width=64, spans=(2, 2), hidden=128, readout_hidden=64),
    "flash 96 × (3,3), hidden 192": FlashNerdConfig(width=96, spans=(3, 3), hidden=192, readout_hidden=96),
    "flash 96 × (3,3), hidden 192, readout 2048": FlashNerdConfig(
        width=96, spans=(3, 3), hidden=192, readout_hidden=2048, readout_sharpness=2.5
    ),
    "flash 128 × (3,3,3), hidden 256": FlashNerdConfig(),
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What to measure and where to write it."""

    label: str
    """Name of the results file."""
    device: str = "auto"
    """auto, cpu or cuda."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=lambda: Settings(forms=("compiled",)))
    out: Path = Path("benchmarks/results")

    def run(self) -> None:
        """Measure, write the file, print the summary."""
        path = self.out / f"throughput-{self.label}.json"
        if path.exists():
            raise ValueError(f"--label: {path} exists, expected a new name")
        device, robot = select_device(self.device), CartPole().robot()
        contenders = [Contender(name, FlashNerd(config, robot).to(device)) for name, config in ARCHITECTURES.items()]
        contenders.append(Contender("optimized NeRD 192 × 6", NerdBaseline(NerdBaselineConfig(), robot).to(device)))
        document, rows = measure(contenders, self.settings, device)
        console = Console(stderr=True)
        console.width = console.width if console.is_terminal else 130
        console.print(speed_table(rows, contenders))
        ratios = {
            c.name: {f"{r.form} {r.batch}": round(r.ratio, 2) for r in rows if r.model == c.name}
            for c in contenders[:-1]
        }
        summary = {
            name: {"ratios": found, "every batch": min(found.values()), "best batch": max(found.values())}
            for name, found in ratios.items()
        }
        whole = {
            "command": "benchmarks/throughput.py",
            "commit": commit(),
            "targets": TARGETS,
            "summary": summary,
            **document,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1) + "\n")
        print_json({"results": str(path), "targets": TARGETS, "summary": summary})


if __name__ == "__main__":
    speaking_plainly("benchmarks/throughput.py", lambda: tyro.cli(Claim, description=__doc__).run())
