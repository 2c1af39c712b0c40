"""The engine's own free acceleration as a callable: the reference that a learned one replaces."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from .launches import Launches, on_device
from .robot_block import robot_block

__all__ = ["EngineFreeMotion"]


class EngineFreeMotion:
    """MuJoCo Warp's unconstrained acceleration of a robot, from the robot's state and the controls alone.

    It keeps data of its own, so it stands where a learned model would: nothing reaches it but its arguments. The
    robot's bodies, inertia and forces do not depend on the objects, which rest at their places in the model.

    Args:
        mj_model: The scene.
        robot: Name of the robot's root body, or several names.
        nworld: Number of worlds.
        device: ``cpu`` or a CUDA device such as ``cuda:0``.
        use_graph: Capture the launches at the second call.

    Raises:
        ValueError: If the robot cannot be separated from the rest, see ``robot_block``.
    """

    def __init__(
        self,
        mj_model: mujoco.MjModel,
        robot: str | Sequence[str],
        nworld: int,
        *,
        device: str = "cpu",
        use_graph: bool = True,
    ) -> None:
        block = robot_block(mj_model, robot)
        self._device = torch.device(device)
        alone = copy.copy(mj_model)
        alone.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONSTRAINT | mujoco.mjtDisableBit.mjDSBL_CONTACT
        with on_device(self._device):
            self._model = mjw.put_model(alone)
            self._data = mjw.put_data(alone, mujoco.MjData(alone), nworld=nworld, nconmax=1, njmax=1)
        self._qpos, self._qvel, self._ctrl, self._acceleration = (
            wp.to_torch(array) for array in (self._data.qpos, self._data.qvel, self._data.ctrl, self._data.qacc_smooth)
        )
        self._qpos_index = torch.tensor(block.qpos, device=self._device)
        self._dof_index = torch.tensor(block.dofs, device=self._device)
        self._launch = Launches(self._smooth, use_graph=use_graph)

    def __call__(self, state: Tensor, control: Tensor) -> Tensor:
        """Unconstrained accelerations.

        Args:
            state: The robot's qpos and qvel, shape (nworld, nq + nv) of the robot [m, rad, m/s, rad/s], world frame.
            control: Controls of the scene, shape (nworld, nu).

        Returns:
            Accelerations of the robot's coordinates, shape (nworld, nv) of the robot float32 [m/s², rad/s²].
        """
        size = len(self._qpos_index)
        self._qpos[:, self._qpos_index] = state[:, :size]
        self._qvel[:, self._dof_index] = state[:, size:]
        self._ctrl.copy_(control)
        with on_device(self._device):
            self._launch()
        return self._acceleration[:, self._dof_index]

    def _smooth(self) -> None:
        mjw.fwd_position(self._model, self._data, factorize=False)
        mjw.fwd_velocity(self._model, self._data)
        mjw.fwd_actuation(self._model, self._data)
        mjw.fwd_acceleration(self._model, self._data, factorize=True)
