"""Batched worlds on a CPU or a CUDA device: MuJoCo Warp, with zero-copy torch views.

The same face as ``MujocoWorlds`` (worlds.py). Float32 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from torch import Tensor

from nerd_coupling.robots import Robot, build_model, build_models
from nerd_coupling.terrain import Terrain
from nerd_coupling.worlds import check_control, check_state, masked_worlds, spread_terrains

# What set_terrain changes; these become one row per world when the terrains differ.
_TERRAIN_FIELDS = (
    "body_pos",
    "body_quat",
    "geom_size",
    "geom_rbound",
    "geom_aabb",
    "geom_friction",
)
# Flags that mean contacts or constraint rows were dropped. The solver's own "iteration limit"
# flags are left out: with 10 iterations they are part of the model.
_CAPACITY = (
    mjw.OverflowType.NEFC
    | mjw.OverflowType.NJMAX_NNZ
    | mjw.OverflowType.BROADPHASE
    | mjw.OverflowType.NARROWPHASE
    | mjw.OverflowType.CCD
    | mjw.OverflowType.NVMAX
)
# C MuJoCo's bound on a sane state or acceleration (mjMAXVAL).
_MAX_VALUE = 1e10


class MjWarpWorlds:
    """``nworld`` copies of a robot, each on its own terrain, stepped by MuJoCo Warp.

    A world whose state stops being finite turns into NaN and stays so until ``set_state``; the
    others go on, on a CPU bit for bit as without it. The ``substeps`` physics steps of a model step
    are one captured graph: on a CPU (2 cores, one thread) it makes a step of one world 70 times
    cheaper, 0.3 ms for 23 ms, the rest was launching kernels; of 128 worlds twice.

    Args:
        robot: The robot.
        terrains: One terrain for all worlds, or one per world.
        nworld: Number of worlds.
        device: ``cpu`` or a CUDA device such as ``cuda:0``.
        nconmax: Contacts stored per world, on average over the worlds.
        njmax: Constraint rows per world.
        use_graph: Capture the model step at the first one and replay it from then on, bit for bit
            the same on a CPU. Turn it off to change ``warp_model`` or its options between steps.

    Attributes:
        robot: The robot.
        terrains: Terrain of each world.
        nworld: Number of worlds.
        device: Torch device of every tensor.
        mj_model: The first world's model, on the host.
        warp_model: MuJoCo Warp's Model.
        warp_data: MuJoCo Warp's Data; what a caller writes there takes effect at the next step.
        qpos: Zero-copy view, shape (nworld, nq).
        qvel: Zero-copy view, shape (nworld, nv).
        ctrl: Zero-copy view, shape (nworld, nu).
    """

    def __init__(
        self,
        robot: Robot,
        terrains: Terrain | Sequence[Terrain],
        nworld: int,
        *,
        device: str = "cpu",
        nconmax: int = 48,
        njmax: int = 200,
        use_graph: bool = True,
    ) -> None:
        self.robot = robot
        self.nworld = nworld
        self.terrains = spread_terrains(terrains, nworld)
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but no CUDA device is available")
        self._spec = robot.spec
        if len({t.field for t in self.terrains}) > 1:
            raise ValueError("terrains have different height fields, expected one: MuJoCo Warp shares it among worlds")
        num_boxes = max(1, *(len(t.boxes) for t in self.terrains))
        self.mj_model = build_model(robot, self.terrains[0], num_boxes=num_boxes)
        with self._on_device():
            self.warp_model = self._put_model()
            self.warp_data = mjw.put_data(
                self.mj_model,
                mujoco.MjData(self.mj_model),
                nworld=nworld,
                nconmax=nconmax,
                njmax=njmax,
            )
            if len(set(self.terrains)) > 1:
                self._put_terrains(num_boxes)
        data = self.warp_data
        self.qpos = wp.to_torch(data.qpos)
        self.qvel = wp.to_torch(data.qvel)
        self.ctrl = wp.to_torch(data.ctrl)
        self._overflow = wp.to_torch(data.overflow)
        self._memory = step_memory(data)
        self._bad = torch.zeros(nworld, dtype=torch.bool, device=self.device)
        self._use_graph = use_graph
        self._graph: Any = None
        self.set_state(torch.tensor(robot.home_state).expand(nworld, -1))

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
        """Drop the captured graph; memory goes with the object."""
        self._graph = None

    @property
    def state(self) -> Tensor:
        """A copy of qpos and qvel, shape (nworld, nq + nv) float32; [m, rad, m/s, rad/s], world."""
        rows = torch.cat((self.qpos, self.qvel), dim=1)
        return rows.masked_fill_(self._bad[:, None], torch.nan)

    @property
    def overflow(self) -> Tensor:
        """Worlds that dropped contacts or constraint rows since ``set_state``, (nworld,) bool.

        The contact buffer is shared by all worlds: if it overflows, every world is flagged.
        """
        return (self._overflow & int(_CAPACITY)) != 0

    def set_state(self, state: Tensor, mask: Tensor | None = None) -> None:
        """Write states and forget everything else: solver warm start, clock, applied forces.

        Args:
            state: qpos and qvel, shape (nworld, nq + nv).
            mask: Worlds to write, shape (nworld,) bool; the others are untouched. Default: all.

        Raises:
            ValueError: If a shape does not fit.
        """
        check_state(state, self.nworld, self._spec.state_size)
        rows = state.detach().to(self.device, torch.float32)
        if mask is None:
            chosen = torch.arange(self.nworld, device=self.device)
        else:
            chosen = torch.tensor(masked_worlds(mask, self.nworld), device=self.device).long()
        for view in self._memory:
            view[chosen] = 0
        self.qpos[chosen] = rows[chosen, : self._spec.nq]
        self.qvel[chosen] = rows[chosen, self._spec.nq :]
        self._bad[chosen] = False
        self._mark_bad()

    def memory(self) -> dict[str, Tensor]:
        """All that the next step depends on: :meth:`restore` goes on from it, on a CPU bit for bit.

        Returns:
            Copies with leading shape (nworld,): ``qpos``, ``qvel``, ``bad`` and what else a step hands to the next.
        """
        return {name: view.clone() for name, view in self._remembered().items()}

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Go back to what :meth:`memory` gave, here or in another process."""
        for name, view in self._remembered().items():
            view.copy_(memory[name])

    def _remembered(self) -> dict[str, Tensor]:
        handed_on = {f"handed_on{i}": view for i, view in enumerate(self._memory)}
        return {"qpos": self.qpos, "qvel": self.qvel, "bad": self._bad, **handed_on}

    def step(self, control: Tensor) -> Tensor:
        """One model step: ``substeps`` physics steps with the control held.

        Args:
            control: Shape (nworld, nu), clipped to the control range by MuJoCo Warp.

        Returns:
            The new state, shape (nworld, nq + nv) float32.

        Raises:
            ValueError: If the shape does not fit.
        """
        check_control(control, (self.nworld, self._spec.nu))
        self.ctrl.copy_(control)
        with self._on_device():
            if not self._use_graph:
                self._physics()
            else:
                if self._graph is None:
                    self._graph = self._capture()
                wp.capture_launch(self._graph)
        self._mark_bad()
        return self.state

    def rollout(self, state: Tensor, controls: Tensor) -> Tensor:
        """Roll out from given states; the worlds' own state comes back afterwards.

        Args:
            state: First states, shape (nworld, nq + nv).
            controls: Controls held over each model step, shape (nworld, T, nu).

        Returns:
            States, shape (nworld, T + 1, nq + nv) float32, the first being ``state``; NaN from the model step on in
            which a row diverged or dropped contacts (see :attr:`overflow`): it is no longer physics.

        Raises:
            ValueError: If a shape does not fit.
        """
        check_state(state, self.nworld, self._spec.state_size)
        check_control(controls, (self.nworld, controls.shape[1], self._spec.nu))
        kept = [view.clone() for view in (self.qpos, self.qvel, self._bad, *self._memory)]
        self.set_state(state)
        states = [state.to(self.device, torch.float32)]
        for t in range(controls.shape[1]):
            states.append(self.step(controls[:, t]).masked_fill_(self.overflow[:, None], torch.nan))
        for view, old in zip((self.qpos, self.qvel, self._bad, *self._memory), kept, strict=True):
            view.copy_(old)
        return torch.stack(states, dim=1)

    def _put_model(self) -> Any:
        """The model on the device, with room for one terrain per world if they differ."""
        rows = dict.fromkeys(self._terrain_fields(), self.nworld) if len(set(self.terrains)) > 1 else None
        warp_model = mjw.put_model(self.mj_model, batch_sizes=rows)
        # Overflow is read from ``overflow``, not from the terminal.
        warp_model.opt.warn_overflow = 0
        return warp_model

    def _terrain_fields(self) -> tuple[str, ...]:
        return (*_TERRAIN_FIELDS, "pair_friction") if self.mj_model.npair else _TERRAIN_FIELDS

    def _put_terrains(self, num_boxes: int) -> None:
        """Write every world's own terrain."""
        models = build_models(self.robot, self.terrains, num_boxes=num_boxes)
        for field in self._terrain_fields():
            _fill(
                getattr(self.warp_model, field),
                [getattr(models[terrain], field) for terrain in self.terrains],
            )
        # MuJoCo Warp places static geoms once, in put_data, and never again: place them here.
        poses = {terrain: mujoco.MjData(model) for terrain, model in models.items()}
        for terrain, pose in poses.items():
            mujoco.mj_kinematics(models[terrain], pose)
        for field in ("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat"):
            _fill(
                getattr(self.warp_data, field),
                [getattr(poses[terrain], field) for terrain in self.terrains],
            )

    def _mark_bad(self) -> None:
        rows = torch.cat((self.qpos, self.qvel), dim=1)
        # Written so that NaN compares as bad.
        self._bad |= ~(rows.abs() < _MAX_VALUE).all(dim=1)

    def _physics(self) -> None:
        for _ in range(self._spec.substeps):
            mjw.step(self.warp_model, self.warp_data)

    def _capture(self) -> Any:
        """One model step as a graph: the same kernels in the same order, without their launch cost.

        Kernels must be loaded before a capture: step once, then take the step back.
        """
        views = (self.qpos, self.qvel, *self._memory)
        kept = [view.clone() for view in views]
        self._physics()
        for view, old in zip(views, kept, strict=True):
            view.copy_(old)
        with wp.ScopedCapture() as capture:
            self._physics()
        return capture.graph

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Warp on our device and, on CUDA, on torch's own stream, so that both agree on order."""
        with _quiet(), wp.ScopedDevice(str(self.device)):
            stream = (
                wp.ScopedStream(wp.stream_from_torch(torch.cuda.current_stream(self.device)))
                if self.device.type == "cuda"
                else nullcontext()
            )
            with stream:
                yield


def _fill(array: Any, rows: list[np.ndarray]) -> None:
    """Write one host array per world, shapes (nworld, ...)."""
    view = wp.to_torch(array)
    view.copy_(torch.from_numpy(np.stack(rows)).reshape(view.shape))


def step_memory(data: Any) -> list[Tensor]:
    """Views of everything in MuJoCo Warp's Data but qpos and qvel that one step hands to the next."""
    handed_on = (
        data.qacc_warmstart,
        data.qacc,
        data.act,
        data.ctrl,
        data.qfrc_applied,
        data.xfrc_applied,
        data.time,
        data.overflow,
    )
    return [wp.to_torch(array) for array in handed_on]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Warp's module-loading lines off the terminal; its setting comes back."""
    previous = wp.config.log_level
    wp.config.log_level = max(previous, wp.LOG_WARNING)
    try:
        yield
    finally:
        wp.config.log_level = previous
