"""E_H of FlashNerd over the optimized NeRD on CartPole: equal data and updates, and equal training time.

Run from the repository's root, alone on the machine:

    uv run python benchmarks/accuracy.py --label cartpole-2cores --work runs/accuracy

Per seed, three models are trained on the same trajectories: NeRD's network; FlashNerd for as many updates, with as many
frames per update; and FlashNerd for as long as the baseline took, which is many more updates. All are
judged on the same new trajectories of 200 steps; ratios come with paired bootstrap intervals. Finished trainings are
kept in --work and not repeated. Writes benchmarks/results/accuracy-<label>.json.
"""

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from provenance import commit

from nerd_core import FlashNerdConfig, NerdBaselineConfig, TrainConfig, TrajectoryDataset, load_model, train
from nerd_core.bench import identity
from nerd_core.cartpole import collect_cartpole
from nerd_core.command import print_json, say, speaking_plainly
from nerd_core.comparison import compare
from nerd_core.evaluate import affine_baseline

TARGETS = {"equal updates": (0.75, 0.36, 0.38, 0.57), "equal time": (0.5, 0.5, 0.5, 0.5)}
HORIZONS = (1, 15, 100, 200)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What to train and where to write the figures."""

    label: str
    """Name of the results file."""
    work: Path
    """Folder for data and runs; goes on with what is there."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Paired seeds of initialisation and sampling."""
    trajectories: int = 10_000
    """Training trajectories of 100 steps."""
    test_trajectories: int = 2048
    """New trajectories of 200 steps."""
    updates: int = 3000
    """Updates of the baseline, and of ours in the first comparison."""
    batch: int = 128
    """Windows of ten frames per update, for all."""
    lr: float = 1e-3
    """Peak learning rate of both; NeRD's own."""
    recursive: int = 0
    """How many of our updates use the recursive loss."""
    flash: Annotated[FlashNerdConfig, tyro.conf.arg(name="flash")] = field(
        default_factory=lambda: FlashNerdConfig(width=64, spans=(2, 2), hidden=128, readout_hidden=64)
    )
    out: Path = Path("benchmarks/results")

    def run(self) -> None:
        """Train what is missing, compare, write."""
        path = self.out / f"accuracy-{self.label}.json"
        if path.exists():
            raise ValueError(f"--label: {path} exists, expected a new name")
        data = self._data("train", self.trajectories, 100, seed=0)
        test = self._data("test", self.test_trajectories, 200, seed=1)
        truth = test.load()
        affine = affine_baseline(data.robot, data.load().select(torch.arange(min(2000, data.num_trajectories))))
        rows = []
        for seed in self.seeds:
            found = self._seed(seed, data)
            models = {name: load_model(best)[0] for name, (best, _) in found.items()}
            result = compare(models, truth, horizons=HORIZONS, affine=affine)
            rows.append(
                {
                    "seed": seed,
                    "models": {
                        m.name: {
                            "parameters": models[m.name].num_parameters,
                            "seconds": round(found[m.name][1], 1),
                            **{
                                curve: {h: getattr(m, curve)[h - 1] for h in result.horizons}
                                for curve in ("at_step", "low", "high", "median", "ratio", "ratio_low", "ratio_high")
                            },
                        }
                        for m in result.models
                    },
                }
            )
            say(json.dumps({m.name: [m.ratio[h - 1] for h in result.horizons] for m in result.models}))
        document = {
            "command": "benchmarks/accuracy.py",
            "commit": commit(),
            "settings": {k: v if isinstance(v, int | float | str | dict) else str(v) for k, v in asdict(self).items()},
            "targets": TARGETS,
            "machine": identity(torch.device("cpu")),
            "threads": torch.get_num_threads(),
            "sigma": result.sigma,
            "test_digest": test.digest,
            "train_digest": data.digest,
            "zero_increment": {h: result.zero_increment[h - 1] for h in result.horizons},
            "affine": {h: (result.affine or ())[h - 1] for h in result.horizons},
            "seeds": rows,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        print_json({"results": str(path), "seeds": rows})

    def _data(self, name: str, trajectories: int, horizon: int, *, seed: int) -> TrajectoryDataset:
        folder = self.work / name
        if (folder / "manifest.json").exists() and json.loads((folder / "manifest.json").read_text())["complete"]:
            return TrajectoryDataset.open(folder)
        return collect_cartpole(folder, trajectories=trajectories, horizon=horizon, seed=seed, resume=True)

    def _seed(self, seed: int, data: TrajectoryDataset) -> dict[str, tuple[Path, float]]:
        """The best model of each training, and how long its updates took [s]."""
        settings = TrainConfig(
            steps=self.updates,
            batch_size=self.batch,
            window=10,
            lr=self.lr,
            seed=seed,
            eval_every=max(self.updates // 6, 1),
            eval_horizons=(1, 15, 100),
            checkpoint_every=max(self.updates // 6, 1),
        )
        ours = replace(settings, steps=self.updates - self.recursive, recursive_steps=self.recursive)
        found = {"optimized NeRD": self._train(f"nerd-{seed}", data, NerdBaselineConfig(), settings)}
        found["equal updates"] = self._train(f"equal-updates-{seed}", data, self.flash, ours)
        factor = found["optimized NeRD"][1] / found["equal updates"][1]
        longer = {
            name: max(int(getattr(ours, name) * factor), 1)
            for name in ("steps", "eval_every", "checkpoint_every", "warmup")
        }
        longer["recursive_steps"] = int(ours.recursive_steps * factor)
        found["equal time"] = self._train(f"equal-time-{seed}", data, self.flash, replace(ours, **longer))
        return found

    def _train(self, name: str, data: TrajectoryDataset, model: Any, settings: TrainConfig) -> tuple[Path, float]:
        clock = self.work / name / "seconds.json"
        if not clock.exists():
            start = time.monotonic()
            train(data, model, settings, out=self.work / name)
            clock.write_text(json.dumps(time.monotonic() - start))
        return self.work / name / "best", json.loads(clock.read_text())


if __name__ == "__main__":
    speaking_plainly("benchmarks/accuracy.py", lambda: tyro.cli(Claim, description=__doc__).run())
