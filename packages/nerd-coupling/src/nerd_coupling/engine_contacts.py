"""Contact rows from an engine's own collision buffers: ``mjData.contact`` and MuJoCo Warp's ``Data.contact``.

Both become one flat list of (world, geom pair, distance, midpoint, normal, friction) and go through the same tensor
code: no loop over contacts, static shapes, and on a GPU neither a copy to the host nor a wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from torch import Tensor

from nerd_contact import ContactSet, Counterpart
from nerd_coupling.contact_geoms import ContactGeoms

__all__ = ["places", "read_contacts", "shallower"]

# Largest of MuJoCo's exclusion numbers for contacts that count: 0 in the solver, 1 inside the gap.
_LISTED = 1
# Bit of MuJoCo Warp's contact types for contacts that are no mere sensor readings; the name is not public.
_CONSTRAINT = 1
# Flags of MuJoCo Warp that mean contacts were lost or never looked for. Constraint rows are another matter.
_LOST = (
    mjw.OverflowType.BROADPHASE
    | mjw.OverflowType.NARROWPHASE
    | mjw.OverflowType.HFIELD
    | mjw.OverflowType.CCD
    | mjw.OverflowType.EPA_HORIZON
)


class _Listed(NamedTuple):
    """A flat list of E contacts in B worlds, all in the world frame.

    Attributes:
        exists: Whether an entry is a contact, shape (E,).
        world: World of each, shape (E,).
        geom: Its two geoms, shape (E, 2).
        dist: Signed distance [m], shape (E,).
        pos: Midpoint between the surfaces [m], shape (E, 3).
        normal: Unit normal from the first geom to the second, shape (E, 3).
        friction: Sliding friction of the pair, shape (E,).
        lost: Contacts that each world lost or may have lost, shape (B,).
        xpos: Places of the bodies [m], shape (B, nbody, 3).
        xmat: Orientations of the bodies, shape (B, nbody, 3, 3).
        cvel: Twists of the bodies, angular first, at their tree's centre of mass, shape (B, nbody, 6).
        com: Centres of mass of the bodies' subtrees [m], shape (B, nbody, 3).
    """

    exists: Tensor
    world: Tensor
    geom: Tensor
    dist: Tensor
    pos: Tensor
    normal: Tensor
    friction: Tensor
    lost: Tensor
    xpos: Tensor
    xmat: Tensor
    cvel: Tensor
    com: Tensor


def read_contacts(
    geoms: ContactGeoms,
    data: mujoco.MjData | Sequence[mujoco.MjData] | mjw.Data,
    *,
    max_rows: int = 16,
    dtype: torch.dtype = torch.float32,
) -> ContactSet:
    """The robot's contact rows in an engine's collision buffers, as :class:`nerd_contact.PrimitiveCollider` gives them.

    Base frame; the point lies on the robot's surface, the normal points towards the robot, the gap is negative inside,
    the velocity is that of the robot's point as seen from the counterpart's body. A contact between two links gives two
    rows, one for each: either is the other's counterpart. A sphere gives one row per other geom, the deepest; every
    other shape gives as many as the engine lists.

    The rows are of the moment of the engine's last collision stage: after a step that is the start of its last physics
    step, not the state that the step led to. ``nerd_coupling.engine_colliders`` asks for a state of its own.

    Args:
        geoms: What the scene's geoms are to the robot.
        data: C MuJoCo's Data of one world or of B, of one model or of models of equal sizes; or MuJoCo Warp's Data.
            Its kinematics and collisions are read, and its ``cvel``: velocities must have been computed too.
        max_rows: Rows K that are kept, the deepest first; the others are counted.
        dtype: Of the rows.

    Returns:
        Rows of shape (B, K, ...) where the data are; ``count`` holds what the engine itself lost, too: contacts that
        found no room in MuJoCo Warp's buffer, which all worlds share, count in every world, and a full buffer of one
        world or of one pair counts as one in that world.

    Raises:
        ValueError: If ``max_rows`` is less than 1.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}, expected at least 1")
    if isinstance(data, mjw.Data):
        listed = _from_warp(data)
    else:
        listed = _from_mujoco([data] if isinstance(data, mujoco.MjData) else list(data), geoms.link.device)
    return _rows(geoms, listed, max_rows, dtype)


def _from_mujoco(worlds: list[mujoco.MjData], device: torch.device) -> _Listed:
    def flat(name: str, of: Any = lambda data: data.contact) -> Tensor:
        return torch.from_numpy(np.concatenate([np.array(getattr(of(data), name)) for data in worlds])).to(device)

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(data, name) for data in worlds])).to(device)

    return _Listed(
        exists=flat("exclude") <= _LISTED,
        world=torch.from_numpy(np.repeat(np.arange(len(worlds)), [data.ncon for data in worlds])).to(device),
        geom=flat("geom").long(),
        dist=flat("dist"),
        pos=flat("pos"),
        normal=flat("frame")[:, :3],
        friction=flat("friction")[:, 0],
        lost=torch.tensor([_lost_by_mujoco(data) for data in worlds], device=device),
        xpos=stacked("xpos"),
        xmat=stacked("xmat").unflatten(-1, (3, 3)),
        cvel=stacked("cvel"),
        com=stacked("subtree_com"),
    )


def _lost_by_mujoco(data: mujoco.MjData) -> int:
    """One for a full buffer, one for every pair of geoms that used up all of its places: it stops there in silence."""
    full = int(data.warning[mujoco.mjtWarning.mjWARN_CONTACTFULL].number > 0)
    if data.ncon < mujoco.mjMAXCONPAIR:
        return full
    _, sizes = np.unique(np.asarray(data.contact.geom), axis=0, return_counts=True)
    return full + int((sizes >= mujoco.mjMAXCONPAIR).sum())


def _from_warp(data: Any) -> _Listed:
    contact = data.contact
    found, pairs = wp.to_torch(data.nacon).long(), wp.to_torch(data.ncollision).long()
    dist = wp.to_torch(contact.dist)
    # What a full buffer drops is known as a number, not by world: it counts in all.
    without_room = (found - len(dist)).clamp_min(0) + (pairs - len(dist)).clamp_min(0)
    flagged = (wp.to_torch(data.overflow) & int(_LOST)) != 0
    constraint = (wp.to_torch(contact.type) & _CONSTRAINT) != 0
    return _Listed(
        exists=(torch.arange(len(dist), device=dist.device) < found) & constraint,
        world=wp.to_torch(contact.worldid).long(),
        geom=wp.to_torch(contact.geom).long(),
        dist=dist,
        pos=wp.to_torch(contact.pos),
        normal=wp.to_torch(contact.frame)[:, 0],
        friction=wp.to_torch(contact.friction)[:, 0],
        lost=torch.maximum(without_room, flagged.long()),
        xpos=wp.to_torch(data.xpos),
        xmat=wp.to_torch(data.xmat),
        cvel=wp.to_torch(data.cvel),
        com=wp.to_torch(data.subtree_com),
    )


def _rows(geoms: ContactGeoms, listed: _Listed, max_rows: int, dtype: torch.dtype) -> ContactSet:
    """Rows of shape (B, K, ...): a row for each side of a contact that belongs to the robot."""
    count, worlds = len(listed.dist), len(listed.xpos)
    # Behind the last contact the buffers hold anything, indices out of range too.
    world = torch.where(listed.exists, listed.world, 0).repeat(2)
    geom = torch.where(listed.exists[:, None], listed.geom, 0).clamp_min(0)
    own, other = torch.cat([geom[:, 1], geom[:, 0]]), torch.cat([geom[:, 0], geom[:, 1]])
    exists = listed.exists & (listed.geom >= 0).all(-1)  # a flex has no geom
    gap = listed.dist.repeat(2) + geoms.grown
    exists = exists.repeat(2) & (geoms.link[own] >= 0)
    if geoms.reach is not None:
        exists = exists & (gap < geoms.reach)
    if geoms.fields:
        exists = exists & ~(geoms.sphere[own] & shallower(gap, exists, (world * len(geoms.link) + own), other))
    if geoms.beyond is not None:  # only now: a deeper row may stand in the place of one that is not
        exists = exists & (gap >= geoms.beyond)
    place = places(gap, exists, world, worlds, max_rows)

    sign = torch.ones_like(gap)
    sign[count:] = -1
    normal = listed.normal.repeat(2, 1) * sign[:, None]
    # The midpoint lies half the listed distance behind the surface that the engine saw, which may be a grown one.
    point = listed.pos.repeat(2, 1) + normal * (gap - listed.dist.repeat(2) / 2)[:, None]
    velocity = _velocity(geoms, listed, world, own, point) - _velocity(geoms, listed, world, other, point)
    if geoms.base is not None:
        back = listed.xmat[world, geoms.base].transpose(-1, -2)
        point, normal, velocity = (
            (back * v[:, None, :]).sum(-1) for v in (point - listed.xpos[world, geoms.base], normal, velocity)
        )
    kind = torch.where(geoms.moves[other], int(Counterpart.DYNAMIC), int(Counterpart.STATIC))
    kind = torch.where(geoms.link[other] >= 0, int(Counterpart.SELF), kind)

    def kept(value: Tensor) -> Tensor:
        value = value.to(dtype) if value.is_floating_point() else value
        room = value.new_zeros(worlds * max_rows + 1, *value.shape[1:])  # the last place takes what has none
        return room.index_put_((place,), value)[:-1].unflatten(0, (worlds, max_rows))

    there = listed.lost.new_zeros(worlds).index_add_(0, world, exists.long())
    return ContactSet(
        point=kept(point),
        normal=kept(normal),
        gap=kept(gap),
        velocity=kept(velocity),
        friction=kept(listed.friction.repeat(2)),
        link=kept(geoms.link[own]),
        kind=kept(kind),
        mask=torch.arange(max_rows, device=gap.device) < there[:, None],
        count=there + listed.lost,
    )


def _velocity(geoms: ContactGeoms, listed: _Listed, world: Tensor, geom: Tensor, point: Tensor) -> Tensor:
    """Velocity [m/s] that the geoms' bodies have at points (E, 3), all in the world frame."""
    body = geoms.body[geom]
    angular, linear = listed.cvel[world, body].split(3, -1)
    return linear + torch.linalg.cross(angular, point - listed.com[world, geoms.root[body]])


def shallower(gap: Tensor, exists: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Which entries (E,) are not the deepest of those with their pair of labels."""
    order = _sorted(gap, exists)
    for label in (second, first):
        order = order[label[order].argsort(stable=True)]
    there = exists[order]
    same = (first[order][1:] == first[order][:-1]) & (second[order][1:] == second[order][:-1]) & there[:-1]
    found = torch.zeros_like(exists)
    found[order[1:]] = same & there[1:]
    return found


def places(gap: Tensor, exists: Tensor, world: Tensor, worlds: int, rows: int) -> Tensor:
    """Place of each entry (E,) in a table of ``worlds`` times ``rows``, the deepest first; behind it for the rest."""
    order = _sorted(gap, exists)
    label = torch.where(exists, world, worlds)[order]
    order = order[label.argsort(stable=True)]
    label = label.sort(stable=True).values
    # Entries before each one, less those before the first of its world.
    before = torch.arange(len(gap), device=gap.device)
    start = torch.searchsorted(label, torch.arange(worlds + 1, device=gap.device))
    rank = before - start[label]
    free = (label < worlds) & (rank < rows)
    place = torch.empty_like(order)
    place[order] = torch.where(free, label * rows + rank, worlds * rows)
    return place


def _sorted(gap: Tensor, exists: Tensor) -> Tensor:
    """Order of entries (E,): by gap, those that do not exist last."""
    return torch.where(exists, gap, torch.inf).argsort(stable=True)
