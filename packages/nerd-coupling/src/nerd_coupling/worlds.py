"""Batched worlds on a CPU: C MuJoCo in a thread pool.

``MujocoWorlds`` and ``MjWarpWorlds`` (warp_worlds.py) share one face: ``nworld``, ``robot``,
``state``, ``set_state``, ``step``, ``rollout``, ``close``. Float64 inside, float32 outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import mujoco
import numpy as np
import torch
from mujoco.rollout import Rollout
from torch import Tensor

from nerd_coupling.robots import Robot, build_models
from nerd_coupling.terrain import Terrain

# Worlds start at this time [s]. MuJoCo restarts a diverged world silently at time zero, and its
# rollout stops the clock of a world that raised a warning: a clock that lags tells both.
_EPOCH = 1.0


class MujocoWorlds:
    """``nworld`` copies of a robot, each on its own terrain, stepped by C MuJoCo.

    A world whose state stops being finite, or in which MuJoCo warns (bad state or acceleration,
    full contact buffer), turns into NaN and stays so until ``set_state``; the others go on.

    Args:
        robot: The robot.
        terrains: One terrain for all worlds, or one per world.
        nworld: Number of worlds.
        threads: Worker threads; by default every core this process may use.

    Attributes:
        robot: The robot.
        terrains: Terrain of each world.
        nworld: Number of worlds.
        threads: Worker threads.
    """

    def __init__(
        self,
        robot: Robot,
        terrains: Terrain | Sequence[Terrain],
        nworld: int,
        *,
        threads: int | None = None,
    ) -> None:
        self.robot = robot
        self.nworld = nworld
        self.terrains = spread_terrains(terrains, nworld)
        self.threads = len(os.sched_getaffinity(0)) if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        num_boxes = max(1, *(len(t.boxes) for t in self.terrains))
        compiled = build_models(robot, self.terrains, num_boxes=num_boxes)
        self._models = [compiled[t] for t in self.terrains]
        self._pool = Rollout(nthread=0 if self.threads == 1 else self.threads)
        self._scratch = [mujoco.MjData(self._models[0]) for _ in range(self.threads)]
        self._stepper = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        self._data = [mujoco.MjData(m) for m in self._models]
        self._bad = np.zeros(nworld, dtype=bool)
        self._spec = robot.spec
        home = torch.tensor(robot.home_state, dtype=torch.float64)
        self.set_state(home.expand(nworld, -1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker threads; the worlds cannot be stepped afterwards."""
        self._pool.close()
        if self._stepper is not None:
            self._stepper.shutdown()

    @property
    def state(self) -> Tensor:
        """A copy of qpos and qvel, shape (nworld, nq + nv) float32; [m, rad, m/s, rad/s], world."""
        rows = np.stack([np.concatenate((d.qpos, d.qvel)) for d in self._data])
        rows[self._bad] = np.nan
        return torch.from_numpy(rows).float()

    @property
    def overflow(self) -> Tensor:
        """Worlds in which MuJoCo ran out of room for contacts or constraint rows since ``set_state``, (nworld,) bool.

        It then leaves some out; such a world is NaN.
        """
        full = [int(mujoco.mjtWarning.mjWARN_CONTACTFULL), int(mujoco.mjtWarning.mjWARN_CNSTRFULL)]
        return torch.tensor([bool(data.warning.number[full].any()) for data in self._data])

    def set_state(self, state: Tensor, mask: Tensor | None = None) -> None:
        """Write states and forget everything else: solver warm start, clock, warnings.

        Args:
            state: qpos and qvel, shape (nworld, nq + nv).
            mask: Worlds to write, shape (nworld,) bool; the others are untouched. Default: all.

        Raises:
            ValueError: If a shape does not fit.
        """
        check_state(state, self.nworld, self._spec.state_size)
        rows = state.detach().to("cpu", torch.float64).numpy()
        chosen = range(self.nworld) if mask is None else masked_worlds(mask, self.nworld)
        for i in chosen:
            data = self._data[i]
            mujoco.mj_resetData(self._models[i], data)
            data.time = _EPOCH
            self._bad[i] = not np.isfinite(rows[i]).all()
            if not self._bad[i]:
                data.qpos[:], data.qvel[:] = np.split(rows[i], [self._spec.nq])

    def memory(self) -> dict[str, Tensor]:
        """All that the next step depends on: :meth:`restore` goes on from it bit for bit.

        Returns:
            ``integration`` (nworld, size) float64, MuJoCo's own integration state, and ``bad`` (nworld,) bool.
        """
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        rows = np.empty((self.nworld, mujoco.mj_stateSize(self._models[0], kind)))
        for model, data, row in zip(self._models, self._data, rows, strict=True):
            mujoco.mj_getState(model, data, row, kind)
        return {"integration": torch.from_numpy(rows), "bad": torch.from_numpy(self._bad.copy())}

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Go back to what :meth:`memory` gave, here or in another process."""
        rows = memory["integration"].cpu().numpy()
        for model, data, row in zip(self._models, self._data, rows, strict=True):
            mujoco.mj_resetData(model, data)
            mujoco.mj_setState(model, data, row, mujoco.mjtState.mjSTATE_INTEGRATION)
        self._bad[:] = memory["bad"].cpu().numpy()

    def step(self, control: Tensor) -> Tensor:
        """One model step: ``substeps`` physics steps with the control held.

        Args:
            control: Shape (nworld, nu), clipped to the control range by MuJoCo.

        Returns:
            The new state, shape (nworld, nq + nv) float32.

        Raises:
            ValueError: If the shape does not fit.
        """
        check_control(control, (self.nworld, self._spec.nu))
        rows = control.detach().to("cpu", torch.float64).numpy()
        with _unprinted_warnings():
            if self._stepper is None:
                self._advance(range(self.nworld), rows)
            else:
                blocks = [range(k, self.nworld, self.threads) for k in range(self.threads)]
                list(self._stepper.map(lambda block: self._advance(block, rows), blocks))
        return self.state

    def rollout(self, state: Tensor, controls: Tensor) -> Tensor:
        """Roll out from given states; the worlds' own state is untouched.

        A pure function of its arguments: every rollout starts without a solver warm start.

        Args:
            state: First states, shape (N, nq + nv). N is any number if all worlds share a
                terrain, else a multiple of ``nworld``: N / nworld consecutive rows per world.
            controls: Controls held over each model step, shape (N, T, nu).

        Returns:
            States, shape (N, T + 1, nq + nv) float32, the first being ``state``; NaN from the
            model step on in which a row diverged.

        Raises:
            ValueError: If a shape does not fit.
        """
        spec, count, horizon = self._spec, state.shape[0], controls.shape[1]
        check_state(state, count, spec.state_size)
        check_control(controls, (count, horizon, spec.nu))
        models = self._models_for(count)
        start = np.full((count, 1 + spec.state_size), _EPOCH)
        start[:, 1:] = state.detach().to("cpu").numpy()
        control = controls.detach().to("cpu").numpy().astype(np.float64)
        control = control.repeat(spec.substeps, axis=1)  # (N, T * substeps, nu)
        nstep = horizon * spec.substeps
        path = np.empty((count, nstep, 1 + spec.state_size))
        with _unprinted_warnings():
            self._pool.rollout(
                models,
                self._scratch,
                start,
                control,
                control_spec=mujoco.mjtState.mjSTATE_CTRL.value,
                skip_checks=True,
                nstep=nstep,
                state=path,
                sensordata=np.empty((count, nstep, self._models[0].nsensordata)),
            )
        kept = path[:, spec.substeps - 1 :: spec.substeps]  # (N, T, 1 + nq + nv)
        states = np.empty((count, horizon + 1, spec.state_size), dtype=np.float32)
        states[:, 0] = start[:, 1:]
        states[:, 1:] = kept[:, :, 1:]
        expected = _EPOCH + spec.dt * np.arange(1, horizon + 1)
        states[:, 1:][kept[:, :, 0] < expected - 0.5 * spec.timestep] = np.nan
        return torch.from_numpy(states)

    def _models_for(self, count: int) -> list[mujoco.MjModel]:
        """Model of every rollout row."""
        if all(model is self._models[0] for model in self._models):
            return [self._models[0]] * count
        if count % self.nworld:
            raise ValueError(
                f"state has {count} rows: with a terrain per world expected a multiple of nworld = {self.nworld}"
            )
        return [model for model in self._models for _ in range(count // self.nworld)]

    def _advance(self, worlds: range, control: np.ndarray) -> None:
        for i in worlds:
            if self._bad[i]:
                continue
            data = self._data[i]
            data.ctrl[:] = control[i]
            mujoco.mj_step(self._models[i], data, nstep=self._spec.substeps)
            # A full sum is finite exactly if every term is (an overflow is as good as divergence).
            finite = np.isfinite(data.qpos.sum() + data.qvel.sum())
            self._bad[i] = not finite or data.warning.number.any()


def spread_terrains(terrains: Terrain | Sequence[Terrain], nworld: int) -> tuple[Terrain, ...]:
    """One terrain per world.

    Raises:
        ValueError: If ``nworld`` is not positive or the number of terrains differs from it.
    """
    if nworld < 1:
        raise ValueError(f"nworld must be at least 1, got {nworld}")
    if isinstance(terrains, Terrain):
        return (terrains,) * nworld
    if len(terrains) != nworld:
        raise ValueError(f"terrains has {len(terrains)} entries, expected 1 or nworld = {nworld}")
    return tuple(terrains)


def check_state(state: Tensor, rows: int, size: int) -> None:
    """Refuse a state that is not (rows, nq + nv)."""
    if tuple(state.shape) != (rows, size):
        raise ValueError(f"state has shape {tuple(state.shape)}, expected {(rows, size)}")


def check_control(control: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a control of another shape."""
    if tuple(control.shape) != shape:
        raise ValueError(f"control has shape {tuple(control.shape)}, expected {shape}")


@contextmanager
def _unprinted_warnings() -> Iterator[None]:
    """Keep MuJoCo's warnings off the terminal and out of MUJOCO_LOG.TXT: they are read as NaN rows.

    The handler is one per process; whatever was installed before comes back.
    """
    previous = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(previous)


def masked_worlds(mask: Tensor, nworld: int) -> list[int]:
    """Indices of the chosen worlds.

    Raises:
        ValueError: If the mask is not (nworld,) bool.
    """
    if tuple(mask.shape) != (nworld,) or mask.dtype != torch.bool:
        raise ValueError(f"mask has shape {tuple(mask.shape)} and type {mask.dtype}, expected ({nworld},) bool")
    return torch.nonzero(mask.cpu()).flatten().tolist()
