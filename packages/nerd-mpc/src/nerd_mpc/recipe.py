"""The recipe of the released model: record, train, record where the learned planner goes, train again.

Every stage writes a folder of its own and is skipped when that folder is whole, so a recipe that was killed goes on
where it stopped. Recordings run in as many single-threaded processes as there are cores.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nerd_contact import (
    ContactEncoderConfig,
    ContactSetEncoder,
    FixedContactConfig,
    FixedContactFeatures,
)
from nerd_core import FlashNerd, FlashNerdConfig, TrajectoryDataset, load_model, rollout, save_model
from nerd_core.artifact import Model
from nerd_core.compiled import can_compile
from nerd_core.dataset import split
from nerd_core.storage import check_writable
from nerd_core.train import TrainConfig, train
from nerd_coupling.recording import RandomTargets, record
from nerd_coupling.robots import load_robot

from .dynamics import MujocoRollout, NerdRollout, RolloutModel
from .platform import GO2_RANGE, PlatformTask, RewardWeights
from .proposals import PlannerRollouts, PlannerRolloutsConfig
from .released import load_climber

__all__ = ["RecipeConfig", "encoder_for", "first_stage", "held_out_error", "record_part", "run_recipe"]

FEET = ("FR_foot", "FL_foot", "RR_foot", "RL_foot")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Sizes of the recipe.

    Attributes:
        robot: Robot name.
        random_shards: Shards of random targets, 82,000 transitions each.
        planner_shards: Shards of episodes planned in MuJoCo, up to 170,000 transitions each.
        round_shards: Shards of episodes planned in the learned model, one entry per round.
        parts: Datasets each recording consists of, one seed each; that many can be recorded at once.
        steps: Updates with teacher forcing before the first round.
        recursive_steps: Updates with the recursive loss before the first round.
        round_steps: Updates with teacher forcing in each round.
        round_recursive_steps: Updates with the recursive loss in each round.
        model: Sizes of the network.
        contact: Sizes of the contact encoder.
        seed: Seed of everything.
    """

    robot: str = "go2"
    random_shards: int = 14
    planner_shards: int = 36
    round_shards: tuple[int, ...] = (16,)
    parts: int = 2
    steps: int = 3500
    recursive_steps: int = 0
    round_steps: int = 3000
    round_recursive_steps: int = 1500
    model: FlashNerdConfig = field(default_factory=FlashNerdConfig)
    contact: ContactEncoderConfig = field(default_factory=ContactEncoderConfig)
    seed: int = 1


def encoder_for(config: RecipeConfig, contacts: str = "any") -> torch.nn.Module:
    """A new context encoder: ``any`` contacts, or the baselines ``feet-ground`` and ``feet-any``."""
    robot = load_robot(config.robot)
    if contacts == "any":
        return ContactSetEncoder(config.contact, robot.spec, robot.probes)
    if contacts not in ("feet-ground", "feet-any"):
        raise ValueError(f"contacts is {contacts!r}, expected any, feet-ground or feet-any")
    feet = tuple(probe for probe in robot.probes if probe.name in robot.foot_geoms)
    surfaces = contacts.removeprefix("feet-")
    return FixedContactFeatures(FixedContactConfig(surfaces=surfaces), robot.spec, feet)


def record_part(out: Path, kind: str, *, robot_name: str, shards: int, seed: int, model: Path | None = None) -> None:
    """Record one dataset in this process, single-threaded.

    Args:
        out: Dataset folder; an incomplete one is taken up again, a complete one left alone.
        kind: ``random`` targets, or ``planner`` episodes.
        robot_name: Robot.
        shards: Shards.
        seed: Seed.
        model: Plan in this model; None plans in MuJoCo.
    """
    if _complete(out):
        return
    torch.set_num_threads(1)
    robot = load_robot(robot_name)
    stances = RandomTargets(robot, GO2_RANGE)
    if kind == "random":
        record(
            out,
            robot,
            stances,
            shards=shards,
            seed=seed,
            settings=stances.settings(),
            threads=1,
            resume=True,
        )
        return
    dynamics: Callable[[PlatformTask], RolloutModel] = lambda task: MujocoRollout(task, threads=1)  # noqa: E731
    label = "mujoco"
    if model is not None:
        network, manifest = load_climber(model, robot.spec)
        label = f"nerd {manifest['weights_sha256']}"
        rollout = _Retargeted(network)
        dynamics = rollout.on
    proposal = PlannerRollouts(
        PlannerRolloutsConfig(),
        # Without the impact penalty: what happens to plans that slam their feet must be known, too.
        make_task=lambda height: PlatformTask(robot, height, weights=RewardWeights(impact=0.0)),
        make_dynamics=dynamics,
        label=label,
        stances=stances.stances,
    )
    record(
        out,
        robot,
        proposal,
        shards=shards,
        seed=seed,
        settings=proposal.settings(),
        threads=1,
        resume=True,
    )


class _Retargeted:
    """One compiled rollout model, moved from task to task, so that it is compiled once per batch size."""

    def __init__(self, network: FlashNerd) -> None:
        self._network = network
        self._rollout: NerdRollout | None = None

    def on(self, task: PlatformTask) -> RolloutModel:
        """The rollout model on another deck, its history forgotten."""
        if self._rollout is None:
            samples = PlannerRolloutsConfig().plan.num_samples
            self._rollout = NerdRollout(self._network, task, samples, threads=1)
        self._rollout.retarget(task)
        self._rollout.begin()
        return self._rollout


def run_recipe(out: str | Path, config: RecipeConfig, *, workers: int | None = None) -> Path:
    """Everything from nothing to a released model.

    Args:
        out: Folder of all stages; goes on with what is there.
        config: Sizes; must be the same when going on.
        workers: Recording processes at a time; None for one per core. It changes how long, not what is recorded.

    Returns:
        The model's folder.
    """
    out = Path(out)
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, expected at least 1")
    if config.parts < 1:
        raise ValueError(f"parts is {config.parts}, expected at least 1")
    if out.exists() and not (out / "recipe.json").exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {out} exists and is not a recipe's folder, expected a new one")
    check_writable(out)
    out.mkdir(parents=True, exist_ok=True)
    _agree(out / "recipe.json", config)
    log = _StageLog(out / "stages.jsonl")
    workers = workers or len(os.sched_getaffinity(0))
    with log.stage("record random"):
        _record_all(out / "random", "random", config, config.random_shards, config.seed, workers, None)
    with log.stage("record planner"):
        _record_all(
            out / "planner",
            "planner",
            config,
            config.planner_shards,
            config.seed + 100,
            workers,
            None,
        )
    parts = ["random", "planner"]
    settings = first_stage(config)
    with log.stage("train"):
        model = _train(out, "model-0", parts, config, settings, None)
    for number, shards in enumerate(config.round_shards, 1):
        part = f"round-{number}"
        with log.stage(f"record {part}"):
            _record_all(out / part, "planner", config, shards, config.seed + 1000 * number, workers, model)
        parts.append(part)
        again = replace(
            settings,
            steps=config.round_steps,
            recursive_steps=config.round_recursive_steps,
            lr=settings.lr / 2,
        )
        with log.stage(f"train {part}"):
            model = _train(out, f"model-{number}", parts, config, again, model)
    with log.stage("publish"):
        return _publish(out, model, parts[1:], config)


def first_stage(config: RecipeConfig) -> TrainConfig:
    """Settings of the training before the first round."""
    return TrainConfig(
        steps=config.steps,
        recursive_steps=config.recursive_steps,
        seed=config.seed,
        compile=can_compile(),
        **TRAINING,
    )


TRAINING: dict[str, Any] = {
    "batch_size": 256,
    "window": 12,
    "lr": 1.5e-3,
    "lr_final": 3e-5,
    "eval_every": 1750,
    "checkpoint_every": 1000,
    "eval_horizons": (1, 5, 10, 20),
    "eval_trajectories": 512,
    "recursive_horizon": 10,
    "recursive_batch": 192,
    "recursive_lr": 3e-4,
    "val_fraction": 0.02,
    "ema": 0.998,
}
"""What all training stages share."""


def _train(
    out: Path,
    name: str,
    parts: list[str],
    config: RecipeConfig,
    settings: TrainConfig,
    init_from: Path | None,
) -> Path:
    best = out / name / "best"
    if (out / name / "done").exists():
        return best
    datasets = [TrajectoryDataset.open(p) for part in parts for p in sorted((out / part).iterdir())]
    train(
        datasets,
        config.model,
        settings,
        out=out / name,
        context_encoder=encoder_for(config),
        init_from=init_from,
        resume=(out / name / "last").exists(),
    )
    (out / name / "done").touch()
    return best


def _publish(out: Path, model_path: Path, parts: list[str], config: RecipeConfig) -> Path:
    """The model with its held-out errors in the manifest, as it is released.

    Held out are the trajectories around planned episodes that no training stage saw; their errors stand beside the
    on-plan error of a climb.
    """
    target = out / "release"
    if target.exists():
        return target
    network, manifest = load_model(model_path)
    errors = held_out_error(network, [p for part in parts for p in sorted((out / part).iterdir())], config.seed)
    log = [json.loads(line) for line in (out / "stages.jsonl").read_text().splitlines()]
    meta = {
        "datasets": manifest["datasets"],
        "training": {**manifest["training"], "recipe": json.loads((out / "recipe.json").read_text())},
        "metrics": {**manifest["metrics"], "held_out_position_error_m": errors, "stages": log},
    }
    save_model(target, network, meta)
    return target


@torch.no_grad()
def held_out_error(network: Model, paths: list[Path], seed: int) -> dict[str, float]:
    """Median base position error [m] after 5, 10 and 20 model steps on held-out trajectories.

    Args:
        network: The model.
        paths: Dataset folders; of each, the part that training with ``seed`` held out.
        seed: Seed of the split.
    """
    encoder = network.context_encoder
    assert encoder is not None
    distances = []
    for path in paths:
        dataset = TrajectoryDataset.open(path)
        _, rows = split(dataset.num_trajectories, TRAINING["val_fraction"], seed)
        data = dataset.load()
        scenes = {name: value[rows] for name, value in data.scenes.items()}
        states = data.states[rows]
        observe = encoder.observe
        predicted = rollout(network, states[:, 0], data.controls[rows], observe=lambda s, w=scenes, o=observe: o(s, w))
        distances.append((predicted[..., :3] - states[..., :3]).norm(dim=-1))
    error = torch.cat(distances)
    return {str(h): round(float(error[:, h].median()), 5) for h in (5, 10, 20)}


def _record_all(
    out: Path, kind: str, config: RecipeConfig, shards: int, seed: int, workers: int, model: Path | None
) -> None:
    """Record ``config.parts`` datasets, one seed each, in at most ``workers`` processes at a time."""
    share = [shards // config.parts + (i < shards % config.parts) for i in range(config.parts)]
    commands = []
    for i, count in enumerate(share):
        if count and not _complete(out / f"part-{i}"):
            command = [sys.executable, "-m", "nerd_mpc.recipe", str(out / f"part-{i}"), kind, config.robot]
            commands.append([*command, str(count), str(seed + i), *([str(model)] if model else [])])
    # One thread each: worker processes that share cores with OpenMP threads wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    jobs: list[subprocess.Popen[bytes]] = []

    def run(command: list[str]) -> int:
        jobs.append(subprocess.Popen(command, env=environment))
        return jobs[-1].wait()

    with ThreadPoolExecutor(workers) as pool:
        try:
            codes = list(pool.map(run, commands))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for job in jobs:
                job.terminate()
            raise
    if any(codes):
        raise RuntimeError(f"recording {out.name}: a worker ended with exit code {max(codes, key=abs)}")


def _complete(path: Path) -> bool:
    manifest = path / "manifest.json"
    return manifest.exists() and bool(json.loads(manifest.read_text()).get("complete"))


def _agree(path: Path, config: RecipeConfig) -> None:
    """Store the sizes, or refuse when the folder was begun with others."""
    wanted = json.loads(json.dumps(asdict(config)))
    if not path.exists():
        path.write_text(json.dumps(wanted, indent=1) + "\n")
        return
    stored = json.loads(path.read_text())
    if stored != wanted:
        keys = sorted(k for k in wanted if stored.get(k) != wanted[k])
        raise ValueError(f"out: {path.parent} was begun with other sizes ({', '.join(keys)})")


class _StageLog:
    """Wall time of each stage, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path, self._name, self._start = path, "", 0.0

    def stage(self, name: str) -> "_StageLog":
        self._name = name
        return self

    def __enter__(self) -> None:
        self._start = time.monotonic()
        sys.stderr.write(f"== {self._name}\n")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        seconds = round(time.monotonic() - self._start, 1)
        line = {"stage": self._name, "seconds": seconds, "finished": kind is None}
        if seconds > 0.5:  # less: the stage was whole already
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    target, what, name, number, start, *rest = sys.argv[1:]
    record_part(
        Path(target),
        what,
        robot_name=name,
        shards=int(number),
        seed=int(start),
        model=Path(rest[0]) if rest else None,
    )
