"""The ``nerd-core`` command: record CartPole, train, evaluate; :mod:`.cli_inspect` looks and compares."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import tyro
from rich.console import Console
from rich.table import Table

from .artifact import ModelConfig, load_context_encoder, load_model
from .baseline import NerdBaselineConfig
from .cartpole import REACH, collect_cartpole
from .cli_bench import Bench
from .cli_import import ImportTrajectories
from .cli_inspect import AFFINE_TRAJECTORIES, Compare, Inspect, Rollouts
from .command import print_json, run_command, say
from .dataset import TrajectoryDataset
from .device import select_device
from .distributed import training_group
from .evaluate import Evaluation, affine_baseline, evaluate
from .model import FlashNerdConfig
from .presets import Architecture, PresetName, preset
from .run import METRICS
from .storage import read_json
from .train import TrainConfig, train

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class CollectCartpole:
    """Record random CartPole trajectories with the built-in analytical teacher.

    Example: nerd-core collect-cartpole --out cartpole-data --trajectories 10000
    """

    out: Path
    """Dataset folder to create."""
    trajectories: int = 10_000
    """Number of trajectories."""
    horizon: int = 100
    """Model steps of each trajectory, 1/60 s each."""
    seed: int = 0
    """Seed of starts and forces."""
    reach: tuple[float, float, float, float] = REACH
    """Starts lie within plus and minus this: cart [m], pole [rad], their speeds; NeRD once used 3.5 3.14159 10 10."""
    resume: bool = False
    """Go on with an interrupted recording."""

    def run(self) -> None:
        """Record and report."""
        dataset = collect_cartpole(
            self.out,
            trajectories=self.trajectories,
            horizon=self.horizon,
            seed=self.seed,
            reach=self.reach,
            resume=self.resume,
        )
        say(
            f"{self.out}: {dataset.num_trajectories} trajectories of {dataset.horizon} steps, "
            f"digest {dataset.digest[:12]}"
        )


@dataclass(frozen=True, kw_only=True)
class Train:
    """Fit a model to one or more datasets of the same robot.

    On several GPUs or machines that share a disk: torchrun --nproc-per-node N -m nerd_core.cli train ...

    Example: nerd-core train cartpole-data --out cartpole-run
    """

    datasets: tyro.conf.Positional[tuple[Path, ...]]
    """Dataset folders."""
    out: Path
    """Run folder to create."""
    preset: PresetName | None = None
    """Sizes and settings that go together, for robots like CartPole; other flags override them."""
    architecture: Architecture = "flash-nerd"
    """The network: ours, or NeRD's to compare with, whose sizes are the --baseline flags."""
    resume: bool = False
    """Go on from the run's last checkpoint, with the same settings."""
    init_from: Path | None = None
    """Model folder to start from."""
    context: str | None = None
    """Kind of context encoder, for example contact-set; an installed package must offer it."""
    context_config: Path | None = None
    """JSON file with the encoder's settings; without it the dataset's own, if it carries any."""
    model: Annotated[FlashNerdConfig, tyro.conf.arg(name="")] = field(default_factory=FlashNerdConfig)
    baseline: NerdBaselineConfig = field(default_factory=NerdBaselineConfig)
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)

    @staticmethod
    def following(arguments: list[str]) -> Train:
        """The defaults, which follow the preset and the architecture of a command line not yet parsed."""
        name: Any = _last_value(arguments, "--preset", get_args(PresetName))
        architecture: Any = _last_value(arguments, "--architecture", get_args(Architecture)) or "flash-nerd"
        chosen = preset(name)
        return Train(
            datasets=tyro.MISSING,
            out=tyro.MISSING,
            model=chosen.model,
            baseline=chosen.baseline,
            config=chosen.settings(architecture),
        )

    def run(self) -> None:
        """Train and report."""
        with training_group(select_device(self.config.device)) as group:
            datasets = [TrajectoryDataset.open(path) for path in self.datasets]
            best = train(
                datasets,
                self._sizes(),
                self.config,
                out=self.out,
                context_encoder=self._encoder(datasets[0]) if datasets else None,
                init_from=self.init_from,
                resume=self.resume,
            )
            if group.leads:
                error = read_json(best / "manifest.json", what="model manifest")["metrics"]
                before = "" if self.init_from is None else f", before {_error_before(self.out)}"
                say(f"{best}: held-out rollout error {error['rollout_error']}{before}")

    def _sizes(self) -> ModelConfig:
        """Sizes of the chosen network; those of the other one must not have been touched."""
        chosen = preset(self.preset)
        if self.architecture == "nerd-baseline":
            if self.model != chosen.model:
                raise ValueError("architecture: nerd-baseline takes its sizes from --baseline flags, got flash-nerd's")
            return self.baseline
        if self.baseline != chosen.baseline:
            raise ValueError("architecture: got flash-nerd and --baseline flags, expected nerd-baseline with them")
        return self.model

    def _encoder(self, dataset: TrajectoryDataset) -> Any:
        if self.context is None:
            return None
        if self.context_config is not None:
            config = read_json(self.context_config, what="context config")
        else:
            config = dataset.manifest["extra"].get("context", {}).get(self.context, {})
        # The encoder's initial weights follow the seed, as the rest of the network does.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return load_context_encoder({"kind": self.context, "config": config}, dataset.robot)


@dataclass(frozen=True, kw_only=True)
class Eval(Rollouts):
    """Rollout error of a model on a dataset, beside the zero-increment and affine baselines.

    A dataset that the model was trained on is cut to its held-out trajectories. The last line on
    standard output is one JSON document.

    Example: nerd-core eval cartpole-run cartpole-data
    """

    model: tyro.conf.Positional[Path]
    """Run folder or model folder."""
    dataset: tyro.conf.Positional[Path]
    """Dataset folder."""

    def run(self) -> None:
        """Evaluate, print the table, then the JSON document."""
        self.check()
        dataset = TrajectoryDataset.open(self.dataset)
        model, manifest = load_model(self.model, robot=dataset.robot)
        device = select_device(self.device)
        everything = dataset.load()
        count = dataset.num_trajectories
        fit, rows, held_out = torch.arange(count), torch.arange(count), False
        if dataset.digest in manifest["datasets"]:
            made = manifest["training"]
            fit, rows = dataset.split(made["val_fraction"], made["seed"])
            held_out = True
        truth = everything.select(rows[: self.max_trajectories], device)
        affine = affine_baseline(dataset.robot, everything.select(fit[:AFFINE_TRAJECTORIES]))
        encoder = model.context_encoder
        found = evaluate(
            model.to(device),
            truth,
            horizons=self.horizons,
            observe=None if encoder is None else encoder.observe,  # type: ignore[arg-type]
            start=self.start,
            history=self.history,
            affine=affine.to(device),
            seed=self.seed,
        )
        console = Console(stderr=True)
        # A log file has no width; rich would squeeze the table into 80 columns.
        console.width = console.width if console.is_terminal else 100
        console.print(_table(found, f"{manifest['name']}: rollout error E_H"))
        document = {
            "command": "eval",
            "model": manifest["name"],
            "parameters": manifest["parameters"],
            "weights_sha256": manifest["weights_sha256"],
            "dataset_digest": dataset.digest,
            "engine": dataset.manifest["engine"],
            "held_out": held_out,
            "affine_fitted_on": "training split" if held_out else "evaluation data",
            "definition": "sqrt(mean over trajectories and channels of (error / sigma)^2)",
            "device": str(device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seed": self.seed,
            **asdict(found),
        }
        print_json(document)


def _commands(train: Train) -> Any:
    """The subcommands, that of training with the given defaults."""
    return (
        Annotated[CollectCartpole, tyro.conf.subcommand("collect-cartpole")]
        | Annotated[ImportTrajectories, tyro.conf.subcommand("import-trajectories")]
        | Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Eval, tyro.conf.subcommand("eval")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
        | Annotated[Inspect, tyro.conf.subcommand("inspect")]
        | Annotated[Compare, tyro.conf.subcommand("compare")]
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``nerd-core``.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv``.
    """
    run_command(
        "nerd-core",
        _commands(Train.following(sys.argv[1:] if arguments is None else arguments)),
        description=(
            "Streaming neural robot dynamics. Try: nerd-core collect-cartpole --out data; "
            "nerd-core train data --out run; nerd-core eval run data"
        ),
        arguments=arguments,
        hint="interrupted; the same command with --resume goes on",
    )


def _error_before(run: Path) -> Any:
    """Held-out rollout error of the model that a run started from; runs from before it was recorded do not say."""
    with open(run / METRICS, encoding="utf-8") as file:
        first = json.loads(file.readline())
    return first["rollout_error"] if first["step"] == 0 else "not recorded"


def _last_value(arguments: list[str], flag: str, known: tuple[str, ...]) -> str | None:
    """Value of a flag, or None; a value that is not known is left to the parser to refuse."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    values = [value for name, value in pairwise(words) if name == flag]
    return values[-1] if values and values[-1] in known else None


def _table(found: Evaluation, title: str) -> Table:
    table = Table(title=f"{title}, {found.num_trajectories} trajectories")
    heads = ("H", "E_H", "95 %", "median", "mean 1..H", "diverged", "no motion", "affine")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in found.horizons:
        table.add_row(
            str(row.horizon),
            _digits(row.at_step),
            f"{_digits(row.low)} – {_digits(row.high)}",
            _digits(row.median),
            _digits(row.mean_to_step),
            f"{row.diverged:.1%}",
            _digits(row.zero_increment),
            _digits(row.affine),
        )
    return table


def _digits(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
