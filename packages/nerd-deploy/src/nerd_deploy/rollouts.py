"""Rollouts of many worlds from one ``.npz`` file to another.

Read: ``state`` (B, nq + nv) and ``control`` (B, T, nu), float32; for a model that sees contacts
either its rows, ``context.<name>`` (B, T, K, ...), or static surroundings, ``scene.<name>`` (B, ...)
or (1, ...) as in a dataset of nerd-core, which need torch and nerd-contact. Written: ``state``
(B, T + 1, nq + nv), the first of which is the start, and ``flagged_at`` (B,) int64: the first step
whose input was not finite, or -1. From there on the world's states are NaN.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .golden import CONTEXT_PREFIX
from .onnx_step import OnnxStep

__all__ = ["Observe", "Request", "Rollout", "observer", "read_request", "roll", "write_rollout"]

Observe = Callable[[NDArray[Any]], Mapping[str, NDArray[Any]]]
"""States, shape (B, nq + nv), to contact rows by name, shapes (B, K, ...)."""

SCENE_PREFIX = "scene."


class Request(NamedTuple):
    """What is to be predicted.

    Attributes:
        state: Start states, shape (B, nq + nv).
        control: Controls held over each step, shape (B, T, nu).
        context: Contact rows by name, shapes (B, T, K, ...); may be empty.
        scene: Static surroundings by name, leading size B; may be empty.
    """

    state: NDArray[np.float32]
    control: NDArray[np.float32]
    context: dict[str, NDArray[Any]]
    scene: dict[str, NDArray[Any]]


class Rollout(NamedTuple):
    """What was predicted.

    Attributes:
        state: States, shape (B, T + 1, nq + nv); NaN where an input was not finite.
        flagged_at: First step whose input was not finite, T for a last state that is not, else -1;
            shape (B,), int64.
    """

    state: NDArray[np.float32]
    flagged_at: NDArray[np.int64]


def read_request(path: str | Path, manifest: Mapping[str, Any]) -> Request:
    """Read and check a ``.npz`` file; nothing is unpickled.

    Args:
        path: The file.
        manifest: What the artifact says of itself.

    Raises:
        ValueError: The file is missing or damaged, or its names, shapes or types do not fit.
    """
    arrays = _arrays(Path(path))
    inputs = {tensor["name"]: tensor for tensor in manifest["inputs"]}
    for name, axes in (("state", 2), ("control", 3)):
        if name not in arrays:
            raise ValueError(f"{path}: lacks {name}, expected state (B, nq + nv) and control (B, T, nu)")
        width, dtype = inputs[name]["shape"][1], inputs[name]["dtype"]
        array = arrays[name]
        if array.ndim != axes or array.shape[-1] != width or str(array.dtype) != dtype or 0 in array.shape:
            shape = f"(B, {width})" if axes == 2 else f"(B, T, {width})"
            raise ValueError(
                f"{path}: {name} is {array.dtype} of shape {array.shape}, expected {dtype} of shape {shape}"
            )
    worlds, steps = arrays["control"].shape[:2]
    if len(arrays["state"]) != worlds:
        raise ValueError(f"{path}: state has {len(arrays['state'])} worlds, control has {worlds}")
    context = {n.removeprefix(CONTEXT_PREFIX): a for n, a in arrays.items() if n.startswith(CONTEXT_PREFIX)}
    scene = {n.removeprefix(SCENE_PREFIX): a for n, a in arrays.items() if n.startswith(SCENE_PREFIX)}
    for name, array in context.items():
        if array.shape[:2] != (worlds, steps):
            raise ValueError(f"{path}: context.{name} has shape {array.shape}, expected ({worlds}, {steps}, ...)")
    for name, array in scene.items():
        if array.ndim < 1 or len(array) not in (1, worlds):
            raise ValueError(f"{path}: scene.{name} has shape {array.shape}, expected ({worlds}, ...) or (1, ...)")
    if unknown := sorted(
        set(arrays) - {"state", "control", *map("context.".__add__, context)} - {SCENE_PREFIX + name for name in scene}
    ):
        raise ValueError(f"{path}: {', '.join(unknown)} unknown, expected state, control, context.* or scene.*")
    if manifest["context"] and not context and not scene:
        raise ValueError(
            f"{path}: this model sees contacts, expected context.<name> (B, T, K, ...) or scene.<name> (B, ...)"
        )
    return Request(arrays["state"], arrays["control"], context, scene)


def observer(manifest: Mapping[str, Any], scene: Mapping[str, NDArray[Any]]) -> Observe:
    """A function that sees what the model was trained to see.

    Args:
        manifest: What the artifact says of itself.
        scene: Static surroundings by name, leading size B, or 1 for all.

    Raises:
        ValueError: The surroundings are not the collider's.
        ImportError: nerd-contact or torch is missing.
    """
    try:
        import torch

        from nerd_core import RobotSpec
        from nerd_core.artifact import load_context_encoder
    except ModuleNotFoundError as error:
        raise ImportError(
            f"scene.* needs {error.name}, which is not installed: pip install 'nerd-deploy[export]', or give context.*"
        ) from None
    encoder: Any = load_context_encoder(manifest["context"], RobotSpec.from_json(manifest["robot"]))
    around = {name: torch.from_numpy(np.array(value)) for name, value in scene.items()}

    def observe(state: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        here = {name: value.expand(len(state), *value.shape[1:]) for name, value in around.items()}
        try:
            rows = encoder.observe(torch.from_numpy(state), here)
        except (KeyError, RuntimeError, IndexError) as error:
            raise ValueError(f"scene does not fit the collider: {error}") from None
        return {name: value.numpy() for name, value in rows.items()}

    return observe


def roll(step: OnnxStep, request: Request, observe: Observe | None = None) -> Rollout:
    """Predict recursively from empty histories.

    A world whose state, control or contact row stops being finite is flagged and leaves the
    computation: still numbers stand in for its own, so that no other world changes by a bit.

    Args:
        step: The artifact; its worlds are given up for this.
        request: What is to be predicted.
        observe: Gives contact rows of states, for models that see contacts and requests without.

    Raises:
        ValueError: Shapes or types are not the artifact's, or more worlds than it can hold.
    """
    worlds, steps = request.control.shape[:2]
    step.init(worlds)
    states = np.full((worlds, steps + 1, request.state.shape[1]), np.nan, np.float32)
    flagged_at = np.full(worlds, -1, np.int64)
    still = _still_state(step.manifest)
    astray = ~_finite(request.state)
    for value in request.scene.values():
        astray |= np.broadcast_to(~_finite(value), worlds)
    state = request.state.copy()
    states[:, 0] = state
    for t in range(steps):
        control = request.control[:, t].copy()
        rows = {name: value[:, t].copy() for name, value in request.context.items()}
        astray |= ~_finite(control) | ~_finite(state) | ~_finite_rows(rows, worlds)
        flagged_at[astray & (flagged_at < 0)] = t
        state[astray], control[astray] = still, 0
        if observe is not None:
            rows = observe(state)
        for value in rows.values():
            value[astray] = 0  # no row there: the mask is false
        step.step(state, control, rows, out=state)
        states[~astray, t + 1] = state[~astray]
    flagged_at[~_finite(state) & (flagged_at < 0)] = steps
    return Rollout(states, flagged_at)


def write_rollout(path: str | Path, rollout: Rollout) -> None:
    """Write a ``.npz`` file that is whole from the moment it has its name.

    Raises:
        ValueError: ``path`` exists.
    """
    path = Path(path)
    check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, state=rollout.state, flagged_at=rollout.flagged_at)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(file.getvalue())
    os.replace(temporary, path)


def check_free(path: Path) -> None:
    """Refuse a name that is taken."""
    if path.exists():
        raise ValueError(f"out: {path} exists; an output is never overwritten")


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            return {name: loaded[name] for name in loaded.files}
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not readable as a .npz file of plain arrays ({error})") from None


def _finite(value: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows are finite in every entry, shape (B,)."""
    return np.all(np.isfinite(value).reshape(len(value), -1), axis=1)


def _finite_rows(rows: Mapping[str, NDArray[Any]], worlds: int) -> NDArray[np.bool_]:
    """Which worlds' contact rows are finite; what stands in rows that do not exist may be anything."""
    fine = np.ones(worlds, bool)
    if "mask" not in rows:
        return fine
    mask = rows["mask"].astype(bool)
    for value in rows.values():
        if value.shape[:2] == mask.shape:
            fine &= (np.isfinite(value).reshape(*mask.shape, -1).all(-1) | ~mask).all(1)
    return fine


def _still_state(manifest: Mapping[str, Any]) -> NDArray[np.float32]:
    """All zeros, but a unit quaternion; shape (nq + nv,)."""
    entries = next(tensor["entries"] for tensor in manifest["inputs"] if tensor["name"] == "state")
    return np.array([name == "quat_w" for name in entries], np.float32)
