"""One-way coupling, the ablation: objects see the robot as kinematic, the robot does not feel them.

With coupling rows C, the constraint rows that act on robot and objects, and their columns J_r of the robot and J_o of
the objects, two solves replace the joint one:

    1. J_r of C is set to zero: the robot's acceleration a_r follows from its own rows (limits, static contacts).
    2. a_ref of C becomes a_ref − J_r a_r: objects see a robot that accelerates by a_r whatever they do.

A contact's softness follows from the inverse weights of both bodies. A kinematic body's is zero, as MuJoCo has it for
static bodies, so the stiffness D of a coupling contact grows by (w_robot + w_object) / w_object.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import torch
import warp as wp
from torch import Tensor

from .robot_block import RobotBlock

__all__ = ["OneWayRows"]

_CONTACT = mujoco.mjtConstraint.mjCNSTR_CONTACT_FRICTIONLESS  # contact types come last


class OneWayRows:
    """The constraint rows of coupled worlds, edited in place between solves.

    Args:
        mj_model: The scene.
        block: The robot's part of it.
        warp_model: MuJoCo Warp's Model.
        warp_data: MuJoCo Warp's Data.

    Raises:
        ValueError: If the constraint Jacobian is sparse.
    """

    def __init__(self, mj_model: mujoco.MjModel, block: RobotBlock, warp_model: Any, warp_data: Any) -> None:
        if warp_model.is_sparse:
            raise ValueError('option jacobian is sparse, expected jacobian="dense" for one-way coupling')
        rows, contact = warp_data.efc, warp_data.contact
        self._J, self._D, self._aref, self._type, self._id, self._nefc, self._geom, self._qacc = (
            wp.to_torch(array)
            for array in (rows.J, rows.D, rows.aref, rows.type, rows.id, warp_data.nefc, contact.geom, warp_data.qacc)
        )
        device = self._J.device
        self._robot = torch.tensor(block.dofs, device=device)
        self._objects = torch.tensor([i for i in range(mj_model.nv) if i not in block.dofs], device=device)
        self._stiffening = torch.from_numpy(_stiffening(mj_model, block)).to(device, torch.float32)

    def separate(self) -> None:
        """Before the first solve: take the robot's columns out of the coupling rows, stiffen their contacts."""
        njmax = self._type.shape[1]
        jacobian = self._J[:, :njmax]  # rows are padded
        robot, objects = jacobian[:, :, self._robot], jacobian[:, :, self._objects]
        live = torch.arange(njmax, device=robot.device) < self._nefc[:, None]
        is_contact = live & (self._type >= int(_CONTACT))
        # Rows beyond nefc hold whatever was there: look nothing up for them.
        pair = self._geom[torch.where(is_contact, self._id, 0).long()].long()
        factor = torch.where(is_contact, self._stiffening[pair[..., 0], pair[..., 1]], 1.0)
        shared = live & ~is_contact & (robot != 0).any(-1) & (objects != 0).any(-1)
        self._coupling = (factor > 1) | shared
        self._columns = torch.where(self._coupling[..., None], robot, 0.0)
        jacobian[:, :, self._robot] = torch.where(self._coupling[..., None], 0.0, robot)
        self._D[:, :njmax] *= factor

    def prescribe(self) -> None:
        """Between the solves: give the coupling rows the robot's resolved acceleration."""
        moved: Tensor = (self._columns * self._qacc[:, None, self._robot]).sum(-1)
        self._aref -= torch.where(self._coupling, moved, 0.0)


def _stiffening(mj_model: mujoco.MjModel, block: RobotBlock) -> np.ndarray:
    """D of a contact with a kinematic robot over D with the real one, shape (ngeom, ngeom); 1 where nothing couples."""
    bodies = mj_model.geom_bodyid
    robot = np.isin(bodies, block.bodies)
    weight = mj_model.body_invweight0[bodies, 0]
    thing = ~robot & (weight > 0)
    factor = np.ones((len(bodies), len(bodies)))
    for mine, theirs in ((robot[:, None] & thing[None], weight[None]), (thing[:, None] & robot[None], weight[:, None])):
        total = weight[:, None] + weight[None]
        factor = np.where(mine, total / np.where(mine, theirs, 1.0), factor)
    return factor
