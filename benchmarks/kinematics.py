"""Forward kinematics of B states: ours, MuJoCo in a loop, and pytorch-kinematics where it is installed.

Run from the repository's root, alone on the machine:

    uv run --with pytorch-kinematics python benchmarks/kinematics.py --label cpu-2cores

Without ``--with pytorch-kinematics`` its rows say "not installed". What each one does for B states on the CPU:

* ours: poses and velocities of every link in the base frame, float32; eager and compiled; with gradients, their sum
  is differentiated with respect to the states.
* MuJoCo: ``mj_kinematics`` for one state after the other, called from Python in one thread: world poses of bodies,
  geoms and sites, float64, no velocities, no gradients. One call's own cost is given as well, without the loop.
* pytorch-kinematics: poses of every link relative to the base, float32, from a chain made of the same tree; no
  velocities. Checked against ours before it is timed.

The contenders are measured in turns, repeat by repeat; a figure is the median. Writes
benchmarks/results/kinematics-<label>.json with machine, threads, versions and commit; the last line on standard
output is the summary.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import mujoco
import torch
import tyro
from provenance import commit
from torch import Tensor

from nerd_contact import Kinematics
from nerd_core import RobotSpec
from nerd_core.bench import identity
from nerd_core.command import print_json, say, speaking_plainly
from nerd_coupling.robots import Robot, load_robot

PEER = "pytorch-kinematics"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to measure and where to write it."""

    label: str
    """Name of the results file."""
    robots: tuple[str, ...] = ("go2", "franka")
    """Shipped robots."""
    batches: tuple[int, ...] = (1, 64, 1024, 8192)
    """States at once."""
    repeats: int = 7
    """Measurements of each contender, in turns."""
    seconds: float = 0.3
    """Least length of one measurement [s]."""
    threads: int = 1
    """Threads of torch."""
    out: Path = Path("benchmarks/results")

    def run(self) -> None:
        """Measure, write the file, print the summary."""
        path = self.out / f"kinematics-{self.label}.json"
        if path.exists():
            raise ValueError(f"--label: {path} exists, expected a new name")
        for name, value in (
            ("repeats", self.repeats),
            ("threads", self.threads),
            *(("batches", b) for b in self.batches),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        torch.set_num_threads(self.threads)
        rows = [row for name in self.robots for batch in self.batches for row in self._measure(load_robot(name), batch)]
        summary = {
            f"{row['robot']} {row['batch']} {row['method']}": row.get("microseconds per state", row.get("note"))
            for row in rows
        }
        whole = {
            "command": "benchmarks/kinematics.py",
            "commit": commit(),
            "machine": {**identity(torch.device("cpu")), "mujoco": mujoco.__version__, PEER: _version(PEER)},
            "threads": self.threads,
            "repeats": self.repeats,
            "seconds": self.seconds,
            "rows": rows,
            "summary": summary,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1) + "\n")
        print_json({"results": str(path), "microseconds per state": summary})

    def _measure(self, robot: Robot, batch: int) -> list[dict[str, Any]]:
        say(f"{robot.name}, {batch} states")
        state = random_states(robot.spec, batch)
        contenders: dict[str, Callable[[], object]] = {
            "ours, eager": _ours(robot.spec, state),
            "ours, compiled": _compiled(robot.spec, state),
            "ours, eager, with gradients": _gradients(robot.spec, state),
            "MuJoCo loop": _mujoco_loop(robot, state),
            "MuJoCo call alone": _mujoco_call(robot),
        }
        peer = _peer(robot.spec, state)
        if peer is not None:
            contenders[PEER] = peer
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for run in contenders.values():
            run()  # compile and warm up
        for _ in range(self.repeats):
            for name, run in contenders.items():
                times[name].append(_seconds(run, self.seconds))
        rows: list[dict[str, Any]] = []
        for name, found in times.items():
            states = 1 if name == "MuJoCo call alone" else batch
            rows.append(
                {
                    "robot": robot.name,
                    "batch": batch,
                    "method": name,
                    "microseconds per state": round(1e6 * statistics.median(found) / states, 4),
                    "least and largest": [round(1e6 * t / states, 4) for t in (min(found), max(found))],
                }
            )
        if peer is None:
            rows.append({"robot": robot.name, "batch": batch, "method": PEER, "note": "not installed"})
        return rows


def random_states(spec: RobotSpec, batch: int) -> Tensor:
    """Random float32 states, shape (batch, nq + nv)."""
    state = torch.randn(batch, spec.state_size, generator=torch.Generator().manual_seed(0))
    if spec.floating:
        state[:, 3:7] /= state[:, 3:7].norm(dim=-1, keepdim=True)
    return state


def _seconds(run: Callable[[], object], least: float) -> float:
    """Mean time of one call, over at least ``least`` seconds."""
    count, start = 0, time.perf_counter()
    while True:
        run()
        count += 1
        spent = time.perf_counter() - start
        if spent >= least:
            return spent / count


def _ours(spec: RobotSpec, state: Tensor) -> Callable[[], object]:
    kinematics = Kinematics(spec)
    return torch.no_grad()(lambda: kinematics(state))


def _compiled(spec: RobotSpec, state: Tensor) -> Callable[[], object]:
    torch.compiler.reset()
    kinematics = torch.compile(Kinematics(spec).__call__, dynamic=False)
    return torch.no_grad()(lambda: kinematics(state))


def _gradients(spec: RobotSpec, state: Tensor) -> Callable[[], object]:
    kinematics, leaf = Kinematics(spec), state.clone().requires_grad_(True)
    return lambda: torch.autograd.grad([value.sum() for value in kinematics(leaf)], leaf)


def _mujoco_loop(robot: Robot, state: Tensor) -> Callable[[], object]:
    mj_model = mujoco.MjModel.from_xml_string(robot.mjcf)
    data, qpos = mujoco.MjData(mj_model), state[:, : robot.spec.nq].double().numpy()

    def run() -> None:
        for row in qpos:
            data.qpos[:] = row
            mujoco.mj_kinematics(mj_model, data)

    return run


def _mujoco_call(robot: Robot) -> Callable[[], object]:
    mj_model = mujoco.MjModel.from_xml_string(robot.mjcf)
    data = mujoco.MjData(mj_model)
    return lambda: mujoco.mj_kinematics(mj_model, data)


def _peer(spec: RobotSpec, state: Tensor) -> Callable[[], object] | None:
    """Poses by pytorch-kinematics; None where it is not installed.

    Its reader of MJCF knows no joint types of MuJoCo 3.17, so its frames are made of our tree.
    """
    if util.find_spec("pytorch_kinematics") is None:
        return None
    from pytorch_kinematics import chain as chains  # pyright: ignore[reportMissingImports]
    from pytorch_kinematics import frame as frames  # pyright: ignore[reportMissingImports]
    from pytorch_kinematics import transforms  # pyright: ignore[reportMissingImports]

    kinds = {"hinge": "revolute", "slide": "prismatic"}
    joints = {joint.body: joint for joint in spec.joints}
    made: list[Any] = []
    for index, body in enumerate(spec.bodies):
        # The base frame of a floating base is the frame of its root link.
        offset = None
        if body.parent >= 0 or not spec.floating:
            offset = transforms.Transform3d(pos=list(body.pos), rot=list(body.quat))
        joint = frames.Joint(f"{body.name}_fixed")
        if index in joints:
            given = joints[index]
            if any(given.pos):
                return None  # an anchor off the link's origin is beyond it
            joint = frames.Joint(given.name, axis=list(given.axis), joint_type=kinds[given.kind])
        made.append(frames.Frame(body.name, link=frames.Link(body.name, offset=offset), joint=joint))
        if body.parent >= 0:
            made[body.parent].children.append(made[index])
    root = made[0]
    if 0 in joints:  # its root carries no joint
        root = frames.Frame("world")
        root.children.append(made[0])
    chain = chains.Chain(root)
    names = [joint.name for joint in spec.joints]
    order = [names.index(name) for name in chain.get_joint_parameter_names()]
    first = 7 if spec.floating else 0
    angle = state[:, first : spec.nq][:, order].contiguous()

    def run() -> dict[str, Any]:
        with torch.no_grad():
            return chain.forward_kinematics(angle)

    found = run()
    theirs = torch.stack([found[body.name].get_matrix()[:, :3, 3].expand(len(state), 3) for body in spec.bodies], 1)
    worst = float((theirs - Kinematics(spec)(state).pos).abs().max())
    if not worst < 1e-4:
        raise ValueError(f"{PEER}: link positions differ from ours by {worst:.1e} m, expected the same tree")
    return run


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    speaking_plainly("benchmarks/kinematics.py", lambda: tyro.cli(Comparison, description=__doc__).run())
