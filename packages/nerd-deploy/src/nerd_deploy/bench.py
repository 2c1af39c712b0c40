"""Latency of a step, per batch size."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .artifact import read_artifact
from .backend import open_backend
from .golden import Golden
from .onnx_step import OnnxStep

__all__ = ["bench_artifact"]

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


def bench_artifact(
    source: str | Path | bytes,
    *,
    backend: str = "ort-cpu",
    batches: Sequence[int] = (1, 16, 256),
    steps: int = 2000,
    warmup: int = 200,
    threads: int = 1,
    spin: bool = False,
) -> dict[str, Any]:
    """Time single steps, ring write and copies in and out included.

    Of an artifact, the golden states and contact rows are gone through in turn; of a single file,
    which has none, level zeros without contacts. A percentile is None where fewer than ten steps lie
    beyond it: the largest of a few is noise.

    Args:
        source: Folder of an artifact, exported file, or the content of one.
        backend: Name of a backend.
        batches: Numbers of worlds.
        steps: Steps that are timed, per batch size.
        warmup: Steps before them that are not.
        threads: CPU threads within and between operators.
        spin: Let waiting threads spin.

    Returns:
        JSON values: a row per batch size with ``p50_us`` … ``p99_9_us``, ``max_us``, ``mean_us`` and
        ``steps_per_s`` (worlds times steps), settings, versions and the machine with its load.

    Raises:
        ValueError: A bad artifact, a backend that does not load, or settings out of range.
    """
    if not batches or min(batches) < 1:
        raise ValueError(f"batches is {tuple(batches)}, expected sizes of at least 1")
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
    golden = read_artifact(source).golden
    step = open_backend(source, backend, threads=threads, spin=spin)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    rows = [_row(step, batch, steps, warmup, golden) for batch in batches]
    return {
        "command": "bench",
        "name": step.manifest["name"],
        "weights_sha256": step.manifest["model"].get("weights_sha256"),
        "backend": backend,
        "inputs": "zeros" if golden is None else "golden",
        "steps": steps,
        "warmup": warmup,
        "threads": threads,
        "spin": spin,
        "clock": "perf_counter",
        "batches": rows,
        "versions": {name: version(name) for name in ("nerd-deploy", "onnxruntime", "numpy")},
        "machine": {
            "processor": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "load_before": load,
        },
    }


def _row(step: OnnxStep, batch: int, steps: int, warmup: int, golden: Golden | None) -> dict[str, Any]:
    step.init(batch)
    inputs = _inputs(step.manifest, batch, golden)
    out = np.empty_like(inputs[0][0])
    seconds = np.empty(steps)
    for i in range(-warmup, steps):
        state, control, context = inputs[i % len(inputs)]
        begin = time.perf_counter()
        step.step(state, control, context, out=out)
        seconds[max(i, 0)] = time.perf_counter() - begin
    named = {f"p{p:g}_us".replace(".", "_"): _percentile(seconds, p) for p in PERCENTILES}
    return {
        "batch": batch,
        **named,
        "max_us": 1e6 * float(seconds.max()),
        "mean_us": 1e6 * float(seconds.mean()),
        "steps_per_s": batch / float(seconds.mean()),
    }


def _percentile(seconds: NDArray[np.float64], share: float) -> float | None:
    """A percentile in microseconds."""
    if share > 50 and len(seconds) * (100 - share) / 100 < 10 * (1 - 1e-9):
        return None
    return 1e6 * float(np.percentile(seconds, share))


def _inputs(
    manifest: Mapping[str, Any], batch: int, golden: Golden | None
) -> list[tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]]:
    """State, control and contact rows of each step that is gone through."""
    if golden is not None:
        worlds = np.arange(batch) % len(golden.control)
        return [
            (golden.state[worlds, t], golden.control[worlds, t], {n: v[worlds, t] for n, v in golden.context.items()})
            for t in range(golden.control.shape[1])
        ]
    blank = {t["name"]: np.zeros([batch, *t["shape"][1:]], t["dtype"]) for t in manifest["inputs"] if t["shape"]}
    entries = next(tensor["entries"] for tensor in manifest["inputs"] if tensor["name"] == "state")
    blank["state"][:, [name == "quat_w" for name in entries]] = 1
    return [(blank.pop("state"), blank.pop("control"), blank)]
