"""Contacts anywhere: a model trained with contacts at random places of a body, tested with places it never saw.

Run from the repository's root; one thread:

    uv run python benchmarks/generality.py --label 2cores --work runs/generality

A free body without a shape of its own carries six small spheres, drawn anew for every trajectory, and is tossed onto
the ground; its mass and inertia never change, so where it touches is all that differs. The directions from its centre
are cut into regions round evenly spread points; a quarter of the regions is never used in training. Two models see the
same trajectories for as many updates: one reads the spheres as a contact set, the other a fixed list of points, one in
the middle of each region used in training and alive while a sphere lies in its region: more than a list that is fixed
once could know. Both are judged by E_H on new trajectories with spheres in the regions of training alone, and in the
others alone, over σ of the former, from four frames of each. Finished trainings are kept in --work and not repeated.
Writes benchmarks/results/generality-<label>.json.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
import tyro
from provenance import commit
from torch import Tensor, nn

from nerd_contact import (
    ContactEncoderConfig,
    ContactSet,
    ContactSetEncoder,
    Counterpart,
    FixedContactConfig,
    FixedContactFeatures,
    Probe,
)
from nerd_core import (
    FlashNerdConfig,
    RobotSpec,
    StateCodec,
    TrainConfig,
    TrajectoryDataset,
    TrajectoryWriter,
    load_model,
    train,
)
from nerd_core.bench import identity
from nerd_core.command import print_json, say, speaking_plainly
from nerd_core.dataset import Trajectories
from nerd_core.evaluate import channel_sigma, squared_error
from nerd_core.progress import RunProgress
from nerd_core.rotation import quat_to_matrix
from nerd_core.windows import seeded_generator
from nerd_coupling.description import robot_spec

HORIZONS, STARTS, HISTORY = (1, 5, 15), (0, 10, 20, 30), 8
TARGETS = {"set: unseen over seen": "<= 1.2", "fixed list over set, unseen": ">= 3"}
MODEL = FlashNerdConfig(width=96, spans=(3, 3), hidden=192, readout_hidden=96)
SET, FIXED = "contact set", "fixed list"

# Chosen here: mass, inertia, friction and step of the tossed cube (assets/cube.xml); contacts five times as slow, so
# that a landing takes several frames and two tosses that begin alike stay alike for some time.
SPHERES, DISTANCE, RADIUS, FRICTION, MARGIN, SUBSTEPS = 6, 0.06, 0.015, 0.18, 0.08, 20
BODY = """
<mujoco model="bumps">
  <option timestep="0.00033783783783783786" cone="pyramidal" iterations="20" ls_iterations="20"/>
  <worldbody>
    <geom type="plane" size="0 0 1" contype="1" conaffinity="0" friction="{friction}" solref="0.02 1"/>
    <body name="body">
      <freejoint/>
      <inertial pos="0 0 0" mass="0.37" diaginertia="8.1e-4 8.1e-4 8.1e-4"/>
      {spheres}
    </body>
  </worldbody>
</mujoco>
"""
SPHERE = (
    '<geom type="sphere" size="{radius}" pos="{x} {y} {z}" contype="0" conaffinity="1" friction="{friction}" '
    'solref="0.02 1" mass="0"/>'
)


def body_model(places: Tensor) -> mujoco.MjModel:
    """The body with spheres at places (n, 3) [m] in its frame."""
    spheres = [SPHERE.format(radius=RADIUS, friction=FRICTION, x=x, y=y, z=z) for x, y, z in places.tolist()]
    return mujoco.MjModel.from_xml_string(BODY.format(friction=FRICTION, spheres="\n".join(spheres)))


def body_spec() -> RobotSpec:
    """The body's RobotSpec, which knows no spheres."""
    alone = mujoco.MjModel.from_xml_string(BODY.format(friction=FRICTION, spheres=""))
    return robot_spec(alone, name="bumps", substeps=SUBSTEPS, control="effort")


class Regions:
    """The body's directions, cut into Voronoi cells round evenly spread points, some of them held out.

    Args:
        count: Cells; the points are a Fibonacci spiral.
        share: Share of the cells that training never uses.
        seed: Which ones.

    Attributes:
        centers: Unit vectors to the middles, shape (count, 3).
        unseen: Whether a cell is held out, shape (count,), bool.
    """

    def __init__(self, count: int, share: float, seed: int) -> None:
        if count < 4 or not 0 < round(share * count) < count:
            raise ValueError(f"regions is {count} and unseen {share}, expected at least 4, some but not all held out")
        place = torch.arange(count, dtype=torch.float64)
        z, turn = 1 - (2 * place + 1) / count, place * math.pi * (3 - math.sqrt(5))
        flat = (1 - z * z).sqrt()
        self.centers = torch.stack([flat * turn.cos(), flat * turn.sin(), z], -1).float()
        order = torch.randperm(count, generator=seeded_generator(seed, "regions"))
        self.unseen = torch.zeros(count, dtype=torch.bool)
        self.unseen[order[: round(share * count)]] = True

    def of(self, places: Tensor) -> Tensor:
        """Cell of each place (..., 3), shape (...,)."""
        return (places @ self.centers.to(places.dtype).T).argmax(-1)

    def draw(self, bodies: int, unseen: bool, generator: torch.Generator) -> Tensor:
        """Spheres of that many bodies, uniform over the chosen cells [m], shape (bodies, SPHERES, 3)."""
        found: list[Tensor] = []
        while sum(len(part) for part in found) < bodies * SPHERES:
            way = torch.randn(4096, 3, generator=generator)
            way = way / way.norm(dim=-1, keepdim=True)
            found.append(way[self.unseen[self.of(way)] == unseen])
        return DISTANCE * torch.cat(found)[: bodies * SPHERES].view(bodies, SPHERES, 3)


Observer = Callable[[Tensor, Mapping[str, Tensor]], dict[str, Tensor]]


class Spheres:
    """Rows of spheres of a body against the plane z = 0.

    Args:
        robot: The body.
        chosen: Gives the spheres of each trajectory, (B, P, 3) [m], and which of them are there, (B, P), from a scene.
    """

    def __init__(self, robot: RobotSpec, chosen: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]) -> None:
        self._codec, self._chosen = StateCodec(robot), chosen

    def __call__(self, state: Tensor, scene: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields of a ContactSet, one row per sphere, of states (B, ..., 13) in scenes of leading size B."""
        places, there = self._chosen(scene)
        extra = state.dim() - 2
        center = places.view(len(places), *[1] * extra, *places.shape[1:])
        turn = quat_to_matrix(state[..., 3:7])
        up = turn[..., 2, :][..., None, :].expand(*state.shape[:-1], places.shape[1], 3)  # the world's z, base frame
        gap = state[..., 2, None] + (up * center).sum(-1) - RADIUS
        linear, angular = (twist[..., None, :].expand_as(up) for twist in self._codec.base_twist(state))
        point = center - RADIUS * up
        mask = (gap < MARGIN) & there.view(len(there), *[1] * extra, there.shape[1])
        link = torch.zeros_like(gap, dtype=torch.long)
        return ContactSet(
            point=point,
            normal=up,
            gap=gap,
            velocity=linear + torch.linalg.cross(angular, point),
            friction=torch.full_like(gap, FRICTION),
            link=link,
            kind=torch.full_like(link, Counterpart.STATIC),
            mask=mask,
            count=mask.sum(-1),
        )._asdict()


@dataclass(frozen=True, kw_only=True)
class Generality:
    """What to train and where to write the figures."""

    label: str
    """Name of the results file."""
    work: Path
    """Folder for data and runs; goes on with what is there."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initialisation and sampling; both models of a seed are paired."""
    regions: int = 64
    """Regions of the body's directions."""
    unseen: float = 0.25
    """Share of the regions that training never uses."""
    trajectories: int = 4000
    """Training trajectories of 50 steps (0.34 s)."""
    test_trajectories: int = 512
    """New trajectories, in the regions of training and in the others each."""
    updates: int = 3000
    """Teacher-forced updates of either model."""
    recursive: int = 500
    """Updates with the recursive loss after them."""
    batch: int = 128
    """Windows of ten frames per update."""
    lr: float = 1e-3
    """Peak learning rate."""
    out: Path = Path("benchmarks/results")

    def run(self) -> None:
        """Train what is missing, judge, write."""
        path = self.out / f"generality-{self.label}.json"
        if path.exists():
            raise ValueError(f"--label: {path} exists, expected a new name")
        torch.set_num_threads(1)
        regions = Regions(self.regions, self.unseen, seed=0)
        training = self._data("train", self.trajectories, regions, unseen=False, seed=0)
        tests = {
            name: self._data(f"test-{name}", self.test_trajectories, regions, unseen=name == "unseen", seed=1)
            for name in ("seen", "unseen")
        }
        found = [self._judge(seed, training, tests, regions) for seed in self.seeds]
        summary = {
            name: {h: [row["ratios"][name][h] for row in found] for h in HORIZONS} for name in found[0]["ratios"]
        }
        document: dict[str, Any] = {
            "command": "benchmarks/generality.py",
            "commit": commit(),
            "settings": {
                k: v if isinstance(v, int | float) else str(v)
                for k, v in asdict(self).items()
                if k not in ("work", "out")
            },
            "targets": TARGETS,
            "machine": identity(torch.device("cpu")),
            "threads": 1,
            "engine": {"name": "mujoco", "version": mujoco.__version__},
            "starts": STARTS,
            "digests": {"train": training.digest, **{name: data.digest for name, data in tests.items()}},
            "seeds": found,
            "summary": summary,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        print_json({"results": str(path), "summary": summary})

    def _data(self, name: str, count: int, regions: Regions, *, unseen: bool, seed: int) -> TrajectoryDataset:
        """Tosses, recorded by C MuJoCo; every shard is drawn from (seed, shard) alone."""
        folder, rows = self.work / name, min(count, 500)
        if (folder / "manifest.json").exists() and json.loads((folder / "manifest.json").read_text())["complete"]:
            return TrajectoryDataset.open(folder)
        shards = -(-count // rows)
        writer = TrajectoryWriter(
            folder,
            body_spec(),
            engine={"engine": "mujoco", "version": mujoco.__version__, "substeps": SUBSTEPS},
            seed=seed,
            extra={"regions": self.regions, "unseen": self.unseen, "held_out": unseen, "rows": rows, "shards": shards},
            resume=folder.exists(),
        )
        with writer, RunProgress(name, shards, unit="transitions", done=writer.num_shards) as bar:
            while writer.num_shards < shards:
                generator = seeded_generator(seed, "shard", writer.num_shards)
                places = regions.draw(rows, unseen, generator)
                states = torch.stack([_toss(spheres, generator) for spheres in places])
                bad = ~torch.isfinite(states).all(-1).all(-1)
                writer.reject("non-finite", int(bad.sum()))
                kept = states[~bad]
                writer.append(kept, kept.new_zeros(len(kept), kept.shape[1] - 1, 0), {"sphere": places[~bad]})
                bar.advance(rows * (states.shape[1] - 1))
        return TrajectoryDataset.open(folder)

    def _readers(self, regions: Regions) -> dict[str, tuple[nn.Module, Observer]]:
        """Encoder and observer of either model."""
        spec = body_spec()
        everywhere = torch.ones(1, SPHERES, dtype=torch.bool)
        middles = DISTANCE * regions.centers[~regions.unseen]
        cells = torch.nonzero(~regions.unseen).flatten()

        def spheres(scene: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            return scene["sphere"], everywhere.expand(len(scene["sphere"]), -1)

        def listed(scene: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            taken = regions.of(scene["sphere"])  # (B, SPHERES)
            alive = (taken[:, None] == cells[:, None]).any(-1)
            return middles.expand(len(taken), *middles.shape), alive

        def probes(places: Tensor) -> tuple[Probe, ...]:
            return tuple(
                Probe(name=f"p{i}", body=0, pos=(x, y, z), radius=RADIUS, friction=FRICTION)
                for i, (x, y, z) in enumerate(places.tolist())
            )

        # The encoder's own probes are not asked: the observer reads the spheres of each trajectory.
        reader = ContactSetEncoder(ContactEncoderConfig(margin=MARGIN, max_rows=SPHERES), spec, probes(middles[:1]))
        fixed = FixedContactFeatures(FixedContactConfig(margin=MARGIN), spec, probes(middles))
        return {SET: (reader, Spheres(spec, spheres)), FIXED: (fixed, Spheres(spec, listed))}

    def _judge(
        self, seed: int, training: TrajectoryDataset, tests: dict[str, TrajectoryDataset], regions: Regions
    ) -> dict[str, Any]:
        settings = TrainConfig(
            steps=self.updates,
            batch_size=self.batch,
            window=10,
            lr=self.lr,
            lr_final=self.lr / 10 if self.recursive else 1e-5,
            seed=seed,
            eval_every=max(self.updates // 4, 1),
            eval_trajectories=128,
            eval_horizons=(1, 5, 15),
            checkpoint_every=max(self.updates // 4, 1),
            recursive_steps=self.recursive,
            recursive_horizon=12,
            recursive_batch=max(10 * self.batch // 14, 1),
            recursive_lr=self.lr / 5,
        )
        truths = {name: data.load() for name, data in tests.items()}
        sigma = channel_sigma(training.robot, truths["seen"].states)
        errors: dict[str, dict[str, dict[int, float]]] = {}
        torch.manual_seed(seed)
        for name, (encoder, observe) in self._readers(regions).items():
            out = self.work / f"{name.replace(' ', '-')}-{seed}"
            if not (out / "done").exists():
                resume = (out / "last").exists()
                train(training, MODEL, settings, out=out, context_encoder=encoder, observe=observe, resume=resume)
                (out / "done").touch()
            model, _ = load_model(out / "best")
            errors[name] = {where: _errors(model, truth, sigma, observe) for where, truth in truths.items()}
            say(f"seed {seed}, {name}: {errors[name]}")
        ratios = {
            "set: unseen over seen": _over(errors[SET]["unseen"], errors[SET]["seen"]),
            "fixed list: unseen over seen": _over(errors[FIXED]["unseen"], errors[FIXED]["seen"]),
            "fixed list over set, unseen": _over(errors[FIXED]["unseen"], errors[SET]["unseen"]),
            "fixed list over set, seen": _over(errors[FIXED]["seen"], errors[SET]["seen"]),
        }
        return {"seed": seed, "E_H": errors, "ratios": ratios}


def _toss(places: Tensor, generator: torch.Generator) -> Tensor:
    """States (51, 13) of one toss: uniform turns, slow to fast, the lowest sphere up to 4 cm above the ground."""
    model, steps = body_model(places), 50
    data = mujoco.MjData(model)
    quat = torch.randn(4, generator=generator)
    quat = quat / quat.norm()
    uniform = 2 * torch.rand(6, generator=generator) - 1
    clearance = 0.04 * float(torch.rand((), generator=generator))
    lowest = float((places @ quat_to_matrix(quat).T)[:, 2].min())
    start = torch.cat([torch.tensor([0.0, 0.0, clearance + RADIUS - lowest]), quat])
    velocity = uniform * torch.tensor([0.8, 0.8, 0.6, 8.0, 8.0, 8.0]) - torch.tensor([0.0, 0.0, 0.4, 0.0, 0.0, 0.0])
    data.qpos[:], data.qvel[:] = start.double().numpy(), velocity.double().numpy()
    states = [np.concatenate([data.qpos, data.qvel])]
    for _ in range(steps):
        mujoco.mj_step(model, data, nstep=SUBSTEPS)
        states.append(np.concatenate([data.qpos, data.qvel]))
    return torch.from_numpy(np.stack(states)).float()


def _errors(model: Any, truth: Trajectories, sigma: Tensor, observe: Observer) -> dict[int, float]:
    """E_H by horizon, over starts along the trajectories: a toss begins in the air, and what it does there is easy."""
    squared = [
        squared_error(
            model, truth, HORIZONS[-1], sigma, observe=observe, start=start, history=min(start, HISTORY)
        ).mean(0)
        for start in STARTS
    ]
    mean = torch.stack(squared).mean(0)
    return {h: round(float(mean[h - 1].sqrt()), 6) for h in HORIZONS}


def _over(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return {h: round(one[h] / other[h], 4) for h in HORIZONS}


if __name__ == "__main__":
    speaking_plainly("benchmarks/generality.py", lambda: tyro.cli(Generality, description=__doc__).run())
