"""A Newton solver that runs a robot on a learned model: swap one line of a Newton program.

    solver = newton.solvers.SolverMuJoCo(model)      becomes      solver = SolverNerd(model, network)

``SolverNerd`` is the headline. Model, state, control and contacts stay what they are; one step is one model step of
the network. Per step, for all worlds at once:

    rows        from Newton's own contacts (newton_contacts.py)
    increment   from the network and each world's history
    state       integrated by the network's codec, written with the bodies that follow from it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import newton
import torch
import warp as wp
from newton.solvers import SolverBase
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nerd_contact import ContactSetEncoder
from nerd_core import StreamingStep

from .learned_step import LearnedStep, exported_step
from .newton_contacts import NewtonContacts
from .newton_identity import Placement, differences, refuse_differences
from .newton_robot import NewtonRobot, find_robot, flat_view
from .robots import Robot, load_robot, robot_names

__all__ = ["SolverNerd"]

_SAME_TIME = 1e-6


class SolverNerd(SolverBase):
    """Moves one robot in each world of a Newton model by a learned model of it.

    A world's history belongs to the trajectory that this solver wrote. It is forgotten where ``state_in`` is not what
    the solver wrote last in that world (a teleport, a push, a reset by the caller), bit for bit, where :meth:`reset`
    was asked for, and where the state is not finite; other worlds keep theirs. A world whose state is not finite stays
    so until it is written, and leaves the others bit for bit as they are.

    Controls are what the robot was recorded with, held over the step: ``control.joint_target_q`` for position control,
    clipped to the recorded range, ``control.joint_f`` for effort control. What the network was not recorded with is
    refused, never ignored: forces on the robot's bodies, efforts on joints without an actuator, velocity targets. On a
    CPU that is a ValueError; on a GPU, where asking would wait for it, such a world turns to NaN.

    Nothing else is integrated: bodies that are not the robot's must be kinematic and are handed on as they are.

    On a GPU a step neither copies to the host nor waits for it, so that it may stand in a CUDA graph
    (``wp.ScopedCapture``). torch follows Warp's current stream.

    Args:
        model: Newton's model, with the robot in every world.
        network: The learned model, on the model's device: a FlashNerd or another StreamingStep.
        robot: The robot as it was recorded, for what a RobotSpec does not hold; by default the shipped robot that the
            network was made for.
        context_encoder: Says which rows the network reads; by default the network's own.

    Attributes:
        robot: Where the robot is in the model; reads and writes states in our convention.

    Raises:
        ValueError: If the robot in the model is not the one that the network was made for (every difference is named),
            something else would have to move, or the network reads what Newton's contacts do not say.
    """

    def __init__(
        self,
        model: newton.Model,
        network: StreamingStep,
        *,
        robot: Robot | None = None,
        context_encoder: ContactSetEncoder | None = None,
    ) -> None:
        super().__init__(model)
        self._network, self._description = network, _description(network, robot)
        self.robot: NewtonRobot = find_robot(model, self._description)
        encoder = context_encoder or getattr(network, "context_encoder", None)
        if encoder is not None and not isinstance(encoder, ContactSetEncoder):
            raise ValueError(
                f"network has a context encoder of kind {getattr(encoder, 'kind', type(encoder).__name__)!r}, expected "
                "'contact-set': Newton's contacts are rows, not fixed points"
            )
        self._rows = self._collider(encoder)
        self._device = self.robot.device
        spec, worlds = self.robot.spec, self.robot.nworld
        with torch.no_grad():
            leaves, structure = pytree.tree_flatten(network.init_cache(worlds))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                raise ValueError(f"network is on {leaf.device}, expected the model's device, {self._device}")
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._written = torch.full((worlds, spec.state_size), torch.nan, device=self._device)
        self._forget = torch.ones(worlds, dtype=torch.bool, device=self._device)
        self._resting = model.control(clone_variables=False)
        lead, floor = (6 if spec.floating else 0), torch.tensor(spec.ctrl_range).reshape(-1, 2).float()
        driven = [lead + joint for joint in spec.actuated]
        self._range = floor.to(self._device)
        self._driven = self.robot.dofs[:, driven]
        free = [n for n in range(spec.nv) if spec.control == "position" or n not in driven]
        self._unforced = self.robot.dofs[:, free]
        shift = 1 if spec.floating else 0
        self._targets = self.robot.coords[:, [lead + shift + joint for joint in spec.actuated]]
        self._step = self._learned_step(structure)

    @property
    def dt(self) -> float:
        """The only time step of this solver, one model step of the network [s]."""
        return self.robot.spec.dt

    def step(
        self,
        state_in: newton.State,
        state_out: newton.State,
        control: newton.Control | None,
        contacts: newton.Contacts | None,
        dt: float,
        *,
        observables: SolverBase.Observables | None = None,
    ) -> None:
        """One model step; ``state_out`` may be ``state_in``.

        Args:
            state_in: Joint coordinates and velocities are read, and the bodies that the contacts refer to.
            state_out: Joint coordinates, velocities and bodies are written.
            control: Targets or efforts; by default the model's.
            contacts: What Newton's pipeline found for ``state_in``; None for networks that read no contacts.
            dt: Must be :attr:`dt` [s].
            observables: Must be None or empty: a learned model knows no forces or accelerations.

        Raises:
            ValueError: If something is refused (see the class), or an array is not the model's.
        """
        self._refuse(contacts, dt, observables)
        with torch.no_grad(), self._torch_on_warps_stream():
            self._advance(state_in, state_out, self._resting if control is None else control, contacts)

    def reset(
        self,
        state: newton.State,
        world_mask: wp.array | None = None,
        flags: newton.StateFlags | int | None = None,
    ) -> None:
        """Forget the histories of worlds; the state stays as it is.

        Args:
            state: Unused; states are the caller's to write.
            world_mask: Worlds, shape (world_count + 1,) bool, the last for what is in no world; None for all.
            flags: Unused.
        """
        super().reset(state, world_mask, flags)
        with self._torch_on_warps_stream():
            if world_mask is None:
                self._forget.fill_(True)
            else:
                self._forget |= wp.to_torch(world_mask)[: self.robot.nworld]

    def notify_model_changed(self, flags: newton.ModelFlags | int) -> None:
        """Compare the robot again; contact tables follow the shapes.

        Raises:
            ValueError: If the robot is no longer the one that the network was made for.
        """
        placement = Placement.find(self.model, self.robot.spec)
        refuse_differences(differences(self.model, self._description, placement), self._description.name)
        if self._rows is not None:
            self._rows = NewtonContacts(self.robot, margin=self._rows.margin, max_rows=self._rows.max_rows)

    def _collider(self, encoder: ContactSetEncoder | None) -> NewtonContacts | None:
        if encoder is None:
            return None
        return NewtonContacts(self.robot, margin=encoder.config.margin, max_rows=encoder.config.max_rows)

    def _learned_step(self, structure: pytree.TreeSpec) -> Any:
        plain = LearnedStep(self._network, structure)
        if self._device.type != "cuda" or not isinstance(self._network, nn.Module):
            return plain
        step = exported_step(plain, self._example(), self._device)
        for _ in range(2):  # kernels and workspaces must be there before a capture
            with torch.no_grad(), self._torch_on_warps_stream():
                step(*self._example())
        return step

    def _example(self) -> tuple[Any, ...]:
        """Inputs of a step, of the right shapes."""
        spec, worlds = self.robot.spec, self.robot.nworld
        state = torch.zeros(worlds, spec.state_size, device=self._device)
        if spec.floating:
            state[:, 3] = 1
        control, rows = torch.zeros(worlds, spec.nu, device=self._device), None
        if self._rows is not None:
            contacts = newton.Contacts(1, 0, device=self.model.device)
            rows = self._rows(contacts, self.model.state())._asdict()
        return state, control, rows, self._forget, self._leaves

    def _refuse(self, contacts: newton.Contacts | None, dt: float, observables: Any) -> None:
        spec = self.robot.spec
        if not abs(dt - spec.dt) <= _SAME_TIME * spec.dt:
            raise ValueError(
                f"dt is {dt}, expected {spec.dt} [s]: the network takes one step of {spec.dt} s, which stands for "
                f"{spec.substeps} physics steps of {spec.timestep} s; call step once per {spec.dt} s, without substeps"
            )
        if self._rows is not None and contacts is None:
            raise ValueError("contacts is None, expected what Newton's collision pipeline found for state_in")
        self._require_unreduced_contacts(contacts)
        self.validate_observables(observables, contacts)

    def _advance(self, state_in: newton.State, state_out: newton.State, control: newton.Control, contacts: Any) -> None:
        robot = self.robot
        raw = robot.raw(state_in)
        # Compared as numbers: NaN differs from itself, so a world that is not finite keeps no history either.
        forget = self._forget | (raw != self._written).any(-1)
        foreign = self._foreign(state_in, control)
        rows = None if self._rows is None else self._rows(contacts, state_in)._asdict()
        state, leaves = self._step(robot.from_newton(raw), self._controls(control), rows, forget, self._leaves)
        for n, (old, new) in enumerate(zip(self._leaves, leaves, strict=True)):
            if isinstance(old, Tensor):
                old.copy_(new)  # in place, for captured graphs
            else:
                self._leaves[n] = new
        after = torch.where(foreign[:, None], torch.nan, robot.to_newton(state))
        self._hand_on(state_in, state_out)
        robot.put(after, state_out)
        self._written.copy_(after)
        self._forget.zero_()

    def _controls(self, control: newton.Control) -> Tensor:
        if self.robot.spec.control == "position":
            count = (self.model.joint_coord_count,)
            values = flat_view(control, "joint_target_q", count, self._device)[self._targets]
        else:
            values = flat_view(control, "joint_f", (self.model.joint_dof_count,), self._device)[self._driven]
        return torch.maximum(torch.minimum(values, self._range[:, 1]), self._range[:, 0])

    def _foreign(self, state: newton.State, control: newton.Control) -> Tensor:
        """Worlds (B,) in which something acts that the network was not recorded with; on a CPU a ValueError instead."""
        count = (self.model.joint_dof_count,)
        acts = {
            "state_in.body_f": flat_view(state, "body_f", (self.model.body_count, 6), self._device)[self.robot.links],
            "control.joint_f": flat_view(control, "joint_f", count, self._device)[self._unforced],
        }
        direct = getattr(getattr(control, "mujoco", None), "ctrl", None)
        if direct is not None:
            acts["control.mujoco.ctrl"] = wp.to_torch(direct, requires_grad=False).reshape(self.robot.nworld, -1)
        if self.robot.spec.control == "position":
            acts["control.joint_target_qd"] = flat_view(control, "joint_target_qd", count, self._device)[self._driven]
        found = {name: (values != 0).flatten(1).any(-1) for name, values in acts.items()}
        if self._device.type == "cpu":
            for name, worlds in found.items():
                if bool(worlds.any()):
                    raise ValueError(
                        f"{name} is not zero on {self.robot.spec.name} in world {int(worlds.nonzero()[0])}, expected "
                        "zero: the network was not recorded with it"
                    )
        return torch.stack(list(found.values())).any(0)

    def _hand_on(self, state_in: newton.State, state_out: newton.State) -> None:
        """What is not the robot's stays what it was."""
        if state_in is state_out:
            return
        for name in ("joint_q", "joint_qd", "body_q", "body_qd"):
            wp.copy(getattr(state_out, name), getattr(state_in, name))

    @contextmanager
    def _torch_on_warps_stream(self) -> Iterator[None]:
        """Put torch on Warp's current stream: a Newton program orders, and captures, its work there."""
        with wp.ScopedDevice(self.model.device):
            cuda = self._device.type == "cuda"
            stream = torch.cuda.stream(wp.stream_to_torch(wp.get_stream())) if cuda else nullcontext()
            # Memory of a captured step must be nobody else's: a pool of its own keeps it so.
            memory = torch.cuda.use_mem_pool(self._pool()) if cuda else nullcontext()
            with stream, memory:
                yield

    def _pool(self) -> Any:
        if not hasattr(self, "_memory"):
            self._memory = torch.cuda.MemPool()
        return self._memory


def _description(network: StreamingStep, robot: Robot | None) -> Robot:
    """The recorded robot, which must have the network's RobotSpec."""
    made_for = network.robot
    if robot is None:
        if made_for.name not in robot_names():
            raise ValueError(
                f"robot is None, expected the Robot that {made_for.name!r} was recorded with: it is no shipped one"
            )
        robot = load_robot(made_for.name)
    if gaps := made_for.differences(robot.spec):
        raise ValueError(f"network was made for another {robot.name} (network, robot): {'; '.join(gaps)}")
    return robot
