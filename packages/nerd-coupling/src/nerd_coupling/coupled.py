"""Two-way coupling: a callable moves the robot, the engine moves the objects, one constraint solve joins them.

``CoupledWorlds`` is the headline. Per physics step of h seconds, with the inertia M, which has a block of its own
for the robot:

    a_smooth = a_free(q_robot, v_robot, u)      for the robot, from the callable, plus M⁻¹ f of external forces f
    a_smooth = M⁻¹ (forces − bias)              for the objects, from the engine
    a        = argmin over x of ½ (x − a_smooth)ᵀ M (x − a_smooth) + s(J x − a_ref)
    v        ← v + h a,   q ← q ⊕ h v

The sum s over the constraint rows J (contacts, joint limits, dry friction, equalities) is MuJoCo's, its gradient the
reaction forces on robot and objects alike. MuJoCo Warp's solver takes M a_smooth from ``qfrc_smooth`` and starts from
a_smooth in ``qacc_smooth``; both are written, so that the start belongs to the problem. ``qacc_smooth`` alone would
leave the robot to the engine's forces. Source of the problem: MuJoCo's documentation of its constraint solver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from .free_motion import FreeMotionConvention, free_motion_convention, implicit_terms
from .launches import Launches, on_device
from .one_way import OneWayRows
from .robot_block import robot_block
from .warp_worlds import _CAPACITY, _MAX_VALUE, step_memory
from .worlds import masked_worlds

__all__ = ["CoupledWorlds", "FreeAcceleration"]

FreeAcceleration = Callable[[Tensor, Tensor], Tensor]
"""(robot state (nworld, nq + nv), control (nworld, nu)) to accelerations (nworld, nv), all float32."""


class CoupledWorlds:
    """``nworld`` copies of a scene in which a callable gives the robot's unconstrained acceleration.

    Objects stay analytical and push back; the resolved state is the callable's next input. External forces
    (``warp_data.qfrc_applied``, ``xfrc_applied``) act on robot and objects. Actuators, springs, damping, gravity and
    Coriolis forces of the robot in the scene have no effect: they are the callable's business.

    A world whose state stops being finite turns into NaN and stays so until ``set_state``; the others go on, on a
    CPU bit for bit as without it.

    Args:
        mj_model: The scene: robot, objects, ground.
        robot: Name of the robot's root body, or several names; everything else is an object.
        nworld: Number of worlds.
        free_acceleration: Gives the robot's unconstrained acceleration at every physics step; runs without gradients.
        substeps: Physics steps per ``step``, with the control held.
        two_way: False for the ablation: objects see the robot as kinematic, and the robot moves as if they were not
            there. Its joint limits, dry friction and contacts with the static world and itself still act.
        on_reset: Called with the mask (nworld,) bool of the worlds whose state was set, for a callable with memory.
        convention: What ``free_acceleration`` learned from; refused unless it is this scene's.
        device: ``cpu`` or a CUDA device such as ``cuda:0``.
        nconmax: Contacts stored per world, on average over the worlds.
        njmax: Constraint rows per world.
        use_graph: Capture the engine's launches and replay them. Turn it off to change ``warp_model`` between steps.

    Attributes:
        nworld: Number of worlds.
        substeps: Physics steps per ``step``.
        two_way: Whether reactions act on the robot.
        device: Torch device of every tensor.
        convention: What an acceleration means here.
        mj_model: The scene on the host.
        warp_model: MuJoCo Warp's Model.
        warp_data: MuJoCo Warp's Data; what a caller writes there takes effect at the next step.
        qpos: Zero-copy view, shape (nworld, nq).
        qvel: Zero-copy view, shape (nworld, nv).
        ctrl: Zero-copy view, shape (nworld, nu).

    Raises:
        ValueError: If the integrator is not Euler or treats damping implicitly, if the convention is another one, if
            the robot cannot be separated from the rest (see ``robot_block``), or if a number or the device does not
            fit.
    """

    def __init__(
        self,
        mj_model: mujoco.MjModel,
        robot: str | Sequence[str],
        nworld: int,
        free_acceleration: FreeAcceleration,
        *,
        substeps: int = 1,
        two_way: bool = True,
        on_reset: Callable[[Tensor], None] | None = None,
        convention: FreeMotionConvention | None = None,
        device: str = "cpu",
        nconmax: int = 48,
        njmax: int = 200,
        use_graph: bool = True,
    ) -> None:
        for name, value in (("nworld", nworld), ("substeps", substeps)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but no CUDA device is available")
        block = robot_block(mj_model, robot)
        _refuse_options(mj_model)
        self.convention = free_motion_convention(mj_model, robot)
        if convention is not None:
            self.convention.check(convention)
        self.mj_model, self.nworld, self.substeps, self.two_way = mj_model, nworld, substeps, two_way
        self._free_acceleration, self._on_reset = free_acceleration, on_reset
        with on_device(self.device):
            self.warp_model = mjw.put_model(mj_model)
            # Without damping the two forms of Euler agree; this one leaves a as the solver gave it.
            self.warp_model.opt.disableflags |= mjw.DisableBit.EULERDAMP
            # Overflow is read from ``overflow``, not from the terminal.
            self.warp_model.opt.warn_overflow = 0
            self.warp_data = mjw.put_data(
                mj_model, mujoco.MjData(mj_model), nworld=nworld, nconmax=nconmax, njmax=njmax
            )
            self._warp_external, self._warp_external_acceleration, self._warp_change, self._warp_force = (
                wp.zeros((nworld, mj_model.nv), dtype=float) for _ in range(4)
            )
        data = self.warp_data
        self.qpos, self.qvel, self.ctrl, self._overflow = (
            wp.to_torch(array) for array in (data.qpos, data.qvel, data.ctrl, data.overflow)
        )
        self._qacc_smooth, self._qfrc_smooth = wp.to_torch(data.qacc_smooth), wp.to_torch(data.qfrc_smooth)
        self._change, self._force, self._external_acceleration = (
            wp.to_torch(array) for array in (self._warp_change, self._warp_force, self._warp_external_acceleration)
        )
        self._memory = step_memory(data)
        self._bad = torch.zeros(nworld, dtype=torch.bool, device=self.device)
        self._qpos_index = torch.tensor(block.qpos, device=self.device)
        self._dof_index = torch.tensor(block.dofs, device=self.device)
        self._one_way = None if two_way else OneWayRows(mj_model, block, self.warp_model, data)
        self._smooth, self._multiply, self._solve, self._advance = (
            Launches(run, use_graph=use_graph)
            for run in (self._run_smooth, self._run_multiply, self._run_solve, self._run_advance)
        )

    @property
    def state(self) -> Tensor:
        """A copy of qpos and qvel, shape (nworld, nq + nv) float32; [m, rad, m/s, rad/s], world."""
        return torch.cat((self.qpos, self.qvel), dim=1).masked_fill_(self._bad[:, None], torch.nan)

    @property
    def robot_state(self) -> Tensor:
        """The robot's part of ``state``, its qpos followed by its qvel: what the callable sees."""
        rows = torch.cat((self.qpos[:, self._qpos_index], self.qvel[:, self._dof_index]), dim=1)
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
            state: qpos and qvel, shape (nworld, nq + nv) float32.
            mask: Worlds to write, shape (nworld,) bool; the others are untouched. Default: all.

        Raises:
            ValueError: If a shape, dtype or device does not fit.
        """
        nq = self.mj_model.nq
        self._check("state", state, (self.nworld, nq + self.mj_model.nv))
        if mask is None:
            mask = torch.ones(self.nworld, dtype=torch.bool, device=self.device)
        chosen = torch.tensor(masked_worlds(mask, self.nworld), device=self.device, dtype=torch.long)
        rows = state.detach()[chosen]
        for view in self._memory:
            view[chosen] = 0
        self.qpos[chosen], self.qvel[chosen] = rows[:, :nq], rows[:, nq:]
        self._bad[chosen] = False
        self._mark_bad()
        if self._on_reset is not None:
            self._on_reset(mask.to(self.device))

    @torch.no_grad()
    def step(self, control: Tensor) -> Tensor:
        """``substeps`` physics steps with the control held.

        Args:
            control: Shape (nworld, nu) float32. The callable gets it as it is; the engine clips it for actuators on
                objects.

        Returns:
            The new state, shape (nworld, nq + nv) float32.

        Raises:
            ValueError: If a shape, dtype or device does not fit, of the control or of what the callable returns.
        """
        self._check("control", control, (self.nworld, self.mj_model.nu))
        self.ctrl.copy_(control)
        for _ in range(self.substeps):
            free = self._free_acceleration(self.robot_state, self.ctrl.clone())
            self._check("free_acceleration", free, (self.nworld, len(self._dof_index)))
            with on_device(self.device):
                self._smooth()
                self._overwrite(free)
                if self._one_way is not None:
                    self._one_way.separate()
                    self._solve()
                    self._one_way.prescribe()
                self._solve()
                self._advance()
            self._mark_bad()
        return self.state

    def rollout(self, state: Tensor, controls: Tensor) -> Tensor:
        """Roll out from given states; the worlds' own state comes back afterwards.

        A callable with memory is reset (``on_reset``) before and after.

        Args:
            state: First states, shape (nworld, nq + nv) float32.
            controls: Controls of each step, shape (nworld, T, nu) float32.

        Returns:
            States, shape (nworld, T + 1, nq + nv) float32, the first being ``state``; NaN from the step on in which a
            row diverged or dropped contacts (see :attr:`overflow`): it is no longer physics.

        Raises:
            ValueError: If a shape, dtype or device does not fit.
        """
        self._check("controls", controls, (self.nworld, *controls.shape[1:2], self.mj_model.nu))
        views = (self.qpos, self.qvel, self._bad, *self._memory)
        kept = [view.clone() for view in views]
        self.set_state(state)
        states = [self.state]
        for t in range(controls.shape[1]):
            states.append(self.step(controls[:, t]).masked_fill_(self.overflow[:, None], torch.nan))
        for view, old in zip(views, kept, strict=True):
            view.copy_(old)
        if self._on_reset is not None:
            self._on_reset(torch.ones(self.nworld, dtype=torch.bool, device=self.device))
        return torch.stack(states, dim=1)

    def _run_smooth(self) -> None:
        """Everything before the solver, as ``mujoco_warp.forward`` orders it, and the external forces' share."""
        model, data = self.warp_model, self.warp_data
        mjw.fwd_position(model, data, factorize=False)
        mjw.fwd_velocity(model, data)
        mjw.fwd_actuation(model, data)
        mjw.fwd_acceleration(model, data, factorize=True)
        wp.copy(self._warp_external, data.qfrc_applied)
        mjw.xfrc_accumulate(model, data, self._warp_external)
        mjw.solve_m(model, data, self._warp_external_acceleration, self._warp_external)

    def _overwrite(self, free: Tensor) -> None:
        """Write the robot's block of ``qacc_smooth`` and ``qfrc_smooth``.

        Chosen here: M a is written as the engine's own ``qfrc_smooth`` plus M times the difference of the
        accelerations. The engine's own acceleration then passes bit for bit; M a rounds the force, and a cube that
        tips and bounces makes 1.5e-2 of that within 300 steps.
        """
        robot = self._dof_index
        acceleration = free + self._external_acceleration[:, robot]
        self._change[:, robot] = acceleration - self._qacc_smooth[:, robot]
        self._qacc_smooth[:, robot] = acceleration
        self._multiply()
        self._qfrc_smooth[:, robot] += self._force[:, robot]

    def _run_multiply(self) -> None:
        mjw.mul_m(self.warp_model, self.warp_data, self._warp_force, self._warp_change)

    def _run_solve(self) -> None:
        mjw.solve(self.warp_model, self.warp_data)

    def _run_advance(self) -> None:
        mjw.euler(self.warp_model, self.warp_data)

    def _mark_bad(self) -> None:
        rows = torch.cat((self.qpos, self.qvel), dim=1)
        # Written so that NaN compares as bad.
        self._bad |= ~(rows.abs() < _MAX_VALUE).all(dim=1)

    def _check(self, name: str, value: Any, shape: tuple[int, ...]) -> None:
        """Refuse what would have to be converted: a silent cast hides a mistake of the caller."""
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}, expected a tensor")
        found = (tuple(value.shape), value.dtype, value.device)
        # "cuda" and "cuda:0" may be one device.
        same_device = torch.empty(0, device=self.device).device == value.device
        if found[:2] != (shape, torch.float32) or not same_device:
            raise ValueError(
                f"{name} has shape {found[0]}, {found[1]} on {found[2]}, expected {shape}, torch.float32 "
                f"on {self.device}"
            )


def _refuse_options(mj_model: mujoco.MjModel) -> None:
    """An acceleration is stepped along as it is: no implicit terms, no frozen bodies."""
    integrator = mujoco.mjtIntegrator(mj_model.opt.integrator)
    if integrator != mujoco.mjtIntegrator.mjINT_EULER:
        name = integrator.name.removeprefix("mjINT_")
        raise ValueError(f"option integrator is {name}, expected Euler: other integrators do not step along a_free")
    if implicit_terms(mj_model):
        raise ValueError(
            'option flag eulerdamp is enabled and joints have damping, expected eulerdamp="disable": the robot\'s '
            "damping would count twice"
        )
    if mj_model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP:
        raise ValueError('option flag sleep is enabled, expected sleep="disable": a sleeping robot ignores a_free')
