"""Golden data: steps that torch computed, to be computed again wherever the file is served.

``golden.npz`` holds float32 arrays of B worlds over T recursive steps: ``state`` (B, T + 1,
nq + nv), ``control`` (B, T, nu), ``delta`` (B, T, 2·nv) and, for models that see contacts,
``context.<name>`` (B, T, K, ...); ``reset_at``, the step before which the histories of the worlds
``reset`` (B,) are forgotten while their states go on.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .onnx_step import OnnxStep

__all__ = ["Golden", "Replay", "golden_bytes", "read_golden", "replay"]

CONTEXT_PREFIX = "context."
_COUNTED = ("state", "control", "valid", "cursor")  # inputs that are neither context nor a ring


class Golden(NamedTuple):
    """Recorded steps.

    Attributes:
        state: States, shape (B, T + 1, nq + nv).
        control: Controls held over each step, shape (B, T, nu).
        delta: Increments, shape (B, T, 2·nv).
        context: Contact rows by name, shapes (B, T, K, ...); empty for models that see none.
        reset_at: Step before which some histories are forgotten.
        reset: Whose, shape (B,), bool.
    """

    state: NDArray[np.float32]
    control: NDArray[np.float32]
    delta: NDArray[np.float32]
    context: dict[str, NDArray[Any]]
    reset_at: int
    reset: NDArray[np.bool_]


class Replay(NamedTuple):
    """How far a served file is from the recording, largest difference of any entry in SI units.

    Attributes:
        single_step: Of increments, each step starting from the recorded state.
        recursive: Of states, each step starting from the state before.
    """

    single_step: float
    recursive: float


def golden_bytes(golden: Golden) -> bytes:
    """Content of ``golden.npz``; the same bytes for the same numbers."""
    arrays: dict[str, Any] = {name: getattr(golden, name) for name in ("state", "control", "delta", "reset")}
    arrays |= {CONTEXT_PREFIX + name: value for name, value in golden.context.items()}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, reset_at=np.int64(golden.reset_at), **arrays)
    return file.getvalue()


def read_golden(data: bytes, manifest: Mapping[str, Any], where: str) -> Golden:
    """Read ``golden.npz`` and see that it fits a manifest.

    Raises:
        ValueError: It is damaged, or its names, shapes or types are not the manifest's.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        reset_at = int(arrays.pop("reset_at"))
        worlds, steps = arrays["control"].shape[:2]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{where}: not readable as golden data ({error})") from None
    for name, (dtype, shape) in _expected(manifest, worlds, steps).items():
        array = arrays.get(name)
        if array is None or (str(array.dtype), array.shape) != (dtype, shape):
            found = "missing" if array is None else f"{array.dtype} of shape {array.shape}"
            raise ValueError(f"{where}: {name} is {found}, expected {dtype} of shape {shape}")
    context = {n.removeprefix(CONTEXT_PREFIX): a for n, a in arrays.items() if n.startswith(CONTEXT_PREFIX)}
    return Golden(arrays["state"], arrays["control"], arrays["delta"], context, reset_at, arrays["reset"])


def replay(step: OnnxStep, golden: Golden) -> Replay:
    """Compute recorded steps again; the worlds of ``step`` are given up for it."""
    found = []
    for recursive in (False, True):
        step.init(len(golden.control))
        state, largest = golden.state[:, 0], 0.0
        for t in range(golden.control.shape[1]):
            if t == golden.reset_at:
                step.reset(golden.reset)
            rows = {name: value[:, t] for name, value in golden.context.items()}
            step.poison()  # an output that is not written shows
            state = step.step(state if recursive else golden.state[:, t], golden.control[:, t], rows)
            if recursive:
                error = _apart(step.manifest, state, golden.state[:, t + 1])
            else:
                error = step.delta - golden.delta[:, t]
            worst = float(np.abs(error).max())
            largest = max(largest, worst if np.isfinite(worst) else np.inf)
        found.append(largest)
    return Replay(*found)


def _apart(manifest: Mapping[str, Any], one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Differences of states; a joint that turns without end is not a whole turn away."""
    units = next(tensor["units"] for tensor in manifest["inputs"] if tensor["name"] == "state")
    error = one - other
    turned = (error + np.pi) % (2 * np.pi) - np.pi
    return np.where([unit == "rad" for unit in units], turned, error)


def _expected(manifest: Mapping[str, Any], worlds: int, steps: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each array."""
    inputs = {tensor["name"]: tensor for tensor in manifest["inputs"]}
    outputs = {tensor["name"]: tensor for tensor in manifest["outputs"]}
    expected = {
        "state": ("float32", (worlds, steps + 1, inputs["state"]["shape"][1])),
        "control": ("float32", (worlds, steps, inputs["control"]["shape"][1])),
        "delta": ("float32", (worlds, steps, outputs["delta"]["shape"][1])),
        "reset": ("bool", (worlds,)),
    }
    for name, tensor in inputs.items():
        if name not in _COUNTED and f"new_{name}" not in outputs:
            expected[CONTEXT_PREFIX + name] = (tensor["dtype"], (worlds, steps, *tensor["shape"][1:]))
    return expected
