"""Training: windows with teacher forcing, then a recursive loss through codec and cache.

Open :func:`train` first; the loop is one plain function. A run folder holds::

    config.json              settings, robot and data digests; a resumed run must agree with them
    metrics.jsonl            one JSON object per evaluation
    best/                    the model (EMA weights) with the least held-out rollout error so far
    last/checkpoint.safetensors    weights, EMA, optimizer and step: all that a resume needs

Random numbers depend on (seed, step) only, so a resumed run equals an uninterrupted one bit for
bit. Under torchrun every process runs :func:`train`; the first one alone writes, evaluates and shows
progress (:mod:`nerd_core.distributed`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .artifact import ADDED_SETTINGS, ARCHITECTURES, Model, ModelConfig, build_model, context_json, load_model
from .baseline import NerdBaselineConfig
from .dataset import Trajectories, TrajectoryDataset
from .device import select_device, threads, uses_bfloat16
from .distributed import Group, training_group
from .evaluate import RIDGE, SceneObserver, rollout_error, state_channels
from .fine_tuning import freeze, refit_normalizers
from .losses import RecursiveLoss, TeacherLoss, teacher_loss
from .progress import RunProgress, warn
from .robot import RobotSpec
from .run import TrainingRun
from .storage import TEMPORARY_SUFFIX, as_json, check_writable, list_differences, read_json, readable, write_json
from .windows import TrajectoryPool, WindowSampler, seeded_generator

__all__ = ["TrainConfig", "select_device", "train"]

CONFIG = "config.json"
FORMAT_VERSION = 1
FIT_TRANSITIONS = 200_000


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
        steps: Updates with teacher forcing.
        batch_size: Windows per update, of all processes together.
        window: Model steps W per window; at least the model's receptive field, and for a NerdBaseline,
            which cannot read longer ones, no more than that.
        lr: Peak learning rate.
        lr_final: Learning rate at the end of the cosine.
        warmup: Updates of linear warm-up.
        weight_decay: AdamW's, on weight matrices only.
        grad_clip: Largest norm of the gradient.
        ema: Decay of the averaged weights that are evaluated and saved.
        seed: Seed of initialisation, split and sampling.
        val_fraction: Share of each dataset's trajectories that is held out.
        eval_every: Updates between evaluations.
        eval_horizons: Steps H whose held-out rollout error is logged; the mean over 1..max picks
            ``best/``. Horizons beyond the trajectories are cut to their length.
        eval_trajectories: Held-out trajectories per evaluation, at most.
        checkpoint_every: Updates between checkpoints.
        recursive_steps: Updates with the recursive loss, after the others; 0 for none.
        recursive_horizon: Model steps that the recursive loss rolls out.
        recursive_batch: Rows per recursive update, of all processes together.
        recursive_lr: Peak learning rate of the recursive phase; it falls to a tenth.
        precision: ``float32``, ``bfloat16`` (autocast, teacher-forced phase only) or ``auto``:
            bfloat16 where the processor multiplies it natively.
        device: ``auto`` (CUDA if there is one), or a torch device.
        threads: Threads of torch on the CPU; None leaves them as they are.
        compile: Compile the teacher-forced loss with torch.compile; needs a C++ compiler on the
            CPU. (The recursive loss is not faster compiled: measured.)
        normalizers: Of a model to start from: ``keep`` its own, or ``refit`` them to the new training data.
        freeze: Beginnings of the names of parameters that stay as they are, for example ``embed``, ``blocks.0``.
        patience: Evaluations in a row without a better held-out rollout error after which training ends, in
            whichever phase; None to go on.
    """

    steps: int = 2500
    batch_size: int = 64
    window: int = 32
    lr: float = 1e-3
    lr_final: float = 1e-5
    warmup: int = 100
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    ema: float = 0.999
    seed: int = 0
    val_fraction: float = 0.05
    eval_every: int = 250
    eval_horizons: tuple[int, ...] = (1, 5, 20)
    eval_trajectories: int = 256
    checkpoint_every: int = 250
    recursive_steps: int = 0
    recursive_horizon: int = 8
    recursive_batch: int = 128
    recursive_lr: float = 1e-4
    precision: str = "auto"
    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    normalizers: str = "keep"
    freeze: tuple[str, ...] = ()
    patience: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eval_horizons", tuple(self.eval_horizons))
        object.__setattr__(self, "freeze", tuple(self.freeze))
        positive = ("batch_size", "window", "eval_every", "eval_trajectories", "checkpoint_every")
        for name in (*positive, "recursive_horizon", "recursive_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        for name in ("steps", "warmup", "recursive_steps", "weight_decay", "lr_final"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 0")
        for name in ("lr", "grad_clip", "recursive_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected a positive number")
        precisions = ("auto", "float32", "bfloat16")
        expected = {
            "steps": (self.steps + self.recursive_steps > 0, "some updates in either phase"),
            "ema": (0 <= self.ema < 1, "0 <= ema < 1"),
            "val_fraction": (0 < self.val_fraction < 1, "0 < val_fraction < 1"),
            "eval_horizons": (min(self.eval_horizons, default=0) > 0, "steps of at least 1"),
            "precision": (self.precision in precisions, f"one of {precisions}"),
            "seed": (0 <= self.seed < 2**63, "0 <= seed < 2^63"),
            "threads": (self.threads is None or self.threads > 0, "at least 1, or None"),
            "normalizers": (self.normalizers in ("keep", "refit"), "'keep' or 'refit'"),
            "patience": (self.patience is None or self.patience > 0, "at least 1, or None"),
        }
        for name, (good, words) in expected.items():
            if not good:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {words}")


def train(
    datasets: TrajectoryDataset | Sequence[TrajectoryDataset],
    model_config: ModelConfig,
    config: TrainConfig,
    *,
    out: str | Path,
    context_encoder: nn.Module | None = None,
    observe: SceneObserver | None = None,
    init_from: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Path:
    """Fit a model to recorded trajectories.

    Args:
        datasets: One or more datasets of the same robot; held in memory, by each process.
        model_config: Sizes of the network; their type picks the architecture.
        config: Settings of the run.
        out: Run folder to create, or to go on with if ``resume``.
        context_encoder: Reads the surroundings; None for robots that touch nothing.
        observe: Gives the encoder's inputs for states in their scenes; None takes the encoder's own
            ``observe`` method.
        init_from: Model folder to start from. It is evaluated before the first update, as step 0, so ``best/``
            never has a greater held-out rollout error than the model that training started from.
        resume: Go on from the last checkpoint. Every setting must be the same.
        progress: Show progress on standard error.

    Returns:
        ``out/best``, a model folder.

    Raises:
        ValueError: Settings, data or folders that do not fit together, or a run that diverges.
    """
    out, datasets = Path(out), _of_one_robot(datasets)
    robot = datasets[0].robot
    if context_encoder is not None and observe is None:
        observe = context_encoder.observe  # type: ignore[assignment]
    _check_window(model_config, config)
    if config.normalizers == "refit" and init_from is None:
        raise ValueError("normalizers: got 'refit' and no init_from, expected a model to start from, or 'keep'")
    device = select_device(config.device)
    with training_group(device) as group, threads(config.threads), _seeded(config.seed):
        settings = _settings(datasets, model_config, config, context_encoder, init_from, group)
        _check_folder(out, settings, robot, resume=resume)
        group.check_divides("batch_size", config.batch_size)
        group.check_equal("settings", settings)  # nor does any process create the folder before all have looked
        pool, training, held_out = _load(datasets, config, device)
        sampler = WindowSampler(pool, training, config.window)
        checks = WindowSampler(pool, held_out, config.window)
        model = build_model(model_config, robot, context_encoder).to(device)
        _initialise(model, sampler, config, init_from, group)
        freeze(model, config.freeze)
        bfloat16 = uses_bfloat16(config.precision, device)
        teacher = TeacherLoss(sampler, observe, bfloat16=bfloat16, compiled=config.compile, group=group)
        recursive = _recursive_loss(model, pool, training, config, observe, group)
        if group.leads:
            _warn_of_idle_channels(model)
        if group.leads and not resume:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / CONFIG, settings)
        run = TrainingRun(
            out,
            model,
            ema=config.ema,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
            group=group,
        )
        if resume:
            run.restore()
        group.check_equal("last/checkpoint.safetensors", run.step)
        total = config.steps + config.recursive_steps
        shown = progress and group.leads

        judge = _Judge(pool, checks, config, observe, datasets)
        if init_from is not None and run.step == 0 and group.leads:
            judge(run, "before", 0.0)
            if shown:
                sys.stderr.write(f"before the first update: {run.note}\n")
        with RunProgress("train", total, unit="frames", done=run.step, shown=shown) as bar:
            while run.step < total and not run.is_stale(config.patience):
                draw = seeded_generator(config.seed, "windows", run.step)
                lr = _learning_rate(config, run.step)
                if recursive is None or run.step < config.steps:
                    loss, frames = teacher(model, config.batch_size, draw)
                else:
                    loss, frames = recursive(model, config.recursive_batch, draw)
                run.descend(loss, lr)
                bar.advance(frames, run.note)
                _keep(run, config, judge, lr, group)
        if shown and run.step < total:
            sys.stderr.write(f"stopped at update {run.step} of {total}: no better error in {run.stale} evaluations\n")
        group.wait()  # for the last files
        return run.finish()


def _keep(run: TrainingRun, config: TrainConfig, judge: _Judge, lr: float, group: Group) -> None:
    """After an update: evaluate and save, if it is time."""
    total = config.steps + config.recursive_steps
    if run.step % config.eval_every == 0 or run.step in (config.steps, total):
        if group.leads:
            judge(run, "teacher" if run.step <= config.steps else "recursive", lr)
        if config.patience is not None:
            run.share_staleness()
    ends = run.step == total or run.is_stale(config.patience)
    if group.leads and (run.step % config.checkpoint_every == 0 or ends):
        run.save()


class _Judge(NamedTuple):
    """Evaluates a run's averaged weights on held-out trajectories, and records what it finds."""

    pool: TrajectoryPool
    checks: WindowSampler
    config: TrainConfig
    observe: SceneObserver | None
    datasets: list[TrajectoryDataset]

    def __call__(self, run: TrainingRun, phase: str, lr: float) -> None:
        loss = _finite(run.pop_mean_loss())
        found = {"step": run.step, "phase": phase, "lr": lr, "loss": loss}
        found |= _validate(run.average, self.pool, self.checks, self.config, self.observe)
        run.record(found, _metadata(self.datasets, self.config, found))


def _check_window(model_config: ModelConfig, config: TrainConfig) -> None:
    window, field = config.window, model_config.receptive_field
    if window < field:
        raise ValueError(f"window: got {window}, expected at least the model's receptive field of {field} frames")
    if isinstance(model_config, NerdBaselineConfig) and window > field:
        raise ValueError(f"window: got {window}, expected {field}: a nerd-baseline reads no longer window than its own")


def _warn_of_idle_channels(model: Model) -> None:
    """One line that names the channels without variance: the network neither sees nor predicts them."""
    kinds = (
        ("token", model.codec.token_names, model.token_stats),
        ("target", model.codec.delta_names, model.target_stats),
    )
    found = []
    for kind, names, stats in kinds:
        if idle := [name for name, active in zip(names, stats.active.tolist(), strict=True) if not active]:
            found.append(f"{kind} {', '.join(idle)}")
    if found:
        warn(f"channels without variance in the training data, left out: {'; '.join(found)}")


@torch.no_grad()
def _validate(
    model: Model,
    pool: TrajectoryPool,
    checks: WindowSampler,
    config: TrainConfig,
    observe: SceneObserver | None,
) -> dict[str, Any]:
    """Held-out one-step loss and rollout error, the same windows and rows every time."""
    rows, offsets = checks.draw(512, seeded_generator(config.seed, "held-out windows"))
    states, controls = pool.windows(rows, offsets, config.window)
    context = None if observe is None else observe(states[:, :-1], pool.scene(rows))
    one_step = teacher_loss(model, states, controls, context)
    chosen = checks.rows[: config.eval_trajectories]
    longest = min(max(config.eval_horizons), int(pool.steps[chosen].min()))
    states, controls = pool.windows(chosen, torch.zeros_like(chosen), longest)
    truth = Trajectories(states, controls, pool.scene(chosen))
    sigma = state_channels(model.robot, states).flatten(0, 1).std(0)
    moving = sigma > 1e-6
    error = rollout_error(model, truth, longest, observe=observe)[..., moving] / sigma[moving]
    squared = error.double().square().mean((0, 2))  # (longest,)
    horizons = sorted({min(h, longest) for h in config.eval_horizons})
    return {
        "val_loss": _finite(one_step),
        "rollout_error": {str(h): _finite(squared[h - 1].sqrt()) for h in horizons},
        "rollout_error_mean": _finite(squared.mean().sqrt()),
    }


def _load(
    datasets: list[TrajectoryDataset], config: TrainConfig, device: torch.device
) -> tuple[TrajectoryPool, Tensor, Tensor]:
    """All frames, and which trajectories are for training and which held out.

    Each dataset is split on its own, so that adding one does not move the split of the others.
    """
    training, held_out, first = [], [], 0
    for dataset in datasets:
        chosen, rest = dataset.split(config.val_fraction, config.seed)
        training.append(chosen + first)
        held_out.append(rest + first)
        first += dataset.num_trajectories
    pool = TrajectoryPool([_load_finite(dataset) for dataset in datasets], device)
    return pool, torch.cat(training), torch.cat(held_out)


def _load_finite(dataset: TrajectoryDataset) -> Trajectories:
    """A dataset in memory; the writer refuses non-finite numbers, other programs may not."""
    data = dataset.load()
    scenes = {f"scene.{name}": tensor for name, tensor in data.scenes.items()}
    for name, tensor in {"state": data.states, "control": data.controls, **scenes}.items():
        # The extremes tell it without a mask as large as the data.
        if tensor.is_floating_point() and tensor.numel() and not all(x.isfinite() for x in tensor.aminmax()):
            raise ValueError(f"datasets: {dataset.path} holds non-finite numbers in {name}, expected finite ones")
    return data


def _initialise(
    model: Model, sampler: WindowSampler, config: TrainConfig, init_from: str | Path | None, group: Group
) -> None:
    """Normalisers and affine path from training data, or everything from an earlier model."""
    if init_from is None:
        model.fit(*_transitions(sampler, config, group), ridge=RIDGE, total=group.total)
    else:
        earlier, _ = load_model(init_from, robot=model.robot)
        # Built from the loaded model, not read from its manifest: one from before a setting existed lacks it.
        stored, wanted = (as_json(_network(m.config, m.context_encoder)) for m in (earlier, model))
        if gaps := list_differences(stored, wanted):
            raise ValueError(f"init_from: {init_from} is another model: {'; '.join(gaps)}")
        model.load_state_dict(earlier.state_dict())
        if config.normalizers == "refit":
            refit_normalizers(model, *_transitions(sampler, config, group), total=group.total)
    group.copy_from_leader(model.state_dict().values())


def _transitions(sampler: WindowSampler, config: TrainConfig, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """States, controls and the states after, of this process's share of the sample that statistics come from."""
    single = WindowSampler(sampler.pool, sampler.rows, 1)
    count = min(FIT_TRANSITIONS, int(sampler.pool.steps[sampler.rows].sum()))
    rows, offsets = map(group.share, single.draw(count, seeded_generator(config.seed, "fit")))
    states, controls = sampler.pool.windows(rows, offsets, 1)
    return states[:, 0], controls[:, 0], states[:, 1]


def _network(model_config: ModelConfig, context_encoder: nn.Module | None) -> dict[str, Any]:
    """What a model's manifest says of its network."""
    return {
        "architecture": next(name for name, kind in ARCHITECTURES.items() if isinstance(model_config, kind)),
        "config": asdict(model_config),
        "context": context_json(context_encoder),
    }


def _recursive_loss(
    model: Model,
    pool: TrajectoryPool,
    training: Tensor,
    config: TrainConfig,
    observe: SceneObserver | None,
    group: Group,
) -> RecursiveLoss | None:
    if not config.recursive_steps:
        return None
    group.check_divides("recursive_batch", config.recursive_batch)
    length = model.config.receptive_field - 1 + config.recursive_horizon
    sampler = WindowSampler(pool, training, length)
    return RecursiveLoss(
        sampler,
        observe,
        model=model,
        horizon=config.recursive_horizon,
        seed=config.seed,
        group=group,
    )


def _learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine, in each of the two phases."""
    if step < config.steps:
        peak, last, total = config.lr, config.lr_final, config.steps
    else:
        peak, last = config.recursive_lr, config.recursive_lr / 10
        total, step = config.recursive_steps, step - config.steps
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    done = (step - config.warmup) / max(total - config.warmup, 1)
    return last + (peak - last) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _settings(
    datasets: list[TrajectoryDataset],
    model_config: ModelConfig,
    config: TrainConfig,
    context_encoder: nn.Module | None,
    init_from: str | Path | None,
    group: Group,
) -> dict[str, Any]:
    network = _network(model_config, context_encoder)
    network["model"] = network.pop("config")
    return as_json(
        {
            "format_version": FORMAT_VERSION,
            "train": asdict(config),
            **network,
            "processes": group.size,  # sums over another number of processes are rounded otherwise
            "robot": datasets[0].robot.to_json(),
            "datasets": [dataset.digest for dataset in datasets],
            "init_from": None if init_from is None else str(init_from),
        }
    )


def _check_folder(out: Path, settings: dict[str, Any], robot: RobotSpec, *, resume: bool) -> None:
    if not resume:
        # A run that was killed while it wrote its settings has left nothing else.
        if out.exists() and (not out.is_dir() or any(f.name != CONFIG + TEMPORARY_SUFFIX for f in out.iterdir())):
            raise ValueError(f"out: {out} exists; choose a new folder, or resume it")
        check_writable(out)
        return
    # Runs from before there was a choice do not say.
    stored = {"architecture": "flash-nerd", "processes": 1} | read_json(out / CONFIG, what="run to resume")
    with readable(out / CONFIG):
        stored["train"] = {"normalizers": "keep", "freeze": [], "patience": None} | stored["train"]
        added = {key: value for key, value in ADDED_SETTINGS.items() if key in settings["model"]}
        stored["model"] = added | stored["model"]
        if gaps := RobotSpec.from_json(stored["robot"]).differences(robot):
            raise ValueError(f"{out}: cannot resume, the run is of another robot: {'; '.join(gaps)}")
    if gaps := list_differences(stored, settings):
        raise ValueError(f"{out}: cannot resume, the run was started with {'; '.join(gaps)}")


def _metadata(datasets: list[TrajectoryDataset], config: TrainConfig, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "datasets": [dataset.digest for dataset in datasets],
        "training": {"step": found["step"], **asdict(config)},
        "metrics": {k: v for k, v in found.items() if k not in ("step", "phase", "lr")},
    }


def _of_one_robot(
    datasets: TrajectoryDataset | Sequence[TrajectoryDataset],
) -> list[TrajectoryDataset]:
    listed = [datasets] if isinstance(datasets, TrajectoryDataset) else list(datasets)
    if not listed:
        raise ValueError("datasets: got none, expected at least one")
    for dataset in listed[1:]:
        if gaps := listed[0].robot.differences(dataset.robot):
            raise ValueError(f"datasets: {dataset.path} is of another robot: {'; '.join(gaps)}")
    return listed


def _finite(value: Tensor | float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch for the initial weights and give the caller's random state back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
