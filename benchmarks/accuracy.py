"""E_H of FlashNerd over the optimized NeRD: equal data and updates; on CartPole equal training time, too.

Run from the repository's root; one thread, so that two systems can be measured side by side on two cores:

    uv run python benchmarks/accuracy.py --system cartpole --label cartpole-2cores --work runs/cartpole
    uv run python benchmarks/accuracy.py --system franka --label franka-2cores --work runs/franka --updates 800
    uv run python benchmarks/accuracy.py --system double-pendulum --label pendulum-2cores --work runs/pendulum

Per seed, both networks are trained on the same trajectories, with the same codec, optimiser and schedule,
for as many updates with as many frames each. On CartPole a third model is FlashNerd trained for as long as the
baseline: its number of updates is the baseline's times the ratio of the costs of an update, measured in turns,
evaluations left out. CartPole and Franka are judged by E_H on new trajectories under random efforts, the double
pendulum by its mean joint error over 100 passive steps on each of NeRD's seven grounds. Finished trainings are kept in
--work and not repeated. Writes benchmarks/results/accuracy-<label>.json.
"""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from provenance import commit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nerd_contact import ContactEncoderConfig, ContactSetEncoder
from nerd_core import FlashNerdConfig, NerdBaselineConfig, TrainConfig, TrajectoryDataset, load_model, rollout, train
from nerd_core.artifact import Model, ModelConfig, build_model
from nerd_core.bench import identity
from nerd_core.cartpole import REACH, CartPole, collect_cartpole
from nerd_core.command import print_json, say, speaking_plainly
from nerd_core.comparison import paired_errors
from nerd_core.dataset import Trajectories, split
from nerd_core.device import select_device, uses_bfloat16
from nerd_core.distributed import Group
from nerd_core.evaluate import (
    ZeroIncrement,
    affine_baseline,
    channel_names,
    channel_sigma,
    squared_error,
    state_error,
)
from nerd_core.losses import RecursiveLoss, TeacherLoss
from nerd_core.windows import TrajectoryPool, WindowSampler, seeded_generator
from nerd_coupling import load_robot
from nerd_coupling.grounds import nerd_grounds
from nerd_coupling.random_efforts import RandomEfforts
from nerd_coupling.recording import record

HORIZONS = (1, 15, 100, 200)
RECURSIVE_HORIZON = 12
BASELINE, UPDATES, TIME = "optimized NeRD", "equal updates", "equal time"
TARGETS: dict[str, Any] = {
    "cartpole": {UPDATES: (0.75, 0.36, 0.38, 0.57), TIME: (0.5, 0.5, 0.5, 0.5)},
    "franka": {UPDATES: (1.0, 0.89, 0.80, 0.90)},
    "double-pendulum": {UPDATES: "no worse on at least 6 of 7 grounds"},
}
BASELINES = {  # sizes of NeRD's released models
    "cartpole": NerdBaselineConfig(),
    "franka": NerdBaselineConfig(width=384),
    "double-pendulum": NerdBaselineConfig(block=16),
}
OURS = {  # chosen by benchmarks/ablation.py
    "cartpole": FlashNerdConfig(width=96, spans=(3, 3), hidden=192, readout_hidden=2048, readout_sharpness=2.5),
    "franka": FlashNerdConfig(width=128, spans=(3, 3), hidden=256, readout_hidden=512),
    "double-pendulum": FlashNerdConfig(width=96, spans=(3, 3), hidden=192, readout_hidden=96),
}
PUBLISHED = {
    "E_H of optimized NeRD, CartPole": (5.89e-5, 4.78e-4, 8.43e-3, 0.106),
    "E_H of FlashNeRD, CartPole": (4.41e-5, 1.73e-4, 3.23e-3, 0.0599),
    "passive CartPole, NeRD's 5 M updates [m]": (0.0002, 0.004, 0.033),
    "passive CartPole, NeRD's 5 M updates [rad]": (0.0004, 0.013, 0.075),
    "passive CartPole, 100 K updates [m]": (0.0025, 0.0517, 0.2545),
    "passive CartPole, 100 K updates [rad]": (0.0030, 0.0921, 0.3088),
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What to train and where to write the figures."""

    system: Literal["cartpole", "franka", "double-pendulum"]
    """Which robot."""
    label: str
    """Name of the results file."""
    work: Path
    """Folder for data and runs; goes on with what is there."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Paired seeds of initialisation and sampling."""
    trajectories: int = 10_000
    """Training trajectories of 100 steps."""
    reach: tuple[float, float, float, float] = REACH
    """Starts of CartPole, in training and test: cart [m], pole [rad], speeds; NeRD once used 3.5 3.14159 10 10."""
    test_trajectories: int = 1024
    """New trajectories, for the double pendulum on each ground."""
    updates: int = 2000
    """Updates of the baseline, and of ours in the first comparison."""
    batch: int = 128
    """Windows of ten frames per update, for all."""
    lr: float = 1e-3
    """Peak learning rate of both; NeRD's own."""
    recursive: int = 500
    """How many of our updates use the recursive loss, over 12 steps, with no more frames than a baseline's update."""
    precision: str = "auto"
    """Of the teacher-forced updates of all; auto is bfloat16 where the processor multiplies it."""
    out: Path = Path("benchmarks/results")

    def run(self) -> None:
        """Train what is missing, compare, write."""
        path = self.out / f"accuracy-{self.label}.json"
        if path.exists():
            raise ValueError(f"--label: {path} exists, expected a new name")
        torch.set_num_threads(1)
        data = self.training_data()
        factor = self._cost_ratio(data) if self.system == "cartpole" else None
        runs = {seed: self._train_all(seed, data, factor) for seed in self.seeds}
        document: dict[str, Any] = {
            "command": "benchmarks/accuracy.py",
            "commit": commit(),
            "settings": {
                k: v if isinstance(v, int | float | str | dict) else str(v)
                for k, v in asdict(self).items()
                if k not in ("work", "out")
            },
            "targets": TARGETS[self.system],
            "published": PUBLISHED,
            "machine": identity(torch.device("cpu")),
            "threads": 1,
            "train_digest": data.digest,
            "cost_of_an_update_baseline_over_ours": factor,
        }
        if self.system == "double-pendulum":
            document |= self._judge_grounds(runs)
        else:
            document |= self._judge(runs, data)
        if self.system == "cartpole":
            document["passive"] = self._judge_passive(runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        print_json({"results": str(path), "summary": document["summary"]})

    # Data

    def training_data(self) -> TrajectoryDataset:
        """Trajectories of 100 steps under random efforts."""
        if self.system == "cartpole":
            return self._cartpole_data("train", self.trajectories, 100, seed=0)
        return self._recorded("train", self.trajectories, 100, seed=0)

    def test_data(self) -> TrajectoryDataset:
        """New trajectories of 200 steps under random efforts."""
        if self.system == "cartpole":
            return self._cartpole_data("test", self.test_trajectories, 200, seed=1)
        return self._recorded("test", self.test_trajectories, 200, seed=1)

    def _cartpole_data(self, name: str, trajectories: int, horizon: int, *, seed: int) -> TrajectoryDataset:
        if _complete(self.work / name):
            return TrajectoryDataset.open(self.work / name)
        return collect_cartpole(
            self.work / name, trajectories=trajectories, horizon=horizon, seed=seed, reach=self.reach, resume=True
        )

    def _recorded(self, name: str, trajectories: int, horizon: int, *, seed: int, **settings: Any) -> TrajectoryDataset:
        if not _complete(self.work / name):
            robot, rows = load_robot(self.system), min(trajectories, 1000)
            proposal = RandomEfforts(robot, rows=rows, horizon=horizon, **settings)
            record(
                self.work / name,
                robot,
                proposal,
                shards=-(-trajectories // rows),
                seed=seed,
                settings=proposal.settings(),
                threads=1,
                num_boxes=0,
                resume=(self.work / name).exists(),
            )
        return TrajectoryDataset.open(self.work / name)

    # Training

    def _encoder(self) -> nn.Module | None:
        """Reads the contacts, the same for either network."""
        robot = load_robot(self.system)
        if not robot.probes:
            return None
        sizes = ContactEncoderConfig() if robot.margin is None else ContactEncoderConfig(margin=robot.margin)
        return ContactSetEncoder(sizes, robot.spec, robot.probes)

    def settings(self, seed: int) -> TrainConfig:
        """Settings that all trainings share."""
        return TrainConfig(
            steps=self.updates,
            batch_size=self.batch,
            window=10,
            lr=self.lr,
            seed=seed,
            precision=self.precision,
            eval_every=max(self.updates // 4, 1),
            eval_trajectories=128,
            eval_horizons=(1, 15, 100),
            checkpoint_every=max(self.updates // 4, 1),
            recursive_horizon=RECURSIVE_HORIZON,
            recursive_batch=max(10 * self.batch // (RECURSIVE_HORIZON + OURS[self.system].receptive_field // 2), 1),
            recursive_lr=self.lr / 5,
        )

    def _train_all(self, seed: int, data: TrajectoryDataset, factor: float | None) -> dict[str, tuple[Path, float]]:
        """The best model of each training, and how long it took, evaluations included [s]."""
        settings = self.settings(seed)
        ours = replace(settings, steps=self.updates - self.recursive, recursive_steps=self.recursive)
        if self.recursive:  # there the rate goes on falling
            ours = replace(ours, lr_final=self.lr / 10)
        found = {
            BASELINE: self.fit(f"nerd-{seed}", data, BASELINES[self.system], settings),
            UPDATES: self.fit(f"equal-updates-{seed}", data, OURS[self.system], ours),
        }
        if factor is not None:
            names = ("steps", "recursive_steps", "eval_every", "checkpoint_every")
            longer = {name: int(getattr(ours, name) * factor) for name in names}
            found[TIME] = self.fit(f"equal-time-{seed}", data, OURS[self.system], replace(ours, **longer))
        return found

    def fit(
        self,
        name: str,
        data: TrajectoryDataset,
        model: ModelConfig,
        settings: TrainConfig,
        encoder: nn.Module | None = None,
    ) -> tuple[Path, float]:
        """The best model of a training that is done or gone on with, and how long it took [s]."""
        out, clock = self.work / name, self.work / name / "seconds.json"
        if not clock.exists():
            start, resume = time.monotonic(), (out / "last").exists()
            train(data, model, settings, out=out, context_encoder=encoder or self._encoder(), resume=resume)
            clock.write_text(json.dumps({"seconds": time.monotonic() - start, "resumed": resume}))
        return out / "best", json.loads(clock.read_text())["seconds"]

    def _cost_ratio(self, data: TrajectoryDataset) -> float:
        """Seconds of a baseline's update over seconds of our average one: median of five rounds, taken in turns."""
        stored = self.work / "cost.json"
        if stored.exists():
            return json.loads(stored.read_text())["ratio"]
        settings, device = self.settings(0), select_device("cpu")
        pool = TrajectoryPool([data.load()], device)
        rows, _ = split(data.num_trajectories, settings.val_fraction, 0)
        theirs, ours = (build_model(config, data.robot) for config in (BASELINES[self.system], OURS[self.system]))
        bfloat16 = uses_bfloat16(self.precision, device)
        teacher = TeacherLoss(WindowSampler(pool, rows, 10), None, bfloat16=bfloat16, compiled=False, group=Group())
        length, horizon = ours.config.receptive_field - 1, settings.recursive_horizon
        recursive = RecursiveLoss(
            WindowSampler(pool, rows, length + horizon), None, model=ours, horizon=horizon, seed=0
        )
        # A recursive batch's history has a random length, so those are averaged over more updates than they need.
        jobs = (
            (theirs, teacher, self.batch, 12),
            (ours, teacher, self.batch, 60),
            (ours, recursive, settings.recursive_batch, 30),
        )
        steppers = {model: torch.optim.AdamW(model.parameters(), fused=True) for model in (theirs, ours)}
        rounds, share = [], self.recursive / self.updates
        for number in range(6):  # the first one warms up
            seconds = []
            for model, loss_of, batch, updates in jobs:
                start = time.perf_counter()
                for update in range(updates):
                    loss, _ = loss_of(model, batch, seeded_generator(0, "cost", number, update))
                    steppers[model].zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    steppers[model].step()
                seconds.append((time.perf_counter() - start) / updates)
            rounds.append(seconds)
        ratios = sorted(base / ((1 - share) * one + share * rec) for base, one, rec in rounds[1:])
        stored.write_text(json.dumps({"ratio": ratios[2], "ratios": ratios, "seconds_per_update": rounds[1:]}))
        say(f"an update of the baseline costs {ratios[2]:.2f} of ours ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        return ratios[2]

    # Judging

    def _judge(self, runs: dict[int, dict[str, tuple[Path, float]]], data: TrajectoryDataset) -> dict[str, Any]:
        test = self.test_data()
        truth = test.load()
        sigma = channel_sigma(data.robot, truth.states)
        affine = affine_baseline(data.robot, data.load().select(torch.arange(min(2000, data.num_trajectories))))
        plain = {"zero increment": ZeroIncrement(data.robot), "affine": affine}
        flat = {
            name: squared_error(model, truth, HORIZONS[-1], sigma).mean(0).sqrt().tolist()
            for name, model in plain.items()
        }
        rows, curves = [], ("at_step", "low", "high", "median", "ratio", "ratio_low", "ratio_high")
        for seed, found in runs.items():
            result = paired_errors({name: self.squared(best, truth, sigma) for name, (best, _) in found.items()})
            models = {
                m.name: {
                    "parameters": load_model(found[m.name][0])[0].num_parameters,
                    "updates": _updates(found[m.name][0]),
                    "seconds": round(found[m.name][1], 1),
                    **{curve: {h: getattr(m, curve)[h - 1] for h in HORIZONS} for curve in curves},
                }
                for m in result
            }
            rows.append({"seed": seed, "models": models})
            say(f"seed {seed}: " + json.dumps({m.name: [m.ratio[h - 1] for h in HORIZONS] for m in result}))
        common = {
            "sigma": dict(zip(channel_names(data.robot), sigma.tolist(), strict=True)),
            "test_digest": test.digest,
            **{name: {h: curve[h - 1] for h in HORIZONS} for name, curve in flat.items()},
        }
        names = [name for name in rows[0]["models"] if name != BASELINE]
        summary = {name: {h: [row["models"][name]["ratio"][h] for row in rows] for h in HORIZONS} for name in names}
        return {**common, "summary": {"ratio to optimized NeRD, per seed": summary}, "seeds": rows}

    def squared(self, best: Path, truth: Trajectories, sigma: Tensor) -> Tensor:
        """Squared errors of a trained model per trajectory and step, kept in its run folder."""
        path = best.parent / "squared.safetensors"
        if not path.exists():
            save_file({"squared": squared_error(load_model(best)[0], truth, HORIZONS[-1], sigma).contiguous()}, path)
        return load_file(path)["squared"]

    def _judge_grounds(self, runs: dict[int, dict[str, tuple[Path, float]]]) -> dict[str, Any]:
        """Mean joint error [rad] over 100 passive steps, per ground, of every seed's models."""
        grounds: dict[str, Any] = {}
        for ground in nerd_grounds():
            errors = {
                name: self.ground_errors(ground, {seed: found[name][0] for seed, found in runs.items()})
                for name in (BASELINE, UPDATES)
            }
            sums = {n: {s: sum(found) for s, found in each.items()} for n, each in errors.items()}
            grounds[ground] = {
                "joint errors [rad] per seed": errors,
                "ratio": round(sum(sums[UPDATES].values()) / sum(sums[BASELINE].values()), 4),
                "ratio per seed": {s: round(sums[UPDATES][s] / sums[BASELINE][s], 4) for s in runs},
            }
            say(f"{ground}: {grounds[ground]['ratio']}")
        wins = sum(found["ratio"] <= 1 for found in grounds.values())
        return {
            "grounds": grounds,
            "summary": {"grounds no worse": wins, "ratios": {g: found["ratio"] for g, found in grounds.items()}},
        }

    def ground_errors(self, ground: str, runs: dict[int, Path]) -> dict[int, list[float]]:
        """Mean error of each joint [rad] over 100 passive steps on one ground, by seed."""
        name = f"test-{ground}"
        data = self._recorded(name, self.test_trajectories, 100, seed=7, passive=True, ground=ground).load()
        return {s: [round(float(x), 5) for x in _joint_errors(load_model(best)[0], data)] for s, best in runs.items()}

    def _judge_passive(self, runs: dict[int, dict[str, tuple[Path, float]]]) -> dict[str, Any]:
        """Mean absolute error of cart [m] and pole [rad] over 100, 500, 1,000 steps without force."""
        cartpole, count, steps = CartPole(), min(self.test_trajectories, 512), 1000
        start = torch.rand(count, 4, dtype=torch.float64, generator=seeded_generator(2, "passive"))
        states = [(2 * start - 1) * torch.tensor([1.0, torch.pi, 1.0, 1.0])]
        force = torch.zeros(count, steps, 1, dtype=torch.float64)
        for t in range(steps):
            states.append(cartpole.step(states[-1], force[:, t]))
        truth = Trajectories(torch.stack(states, 1).float(), force.float(), {})
        found: dict[str, Any] = {"trajectories": count, "horizons": (100, 500, 1000)}
        for name, (best, _) in runs[self.seeds[0]].items():
            predicted = _rollout(load_model(best)[0], truth)
            error = state_error(cartpole.robot(), predicted, truth.states)[:, 1:].abs()
            finite = error.isfinite().flatten(1).all(1)
            found[name] = {
                "cart [m]": [round(float(error[finite, :h, 0].mean()), 5) for h in (100, 500, 1000)],
                "pole [rad]": [round(float(error[finite, :h, 1].mean()), 5) for h in (100, 500, 1000)],
                "finite": float(finite.double().mean()),
            }
        say(json.dumps(found))
        return found


def _complete(folder: Path) -> bool:
    manifest = folder / "manifest.json"
    return manifest.exists() and bool(json.loads(manifest.read_text())["complete"])


def _updates(best: Path) -> int:
    train_config = json.loads((best.parent / "config.json").read_text())["train"]
    return train_config["steps"] + train_config["recursive_steps"]


@torch.no_grad()
def _rollout(model: Model, truth: Trajectories) -> Tensor:
    encoder = model.context_encoder
    look = None if encoder is None else (lambda state: encoder.observe(state, truth.scenes))
    return rollout(model, truth.states[:, 0], truth.controls, observe=look)


def _joint_errors(model: Model, truth: Trajectories) -> Tensor:
    """Mean over time and trajectories of each joint's absolute error [rad], shape (nv,)."""
    error = state_error(model.robot, _rollout(model, truth), truth.states)[:, 1:, : model.robot.nv].abs()
    return error.mean((0, 1))


if __name__ == "__main__":
    speaking_plainly("benchmarks/accuracy.py", lambda: tyro.cli(Claim, description=__doc__).run())
