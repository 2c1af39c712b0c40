"""What each choice in FlashNerd is worth: accuracy against cost, one change at a time.

Run from the repository's root; one thread:

    uv run python benchmarks/ablation.py --label 2cores --work runs/ablation

CartPole: width, spans, depth, kinematic residual, recursive phase. Double pendulum: how contact rows are pooled. Go2
on random platforms: rotation vector or quaternion as the target. Every variant gets the same data, windows, updates and
seed as the one it is compared with; the two rotation targets are trained by the loop in this file, for the library
offers one of them only. Finished trainings are kept in --work and not repeated. Writes
benchmarks/results/ablation-<label>.json.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from accuracy import HORIZONS, OURS, Claim
from provenance import commit
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nerd_contact import ContactEncoderConfig, ContactSetEncoder
from nerd_core import FlashNerd, FlashNerdConfig, TrajectoryDataset, load_model
from nerd_core.bench import identity
from nerd_core.command import print_json, say, speaking_plainly
from nerd_core.dataset import split
from nerd_core.evaluate import channel_sigma, squared_error
from nerd_core.losses import channel_weights
from nerd_core.normalizer import Normalizer
from nerd_core.progress import RunProgress
from nerd_core.roofline import cache_bytes, step_cost
from nerd_core.rotation import quat_to_rotvec, rotvec_to_quat
from nerd_core.windows import TrajectoryPool, WindowSampler, seeded_generator
from nerd_coupling import load_robot
from nerd_coupling.recording import RandomTargets, record

CHOSEN = OURS["cartpole"]


def _sized(width: int, spans: tuple[int, ...]) -> FlashNerdConfig:
    return replace(CHOSEN, width=width, spans=spans, hidden=2 * width)


VARIANTS: dict[str, tuple[FlashNerdConfig, float]] = {  # sizes, share of recursive updates
    "chosen: width 96, spans (3, 3)": (CHOSEN, 0.25),
    "width 64": (_sized(64, (3, 3)), 0.25),
    "width 128": (_sized(128, (3, 3)), 0.25),
    "spans (1, 1): no history": (_sized(96, (1, 1)), 0.25),
    "spans (2, 2)": (_sized(96, (2, 2)), 0.25),
    "spans (5, 5)": (_sized(96, (5, 5)), 0.25),
    "one block, span 5": (_sized(96, (5,)), 0.25),
    "three blocks, spans (3, 3, 3)": (_sized(96, (3, 3, 3)), 0.25),
    "readout started as PyTorch does": (replace(CHOSEN, readout_sharpness=0.0), 0.25),
    "narrow readout, 96 hidden units": (replace(CHOSEN, readout_hidden=96), 0.25),
    "no kinematic residual": (replace(CHOSEN, kinematic=False), 0.25),
    "one-step loss only": (CHOSEN, 0.0),
}


class QuaternionNerd(FlashNerd):
    """FlashNerd whose network predicts the base's rotation as a quaternion, as NeRD does, not as a rotation vector.

    The quaternion is that of the rotation vector which the network otherwise predicts; it is normalised before use.
    """

    def __init__(self, config: FlashNerdConfig, robot: Any, context_encoder: nn.Module) -> None:
        super().__init__(config, robot, context_encoder)
        out = self.codec.delta_size + 1
        self.target_stats = Normalizer(out)
        self.affine = nn.Linear(self.affine.in_features, out)
        self.readout_out = nn.Linear(self.readout_out.in_features, out)
        for layer in (self.affine, self.readout_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def _residual(self, state: Tensor, after: Tensor) -> Tensor:
        delta = super()._residual(state, after)
        return torch.cat([delta[..., :3], rotvec_to_quat(delta[..., 3:6]), delta[..., 6:]], -1)

    def increment(self, state: Tensor, y: Tensor) -> Tensor:
        """Physical increment, shape (..., 2·nv), of a normalised prediction ``y``, shape (..., 2·nv + 1)."""
        wide = self.target_stats.denormalize(y)
        quat = wide[..., 3:7] / wide[..., 3:7].norm(dim=-1, keepdim=True)
        delta = torch.cat([wide[..., :3], quat_to_rotvec(quat), wide[..., 7:]], -1)
        return delta + self.codec.drift(state, delta) if self.config.kinematic else delta


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What to train and where to write the figures."""

    label: str
    """Name of the results file."""
    work: Path
    """Folder for data and runs; goes on with what is there."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of initialisation and sampling."""
    updates: int = 2000
    """Updates of each CartPole variant, 128 windows of 10 frames; the double pendulum gets half as many."""
    go2_updates: int = 800
    """Updates of each rotation target, 128 windows of 12 frames."""
    go2_shards: int = 4
    """Shards of Go2 data, 82,000 transitions each."""
    trajectories: int = 10_000
    """Training trajectories of CartPole and of the double pendulum."""
    test_trajectories: int = 1024
    """New trajectories of CartPole, and of the double pendulum on each ground."""
    parts: tuple[Literal["cartpole", "pooling", "rotation"], ...] = ("cartpole", "pooling", "rotation")
    """Which of the three to do."""
    out: Path = Path("benchmarks/results")

    def run(self) -> None:
        """Train what is missing, judge, write."""
        path = self.out / f"ablation-{self.label}.json"
        if path.exists():
            raise ValueError(f"--label: {path} exists, expected a new name")
        torch.set_num_threads(1)
        document: dict[str, Any] = {
            "command": "benchmarks/ablation.py",
            "commit": commit(),
            "settings": {
                k: v if isinstance(v, int | str) else str(v)
                for k, v in asdict(self).items()
                if k not in ("work", "out")
            },
            "machine": identity(torch.device("cpu")),
            "threads": 1,
        }
        for part in self.parts:
            name, judge = {
                "cartpole": ("cartpole, E_H", self._cartpole),
                "pooling": ("double pendulum, joint errors [rad]", self._pooling),
                "rotation": ("go2, E_H", self._rotation),
            }[part]
            document[name] = judge()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        print_json({"results": str(path), **{k: v for k, v in document.items() if "," in k}})

    def _claim(self, system: Any, folder: str) -> Claim:
        return Claim(
            system=system,
            label=self.label,
            work=self.work / folder,
            seeds=self.seeds,
            trajectories=self.trajectories,
            test_trajectories=self.test_trajectories,
            updates=self.updates,
        )

    def _cartpole(self) -> dict[str, Any]:
        claim = self._claim("cartpole", "cartpole")
        data, truth = claim.training_data(), claim.test_data().load()
        sigma, found = channel_sigma(data.robot, truth.states), {}
        for name, (sizes, share) in VARIANTS.items():
            errors = []
            for seed in self.seeds:
                settings, recursive = claim.settings(seed), int(share * self.updates)
                settings = replace(settings, steps=self.updates - recursive, recursive_steps=recursive)
                if recursive:
                    settings = replace(settings, lr_final=claim.lr / 10)
                best, _ = claim.fit(f"{name}-{seed}", data, sizes, settings)
                model, _ = load_model(best)
                squared = squared_error(model, truth, HORIZONS[-1], sigma)
                errors.append([round(float(squared[:, h - 1].mean().sqrt()), 5) for h in HORIZONS])
            cost = step_cost(FlashNerd(sizes, data.robot))
            found[name] = {
                "parameters": FlashNerd(sizes, data.robot).num_parameters,
                "flops_per_step": cost.flops,
                "cache_bytes_per_world": cache_bytes(FlashNerd(sizes, data.robot)),
                "at_horizons": HORIZONS,
                "per seed": errors,
            }
            say(f"{name}: {errors}")
        return found

    def _pooling(self) -> dict[str, Any]:
        claim = replace(self._claim("double-pendulum", "pendulum"), updates=self.updates // 2)
        data, robot, found = claim.training_data(), load_robot("double-pendulum"), {}
        for pooling in ("gated", "softmax"):
            sizes = ContactEncoderConfig(margin=robot.margin or ContactEncoderConfig().margin, pooling=pooling)
            runs = {}
            for seed in self.seeds:
                encoder = ContactSetEncoder(sizes, robot.spec, robot.probes)
                best, _ = claim.fit(f"{pooling}-{seed}", data, OURS["double-pendulum"], claim.settings(seed), encoder)
                runs[seed] = best
            found[pooling] = {ground: claim.ground_errors(ground, runs) for ground in ("none", "c1", "c3", "c5")}
            say(f"{pooling}: {found[pooling]}")
        return found

    def _rotation(self) -> dict[str, Any]:
        robot, folder = load_robot("go2"), self.work / "go2"
        if not (folder / "manifest.json").exists() or not TrajectoryDataset.open(folder).manifest["complete"]:
            low, high = torch.tensor([j.range for j in robot.spec.joints]).unbind(-1)
            proposal = RandomTargets(robot, torch.stack([low, high], -1))
            shards, settings, resume = self.go2_shards, proposal.settings(), folder.exists()
            record(folder, robot, proposal, shards=shards, seed=0, settings=settings, threads=1, resume=resume)
        data = TrajectoryDataset.open(folder)
        everything = data.load()
        training, held_out = split(data.num_trajectories, 0.05, 0)
        truth = everything.select(held_out[:1024])
        pool = TrajectoryPool([everything], torch.device("cpu"))
        sigma, found = channel_sigma(robot.spec, truth.states), {}
        for name, kind in (("rotation vector", FlashNerd), ("quaternion", QuaternionNerd)):
            errors = []
            for seed in self.seeds:
                model = self._fit(kind, WindowSampler(pool, training, 12), seed)
                squared = squared_error(model, truth, 20, sigma, observe=model.context_encoder.observe)
                errors.append([round(float(squared[:, h - 1].mean().sqrt()), 5) for h in (1, 5, 20)])
            found[name] = {"at_horizons": (1, 5, 20), "per seed": errors}
            say(f"{name}: {errors}")
        return found

    def _fit(self, kind: type[FlashNerd], sampler: WindowSampler, seed: int) -> FlashNerd:
        """A model after teacher-forced updates; its averaged weights, as the trainer would give them."""
        robot = load_robot("go2")
        torch.manual_seed(seed)
        encoder = ContactSetEncoder(ContactEncoderConfig(), robot.spec, robot.probes)
        # The rotations that a kinematic residual leaves are too small for the two to differ.
        model = kind(FlashNerdConfig(kinematic=False), robot.spec, encoder)
        single = WindowSampler(sampler.pool, sampler.rows, 1)
        states, controls = sampler.pool.windows(*single.draw(100_000, seeded_generator(seed, "fit")), 1)
        model.fit(states[:, 0], controls[:, 0], states[:, 1])
        weights = _target_weights(model)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995))
        stepper = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0, fused=True)
        with RunProgress(kind.__name__, self.go2_updates, unit="frames") as bar:
            for update in range(self.go2_updates):
                done = update / self.go2_updates
                for group in stepper.param_groups:
                    group["lr"] = 1.5e-3 * min((update + 1) / 100, 0.5 * (1 + math.cos(math.pi * done)) + 0.01)
                rows, offsets = sampler.draw(128, seeded_generator(seed, "windows", update))
                states, controls = sampler.pool.windows(rows, offsets, sampler.length)
                with torch.no_grad():
                    context = model.context_encoder.observe(states[:, :-1], sampler.pool.scene(rows))
                error = model(states[:, :-1], controls, context) - model.target(states[:, :-1], states[:, 1:])
                loss = (error.square() * weights).mean()
                stepper.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                stepper.step()
                average.update_parameters(model)
                bar.advance(rows.numel() * sampler.length)
        averaged = average.module
        assert isinstance(averaged, FlashNerd)
        return averaged.eval()


def _target_weights(model: FlashNerd) -> Tensor:
    """:func:`channel_weights`; the four numbers of a quaternion share what the rotation vector's three weigh."""
    if not isinstance(model, QuaternionNerd):
        return channel_weights(model)
    plain, wide = FlashNerd(model.config, model.robot), model.target_stats
    keep = [0, 1, 2, 4, 5, 6, *range(7, len(wide.std))]  # without w; a small rotation's vector part is half of it
    double = torch.ones(len(keep)).index_fill_(0, torch.tensor([3, 4, 5]), 2.0)
    plain.target_stats.std.copy_(wide.std[keep] * double)
    plain.target_stats.active.copy_(wide.active[keep])
    weights = channel_weights(plain)
    turn = weights[3:6].mean()[None]
    return torch.cat([weights[:3], turn * wide.active[3], weights[3:]])


if __name__ == "__main__":
    speaking_plainly("benchmarks/ablation.py", lambda: tyro.cli(Ablation, description=__doc__).run())
