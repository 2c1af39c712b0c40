"""What steps the worlds of an environment: the analytical teacher, two engines, a trained model.

All have one face, :class:`Physics`, and nothing of a task: the environment asks for the next state and resets worlds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nerd_core import FlashNerd, NerdBaseline, RobotSpec, StateCodec
from nerd_core.artifact import load_model
from nerd_core.cartpole import CartPole
from nerd_core.compiled import can_compile
from nerd_core.device import cores, threads
from nerd_core.streaming import compile_streaming
from nerd_coupling.robots import Robot
from nerd_coupling.terrain import Terrain, scene
from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_coupling.worlds import MujocoWorlds

__all__ = ["PHYSICS", "EnginePhysics", "LearnedPhysics", "Physics", "TeacherPhysics", "open_physics"]

PHYSICS = ("teacher", "mujoco", "mjwarp", "nerd", "nerd-baseline")

OUTSIDE_SIGMAS = 5.0


class Physics(Protocol):
    """N worlds of one robot that advance by one model step at a time.

    A world that cannot go on is NaN until it is reset; the others are, bit for bit on a CPU, what they would have been
    without it.

    Attributes:
        name: One of :data:`PHYSICS`.
        robot: The robot.
        nworld: Worlds N.
        device: Where states are.
    """

    name: str
    robot: RobotSpec
    nworld: int
    device: torch.device

    def reset(self, state: Tensor, mask: Tensor) -> None:
        """Write states (N, nq + nv) where ``mask`` (N,) is true, and forget those worlds' history."""
        ...

    def step(self, control: Tensor) -> Tensor:
        """States after one model step, shape (N, nq + nv) float32, with controls (N, nu) held."""
        ...

    def outside(self) -> Tensor | None:
        """Worlds (N,) whose last step began outside what the physics was recorded from; None where all is inside."""
        ...

    def memory(self) -> dict[str, Tensor]:
        """All that the next step depends on."""
        ...

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Go back to what :meth:`memory` gave."""
        ...

    def close(self) -> None:
        """Give threads and graphs back."""
        ...


class TeacherPhysics:
    """The analytical CartPole of nerd_core, in float64; states are given out in float32."""

    name = "teacher"

    def __init__(self, nworld: int, *, cartpole: CartPole | None = None, device: str = "cpu") -> None:
        self._cartpole = cartpole or CartPole()
        self.robot, self.nworld, self.device = self._cartpole.robot(), nworld, torch.device(device)
        self._state = torch.zeros(nworld, self.robot.state_size, dtype=torch.float64, device=self.device)

    def reset(self, state: Tensor, mask: Tensor) -> None:
        """Write states; there is no history."""
        self._state = torch.where(mask[:, None], state.to(self._state), self._state)

    def step(self, control: Tensor) -> Tensor:
        """States after one model step."""
        self._state = self._cartpole.step(self._state, control.to(self._state))
        return self._state.float()

    def outside(self) -> None:
        """All is inside: nothing was recorded."""

    def memory(self) -> dict[str, Tensor]:
        """The states, float64."""
        return {"state": self._state}

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Go back to earlier states."""
        self._state = memory["state"].to(self._state)

    def close(self) -> None:
        """Nothing to give back."""


class EnginePhysics:
    """MuJoCo C or MuJoCo Warp.

    Args:
        worlds: The engine's worlds; closed with this.
    """

    def __init__(self, worlds: MujocoWorlds | MjWarpWorlds) -> None:
        self._worlds = worlds
        self.name = "mujoco" if isinstance(worlds, MujocoWorlds) else "mjwarp"
        self.robot, self.nworld = worlds.robot.spec, worlds.nworld
        self.device = worlds.device if isinstance(worlds, MjWarpWorlds) else torch.device("cpu")

    def reset(self, state: Tensor, mask: Tensor) -> None:
        """Write states and forget warm starts of the solver."""
        self._worlds.set_state(state, mask)

    def step(self, control: Tensor) -> Tensor:
        """States after one model step; a world that dropped contacts is NaN, it is no longer physics."""
        state = self._worlds.step(control)
        if isinstance(self._worlds, MjWarpWorlds):
            state = state.masked_fill(self._worlds.overflow[:, None], torch.nan)
        return state

    def outside(self) -> None:
        """All is inside: nothing was recorded."""

    def memory(self) -> dict[str, Tensor]:
        """The engine's own, warm starts included."""
        return self._worlds.memory()

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Go back to an earlier state of the engine."""
        self._worlds.restore(memory)

    def close(self) -> None:
        """Stop the engine's threads."""
        self._worlds.close()


class LearnedPhysics:
    """A trained model, its history cache and, for a model that sees contacts, the torch collider.

    A step is: contact rows of the states, if the model has a context encoder; network; integration of the increment.
    Resetting a world empties its history and that of no other. A state that is written from outside, a push say, is a
    reset: no step of the recorded data leads to it.

    Args:
        model: A module that is a StreamingStep; put into evaluation mode.
        terrain: What the collider sees.
        nworld: Worlds N.
        compiled: Compile the step (see ``nerd_core.streaming``); None decides by what this machine has.
        num_threads: CPU threads of a compiled step; None for as many as its work is worth.
        name: One of :data:`PHYSICS`.

    Attributes:
        compiled: Whether the step is compiled.
    """

    def __init__(
        self,
        model: Any,
        terrain: Terrain,
        nworld: int,
        *,
        compiled: bool | None = None,
        num_threads: int | None = None,
        name: str = "nerd",
    ) -> None:
        self.name, self.robot, self.nworld = name, model.robot, nworld
        like = next(model.parameters())
        self.device = like.device
        self._codec, self._stats = StateCodec(model.robot), getattr(model, "token_stats", None)
        encoder = getattr(model, "context_encoder", None)
        self._observe = None if encoder is None else encoder.observe
        self._scene = {key: value.to(self.device) for key, value in scene([terrain] * nworld).items()}
        self._state = torch.zeros(nworld, self.robot.state_size, dtype=like.dtype, device=self.device)
        if self.robot.floating:
            self._state[:, 3] = 1.0
        self._outside = torch.zeros(nworld, dtype=torch.bool, device=self.device)
        self.compiled = (can_compile() or self.device.type == "cuda") if compiled is None else compiled
        form = "compiled" if self.compiled else "eager"
        self._step = compile_streaming(model, nworld, form=form, threads=num_threads, context=self._context())
        self._cache = self._step.init_cache(nworld)

    def _context(self) -> dict[str, Tensor] | None:
        return None if self._observe is None else self._observe(self._state, self._scene)

    @torch.no_grad()
    def reset(self, state: Tensor, mask: Tensor) -> None:
        """Write states and empty those worlds' history."""
        self._state = torch.where(mask[:, None], state.to(self._state), self._state)
        # In place: a compiled step goes on with the cache that it owns. Everything but the cursor, which all worlds
        # share, has a row per world.
        for leaf in pytree.tree_leaves(self._cache):
            if leaf.dim():
                leaf.masked_fill_(mask.view(-1, *[1] * (leaf.dim() - 1)), 0)

    @torch.no_grad()
    def step(self, control: Tensor) -> Tensor:
        """States after one model step."""
        control = control.to(self._state)
        if self._stats is not None:
            far = self._stats.normalize(self._codec.encode(self._state, control)).abs() > OUTSIDE_SIGMAS
            self._outside = far.any(-1)
        with threads(getattr(self._step, "threads", None)):
            delta, self._cache = self._step.step(self._state, control, self._context(), self._cache)
        self._state = self._codec.integrate(self._state, delta)
        return self._state.float()

    def outside(self) -> Tensor | None:
        """Worlds whose last step began where the model knows little, shape (N,) bool.

        The model knows mean and deviation σ of every token channel of its training data, not their ranges. Chosen
        here: a channel beyond 5 σ is outside. At most one in 25 frames of any data is (Chebyshev), of data as they
        are recorded far fewer, and a uniform channel ends at 1.7 σ.
        """
        return None if self._stats is None else self._outside

    def memory(self) -> dict[str, Tensor]:
        """States and history."""
        leaves = pytree.tree_leaves(self._cache)
        return {"state": self._state, **{f"cache{i}": leaf for i, leaf in enumerate(leaves)}}

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Go back to earlier states and their history."""
        self._state = memory["state"].to(self._state)
        leaves, structure = pytree.tree_flatten(self._step.init_cache(self.nworld))
        kept = [memory[f"cache{i}"].to(leaf) for i, leaf in enumerate(leaves)]
        self._cache = pytree.tree_unflatten(kept, structure)

    def close(self) -> None:
        """Nothing to give back."""


def open_physics(
    name: str,
    robot: Robot,
    terrain: Terrain,
    nworld: int,
    *,
    model: Path | None = None,
    device: str = "cpu",
    compiled: bool | None = None,
    num_threads: int | None = None,
) -> tuple[Physics, str | None]:
    """A physics by name, and the SHA-256 of its weights where it has any.

    Args:
        name: One of :data:`PHYSICS`.
        robot: The robot.
        terrain: What it stands on.
        nworld: Worlds N.
        model: Model or run folder, for ``nerd`` and ``nerd-baseline``.
        device: Where to compute; ``mujoco`` is always on the CPU.
        compiled: Compile a model's step; None decides by what this machine has.
        num_threads: CPU threads of MuJoCo and of a compiled step.

    Raises:
        ValueError: An unknown name, no world, a model that is missing, not wanted, damaged, of another architecture
            or for another robot, gains or time step (every difference is listed).
    """
    check_physics(name, model)
    if nworld < 1:
        raise ValueError(f"worlds is {nworld}, expected at least 1")
    if name == "teacher":
        teacher = TeacherPhysics(nworld, device=device)
        if gaps := teacher.robot.differences(robot.spec):
            raise ValueError(f"physics is teacher, which is a cartpole, not {robot.name}: {'; '.join(gaps[:3])}")
        return teacher, None
    if name == "mujoco":
        return EnginePhysics(MujocoWorlds(robot, terrain, nworld, threads=num_threads)), None
    if name == "mjwarp":
        return EnginePhysics(MjWarpWorlds(robot, terrain, nworld, device=device)), None
    assert model is not None
    network, manifest = load_model(model, robot=robot.spec)
    wanted = FlashNerd if name == "nerd" else NerdBaseline
    if not isinstance(network, wanted):
        other = "nerd-baseline" if name == "nerd" else "nerd"
        raise ValueError(f"model: {model} is a {manifest['architecture']}, expected with physics {other}")
    encoder = network.context_encoder
    if encoder is not None and not hasattr(encoder, "observe"):
        raise ValueError(f"model: {model} sees its surroundings in a way that cannot be observed from a state")
    learned = LearnedPhysics(
        network.to(device),
        terrain,
        nworld,
        compiled=compiled,
        num_threads=num_threads if num_threads is None else min(num_threads, cores()),
        name=name,
    )
    return learned, manifest["weights_sha256"]


def check_physics(name: str, model: Path | None) -> None:
    """Refuse a name that is none, and a model that is missing or not wanted, before anything is loaded."""
    if name == "onnx":
        raise ValueError(f"physics is onnx, which is not here yet, expected one of {', '.join(PHYSICS)}")
    if name not in PHYSICS:
        raise ValueError(f"physics is {name!r}, expected one of {', '.join(PHYSICS)}")
    learned = name.startswith("nerd")
    if learned and model is None:
        raise ValueError(f"model is missing, expected the folder of a trained model with physics {name}")
    if not learned and model is not None:
        raise ValueError(f"model is {model}, expected only with physics nerd or nerd-baseline")
