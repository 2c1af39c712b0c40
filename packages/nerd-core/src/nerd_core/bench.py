"""Q_B: env-steps per second of the bare model at batch B, beside the roofline and beside the optimized baseline.

A step goes from states, controls and the cache of past frames to increments and the cache that holds the new frame:
codec, normaliser, network and cache, the same for every model. Inputs are on the device, histories are full, and
compiling and warming up are not timed.

Source: FlashNeRD Table I (Q_B). Chosen here: the median over repeats; the models of a batch take turns, repeat by
repeat, and their ratio is taken pair by pair, so that a machine whose speed drifts does not move it.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from .baseline import NerdBaseline
from .command import say
from .device import cores, processor, threads
from .robot import RobotSpec
from .rollout import prefill
from .roofline import Machine, cache_bytes, measure_machine, measured_cache_bytes, step_cost, synchronize
from .streaming import CompiledStep, EagerStep, compile_streaming

__all__ = ["Contender", "Measurement", "Settings", "bench", "identity", "one_step_error"]

CPU_BATCHES = (16, 1024, 16_384)
CUDA_BATCHES = (*CPU_BATCHES, 512_000)
MOST_STEPS = 10_000
"""Steps of one repeat, at most."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        batch: Batch sizes; none for 16, 1,024 and 16,384, and 512,000 on a GPU.
        forms: Forms of the step.
        precision: float32, bfloat16, or auto: bfloat16 where the processor multiplies it natively.
        threads: CPU threads; none for one per core at most, fewer where a step is small.
        repeats: Repeats of every measurement.
        seconds: Time of a measurement, all repeats together [s]; a repeat has at least one step.
    """

    batch: tuple[int, ...] | None = None
    forms: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    threads: int | None = None
    repeats: int = 7
    seconds: float = 2.0

    def __post_init__(self) -> None:
        for name, values in (("batch", self.batch or ()), ("threads", (self.threads,)), ("repeats", (self.repeats,))):
            for value in values:
                if value is not None and value < 1:
                    raise ValueError(f"{name} is {value}, expected at least 1")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}, expected a positive time")
        if not self.forms or set(self.forms) - {"eager", "compiled"}:
            raise ValueError(f"forms is {self.forms}, expected eager, compiled or both")


@dataclass(frozen=True)
class Contender:
    """A model under a name; the weights do not matter for its speed."""

    name: str
    model: Any


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Speed of one model in one form at one batch size.

    Attributes:
        model: Name.
        form: eager or compiled.
        batch: Rows B.
        threads: CPU threads.
        chunk: Rows that go through the step together; none where that is the batch.
        steps_per_s: Env-steps per second, median of the repeats.
        low: The slowest repeat.
        high: The fastest one.
        ms_per_step: Time of a step of the batch [ms], median.
        flops_per_s: FLOP/s, from the formula.
        bytes_per_s: B/s that must move, from the formula.
        roofline: Fraction of the speed that the machine's peaks allow.
        ratio: Median over the repeats of the speed over the reference's in the same form.
        timed_steps: Steps of the batch that were timed.
    """

    model: str
    form: str
    batch: int
    threads: int
    chunk: int | None
    steps_per_s: float
    low: float
    high: float
    ms_per_step: float
    flops_per_s: float
    bytes_per_s: float
    roofline: float
    ratio: float
    timed_steps: int


def bench(
    contenders: Sequence[Contender], settings: Settings, machine: Machine, *, device: torch.device
) -> Iterator[list[Measurement]]:
    """Measure models side by side; gives one list, in their order, per batch size and form.

    Ratios are to the reference: the first :class:`NerdBaseline`, or the first model where there is none.

    Args:
        contenders: The models, on ``device``.
        settings: How to measure.
        machine: Peaks of the device.
        device: Where the models are.
    """
    for batch in settings.batch or (CUDA_BATCHES if device.type == "cuda" else CPU_BATCHES):
        for form in settings.forms:
            runners = []
            for contender in contenders:
                with _stage(f"{contender.name}, {form}, batch {batch}: preparing and warming up"):
                    runners.append(_Runner(contender, batch, form, settings, device))
            with _stage(f"{form}, batch {batch}: measuring {len(runners)} models, {settings.repeats} repeats"):
                times = [[runner.time() for runner in runners] for _ in range(settings.repeats)]
            reference = reference_of(contenders)
            yield [
                _measurement(runner, [row[i] for row in times], [row[reference] for row in times], machine)
                for i, runner in enumerate(runners)
            ]


def reference_of(contenders: Sequence[Contender]) -> int:
    """Index of the model that the others are compared with."""
    return next((i for i, c in enumerate(contenders) if isinstance(c.model, NerdBaseline)), 0)


class _Runner:
    """A step with its inputs and a full history, warmed up."""

    def __init__(self, contender: Contender, batch: int, form: str, settings: Settings, device: torch.device) -> None:
        self.name, self.model, self.batch, self.form = contender.name, contender.model, batch, form
        self.step = compile_streaming(
            self.model, batch, form=form, precision=settings.precision, threads=settings.threads, full=True
        )
        compiled = self.step if isinstance(self.step, CompiledStep) else None
        self.chunk = compiled.chunk if compiled and compiled.chunk < batch else None
        self.threads = compiled.threads if compiled else settings.threads or cores()
        self._device = device
        self._state, self._control = example_inputs(self.model.robot, batch, device)
        self._cache = full_history(self.model, batch, device)
        # The second step is free of first-time work: its time says how many make a repeat.
        self.steps = 1
        self.time()
        self.steps = max(1, min(MOST_STEPS, int(settings.seconds / settings.repeats / self.time())))

    def time(self) -> float:
        """Seconds per step, over ``steps`` of them."""
        step, state, control, cache = self.step.step, self._state, self._control, self._cache
        with threads(self.threads):
            synchronize(self._device)
            started = time.perf_counter()
            for _ in range(self.steps):
                _, cache = step(state, control, None, cache)
            synchronize(self._device)
            took = time.perf_counter() - started
        self._cache = cache
        return took / self.steps


def _measurement(runner: _Runner, times: list[float], reference: list[float], machine: Machine) -> Measurement:
    cost, batch, seconds = step_cost(runner.model), runner.batch, _median(times)
    return Measurement(
        model=runner.name,
        form=runner.form,
        batch=batch,
        threads=runner.threads,
        chunk=runner.chunk,
        steps_per_s=batch / seconds,
        low=batch / max(times),
        high=batch / min(times),
        ms_per_step=1e3 * seconds,
        flops_per_s=batch * cost.flops / seconds,
        bytes_per_s=batch * cost.bytes_per_world(batch) / seconds,
        roofline=cost.bound_seconds(batch, machine) / seconds,
        ratio=_median([theirs / mine for mine, theirs in zip(times, reference, strict=True)]),
        timed_steps=runner.steps * len(times),
    )


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def example_inputs(robot: RobotSpec, batch: int, device: torch.device, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """States (B, nq + nv) near rest and controls (B, nu) over their range, drawn from a seed."""
    draw = torch.Generator().manual_seed(seed)
    state = 0.1 * torch.randn(batch, robot.state_size, generator=draw)
    if robot.floating:
        state[:, 3] = 1.0
        state[:, 3:7] /= state[:, 3:7].norm(dim=1, keepdim=True)
    low, high = torch.tensor(robot.ctrl_range).reshape(-1, 2).unbind(1)
    control = low + (high - low) * torch.rand(batch, robot.nu, generator=draw)
    return state.to(device), control.to(device)


def full_history(model: Any, batch: int, device: torch.device) -> Any:
    """Cache of ``batch`` worlds that have all seen the receptive field."""
    state, control = example_inputs(model.robot, model.config.receptive_field, device, seed=1)
    return prefill(EagerStep(model), state[None], control[None]).expand(batch)


def one_step_error(model: Any, precision: str, *, rows: int = 256) -> float:
    """Root mean square of a precision's error of one step, in standard deviations of the increments."""
    device = next(model.parameters()).device
    state, control = example_inputs(model.robot, rows, device)
    exact, rough = (
        compile_streaming(model, rows, form="eager", precision=p).step(
            state, control, None, full_history(model, rows, device)
        )[0]
        for p in ("float32", precision)
    )
    return float(((rough - exact) / model.target_stats.std).square().mean().sqrt())


def identity(device: torch.device) -> dict[str, Any]:
    """Machine and versions, for results."""
    return {
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nerd-core": metadata.version("nerd-core"),
    }


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Show what is going on: a spinner, or a line where standard error is not a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        say(what)
        yield


def measure(
    contenders: Sequence[Contender], settings: Settings, device: torch.device
) -> tuple[dict[str, Any], list[Measurement]]:
    """Run a whole benchmark: peaks, memory, every batch and form; the document and its measurements."""
    with _stage("measuring the machine's peaks"), threads(settings.threads or cores()):
        machine = measure_machine(device)
    rows = [row for group in bench(contenders, settings, machine, device=device) for row in group]
    models = [
        {
            "name": c.name,
            "architecture": type(c.model).__name__,
            "config": asdict(c.model.config),
            "robot": c.model.robot.name,
            "parameters": c.model.num_parameters,
            "step_cost": asdict(step_cost(c.model)),
            "cache_bytes_per_world": {"formula": cache_bytes(c.model), "measured": measured_cache_bytes(c.model)},
        }
        | (
            {}
            if settings.precision == "float32"
            else {"one_step_error_in_std": one_step_error(c.model, settings.precision)}
        )
        for c in contenders
    ]
    document = {
        "definition": "Q_B: env-steps per second of the bare model, codec and normaliser included, after warm-up",
        "machine": identity(device),
        "peaks": asdict(machine),
        "settings": asdict(settings),
        "reference": contenders[reference_of(contenders)].name,
        "models": models,
        "measurements": [asdict(row) for row in rows],
    }
    return document, rows
