"""Is an exported file the model it was made from? Open :func:`verify_onnx` first.

Both predict recursively, each from its own states and its own contacts. Rounding alone makes them
drift apart: contacts switch, a pole falls to one side or the other, and a learned model may amplify
the last bit a millionfold in 200 steps. So three numbers stand beside that drift:

* how far torch in float32 drifts from torch in float64, the model's own sensitivity to rounding;
* the error of single steps along torch's states, where nothing is amplified;
* the recursive drift of a float64 copy of the same graph from torch in float64. There, rounding
  starts nine orders lower, so that 200 steps of amplification stay below the tolerance, and a
  mistake in the graph does not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nerd_core import FlashNerd, StateCodec
from nerd_core.progress import RunProgress

from .artifact import model_bytes
from .export import load_source, onnx_bytes, require_exporter
from .graph import same_graph
from .onnx_step import OnnxStep
from .scenario import Scenario, draw_scenario

__all__ = ["verify_onnx"]

LIMIT = 1e3
"""A world whose state exceeds this, in SI units, has diverged; it is not compared any longer."""
FACTOR = 10.0
"""The file may lose this much more than torch itself loses to rounding."""
SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200, 500, 1000)


class TorchPath:
    """The model's own streaming step."""

    def __init__(self, model: FlashNerd, batch: int) -> None:
        self._model, self.dtype = model, model.embed.weight.dtype
        self._cache = model.init_cache(batch)

    def reset(self, mask: Tensor) -> None:
        """Forget the history of the worlds in the mask."""
        self._cache = self._cache.reset(mask)

    def step(self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None) -> Tensor:
        """States after one model step."""
        delta, self._cache = self._model.step(state, control, context, self._cache)
        return self._model.codec.integrate(state, delta)


class OnnxPath:
    """The exported file, its output buffers poisoned before every step."""

    def __init__(self, step: OnnxStep, batch: int) -> None:
        self._step, self.dtype = step, getattr(torch, step.manifest["precision"])
        step.init(batch)

    def reset(self, mask: Tensor) -> None:
        """Forget the history of the worlds in the mask."""
        self._step.reset(mask.numpy())

    def step(self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None) -> Tensor:
        """States after one model step."""
        self._step.poison()
        arrays = {name: value.numpy() for name, value in (context or {}).items()}
        return torch.from_numpy(self._step.step(state.numpy(), control.numpy(), arrays))


Predictor = TorchPath | OnnxPath


class Drift(NamedTuple):
    """Largest difference of two paths per world and step, (B, T + 1), and where it counts."""

    error: Tensor
    alive: Tensor

    def summary(self, tolerance: float) -> dict[str, Any]:
        """JSON values over all worlds and steps."""
        beyond = (self.error > tolerance) & self.alive
        steps = beyond.any(0).nonzero()
        return {
            "max_abs": self.largest(),
            "worlds_beyond": int(beyond.any(1).sum()),
            "first_beyond": int(steps[0]) if len(steps) else None,
        }

    def largest(self) -> float | None:
        """Over all worlds and steps that count; None if there is none, or it is not finite."""
        counted = self.error[self.alive]
        return _json(counted.max()) if len(counted) else None

    def at(self, step: int, tolerance: float) -> dict[str, Any]:
        """JSON values at one step; ``beyond`` counts the worlds up to there."""
        error = self.error[self.alive[:, step], step]
        beyond = (self.error[:, : step + 1] > tolerance) & self.alive[:, : step + 1]
        return {
            "max": _json(error.max()) if len(error) else None,
            "median": _json(error.median()) if len(error) else None,
            "beyond": int(beyond.any(1).sum()),
        }

    def medians(self) -> Tensor:
        """Median over the worlds that count, per step, shape (T + 1,)."""
        return self.error.where(self.alive, torch.nan).nanmedian(0).values.nan_to_num(0.0)


def verify_onnx(
    model: str | Path,
    onnx: str | Path,
    *,
    steps: int = 200,
    batches: Sequence[int] = (1, 3, 64),
    tolerance: float = 1e-4,
    strict: bool = False,
    start: Tensor | None = None,
    scene: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    motion: float = 0.05,
    provider: str = "CPUExecutionProvider",
    progress: bool = False,
) -> dict[str, Any]:
    """Compare an exported file with its model over recursive steps, with a reset half-way.

    Differences are those of ``StateCodec.differentiate``: metres, rotation vectors and wrapped
    angles in rad, and velocities; the largest entry counts. The verdict is ``float32`` if the file
    stays within the tolerance of torch in every world and at every step. Otherwise it is
    ``float64``, if a float64 copy of the same graph does, single steps agree, and the file drifts
    no faster than torch drifts from itself. Otherwise ``drift``; or ``diverged`` if the model left
    all bounds before half of the steps, and there is nothing to compare.

    Args:
        model: Model folder or run folder.
        onnx: The exported file, or the folder of an artifact.
        steps: Recursive steps.
        batches: Batch sizes.
        tolerance: Largest difference allowed.
        strict: Accept the verdict ``float32`` only.
        start: States to start from, shape (N, nq + nv); None for random ones about the middle of
            the joints' ranges.
        scene: Surroundings of each of them, leading size N, or 1 for all; None for a plane and a
            deck.
        seed: Seed of starts and controls.
        motion: Half range of the controls: joint targets [rad], or efforts as a share of the largest one.
        provider: Execution provider of onnxruntime.
        progress: Show progress on standard error.

    Returns:
        JSON values: ``passed``, ``verdict``, ``reason``, ``max_abs``, the drift per batch size and
        per step.

    Raises:
        ValueError: Files that are missing, damaged or do not belong together, or settings out of
            range.
        ImportError: The libraries of the extra ``export`` are missing.
    """
    require_exporter()
    if steps < 1:
        raise ValueError(f"steps is {steps}, expected at least 1")
    if not batches or min(batches) < 1:
        raise ValueError(f"batches is {tuple(batches)}, expected sizes of at least 1")
    if not 0 < tolerance < float("inf"):
        raise ValueError(f"tolerance is {tolerance}, expected a positive number")
    if not 0 < motion < float("inf"):
        raise ValueError(f"motion is {motion}, expected a positive number")
    if not 0 <= seed < 2**63 - len(batches):
        raise ValueError(f"seed is {seed}, expected at least 0 and below 2^63")
    served = OnnxStep(onnx, provider=provider)
    network, described = load_source(model)
    _refuse_strangers(served.manifest, described, onnx)
    exact = copy.deepcopy(network).double()
    scenarios = [
        draw_scenario(network, batch, steps, seed=seed + i, motion=motion, start=start, scene=scene)
        for i, batch in enumerate(batches)
    ]
    with RunProgress("verify", 2 * len(batches), unit="world-steps", shown=progress) as bar:
        found = []
        for scenario in scenarios:
            found.append(_compare(network, exact, served, scenario))
            bar.advance(5 * len(scenario.start) * steps)
        recursive, own = _pool(found, "recursive"), _pool(found, "own")
        result = _result(found, recursive, own, tolerance)
        if result["verdict"] == "drift" and not strict:
            data, _ = onnx_bytes(network, described, precision="float64")
            if gap := same_graph(model_bytes(onnx)[1], data):
                result["reason"] += f"; its graph is not what is exported now: {gap}"
            else:
                copied = _float64_drift(network, exact, data, scenarios, found, bar)
                result |= _excuse(result, copied, recursive, own, tolerance)
    return {
        **result,
        "tolerance": tolerance,
        "steps": steps,
        "reset_at": scenarios[0].reset_at,
        "seed": seed,
        "motion": motion,
        "batches": [
            {"batch": batch, **_pool([one], "recursive").summary(tolerance)}
            for batch, one in zip(batches, found, strict=True)
        ],
        "model": served.manifest["model"],
        "name": served.manifest["name"],
        "provider": provider,
        "versions": {"onnxruntime": version("onnxruntime"), "torch": torch.__version__},
    }


class Comparison(NamedTuple):
    """Differences of one scenario, shapes (B, T + 1), or (B, T) for the single steps."""

    truth: Tensor
    alive: Tensor
    recursive: Tensor
    own: Tensor
    single: Tensor
    own_single: Tensor


@torch.no_grad()
def _compare(model: FlashNerd, exact: FlashNerd, served: OnnxStep, scenario: Scenario) -> Comparison:
    batch, codec = len(scenario.start), model.codec
    plain, single = _run(model, TorchPath(model, batch), scenario, OnnxPath(served, batch), TorchPath(exact, batch))
    truth, _ = _run(exact, TorchPath(exact, batch), scenario)
    onnx, _ = _run(model, OnnxPath(served, batch), scenario)
    fine = truth.isfinite().all(-1) & plain.isfinite().all(-1)
    fine &= (truth.abs().amax(-1) < LIMIT) & (plain.abs().amax(-1) < LIMIT)
    alive = fine.cumprod(1).bool()
    return Comparison(
        truth,
        alive,
        _difference(codec, onnx, plain),
        _difference(codec, plain, truth),
        single[0],
        single[1],
    )


def _run(model: FlashNerd, path: Predictor, scenario: Scenario, *followers: Predictor) -> tuple[Tensor, list[Tensor]]:
    """States of a path, (B, T + 1, nq + nv); how far each follower's steps are from its, (B, T)."""
    encoder: Any = model.context_encoder
    state, states = scenario.start.to(path.dtype), [scenario.start.to(path.dtype)]
    errors: list[list[Tensor]] = [[] for _ in followers]
    for t in range(scenario.controls.shape[1]):
        if t == scenario.reset_at:
            for one in (path, *followers):
                one.reset(scenario.reset)
        control = scenario.controls[:, t].to(path.dtype)
        context = encoder.observe(state, scenario.scene) if encoder is not None else None
        after = path.step(state, control, context)
        for follower, error in zip(followers, errors, strict=True):
            cast = context and {n: _cast(v, follower.dtype) for n, v in context.items()}
            like = follower.dtype
            other = follower.step(_cast(state, like), _cast(control, like), cast)
            error.append(_difference(model.codec, other, after))
        state = after
        states.append(state)
    return torch.stack(states, 1), [torch.stack(error, 1) for error in errors]


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _difference(codec: StateCodec, one: Tensor, other: Tensor) -> Tensor:
    error = codec.differentiate(one.double(), other.double()).abs().amax(-1)
    return error.nan_to_num(nan=torch.inf)


def _pool(found: Sequence[Comparison], name: str) -> Drift:
    parts = [getattr(one, name) for one in found]
    # A single step counts where the state that it starts from does.
    pairs = zip(found, parts, strict=True)
    return Drift(torch.cat(parts), torch.cat([one.alive[:, : p.shape[1]] for one, p in pairs]))


def _result(found: list[Comparison], recursive: Drift, own: Drift, tolerance: float) -> dict[str, Any]:
    single, own_single = _pool(found, "single"), _pool(found, "own_single")
    steps = recursive.error.shape[1] - 1
    compared = float(recursive.alive.double().mean())
    summary = recursive.summary(tolerance)
    verdict, reason = "float32", "every world stays within the tolerance at every step"
    if compared < 0.5:
        verdict = "diverged"
        reason = f"only {compared:.0%} of the steps are within bounds; start from states it knows"
    elif summary["worlds_beyond"]:
        verdict = "drift"
        reason = f"{summary['worlds_beyond']} worlds leave the tolerance, "
        reason += f"the first at step {summary['first_beyond']}"
    return {
        "command": "verify",
        "passed": verdict == "float32",
        "verdict": verdict,
        "reason": reason,
        **summary,
        "compared": compared,
        "torch_float32_from_float64": own.summary(tolerance),
        "single_step": {
            "max_abs": single.largest(),
            "torch_float32_from_float64": own_single.largest(),
        },
        "float64": None,
        "drift": [
            {
                "step": step,
                "onnx_from_torch": recursive.at(step, tolerance),
                "torch_float32_from_float64": own.at(step, tolerance),
            }
            for step in sorted({*(s for s in SHOWN if s < steps), steps})
        ],
    }


@torch.no_grad()
def _float64_drift(
    model: FlashNerd,
    exact: FlashNerd,
    data: bytes,
    scenarios: list[Scenario],
    found: list[Comparison],
    bar: RunProgress,
) -> Drift:
    """Drift of a float64 copy of the file's graph from torch in float64."""
    copied = OnnxStep(data)
    errors = []
    for scenario, one in zip(scenarios, found, strict=True):
        states, _ = _run(exact, OnnxPath(copied, len(scenario.start)), scenario)
        errors.append(_difference(model.codec, states, one.truth))
        bar.advance(scenario.controls.shape[:2].numel())
    return Drift(torch.cat(errors), torch.cat([one.alive for one in found]))


def _excuse(result: dict[str, Any], copied: Drift, recursive: Drift, own: Drift, tolerance: float) -> dict[str, Any]:
    """Whether the drift in float32 is no more than rounding that the model itself amplifies."""
    summary, single = copied.summary(tolerance), result["single_step"]
    beyond = own.summary(tolerance)["worlds_beyond"]
    least = FACTOR * (single["torch_float32_from_float64"] or 0.0)
    allowed = (FACTOR * own.medians()).clamp_min(tolerance)
    faults = []
    if summary["worlds_beyond"]:
        faults.append(f"a float64 copy of its graph drifts by {summary['max_abs']}")
    if single["max_abs"] is None or single["max_abs"] > max(tolerance / FACTOR, least):
        faults.append(f"single steps differ by {single['max_abs']}")
    if bool((recursive.medians() > allowed).any()) or result["worlds_beyond"] > 3 * beyond + 3:
        faults.append(f"torch's own rounding takes only {beyond} worlds that far")
    if faults:
        return {"float64": summary, "reason": f"{result['reason']}; {'; '.join(faults)}"}
    reason = f"{result['reason']}, but so do {beyond} of torch in float32 from torch in float64: "
    reason += "the model amplifies rounding. A float64 copy of the same graph stays within "
    reason += f"{summary['max_abs']:.0e}"
    return {"float64": summary, "passed": True, "verdict": "float64", "reason": reason}


def _refuse_strangers(manifest: Mapping[str, Any], described: Mapping[str, Any], onnx: str | Path) -> None:
    """Refuse a file that was made from another model."""
    theirs = {**manifest, "weights_sha256": manifest["model"].get("weights_sha256")}
    ours = {**described, "weights_sha256": described["model"]["weights_sha256"]}
    names = ("robot_digest", "config", "context", "weights_sha256")
    if other := [name for name in names if theirs.get(name) != ours[name]]:
        raise ValueError(f"{onnx}: made from another model, they differ in {', '.join(other)}")


def _json(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None
