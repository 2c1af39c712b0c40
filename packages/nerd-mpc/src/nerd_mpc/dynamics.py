"""Rollout models: the same face for the learned model, MuJoCo C and MuJoCo Warp.

The planner needs scores; the report needs the predicted states. Execution never happens here.
"""

import os
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nerd_core import FlashNerd, KVCache
from nerd_core.compiled import can_compile, compile_step, flat_step
from nerd_coupling.terrain import scene
from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_coupling.worlds import MujocoWorlds

from .platform import Goal, PlatformTask

__all__ = ["MjWarpRollout", "MujocoRollout", "NerdRollout", "RolloutModel"]


class RolloutModel(Protocol):
    """Dynamics that a plan is tried on, from the present state of one robot."""

    name: str

    def begin(self) -> None:
        """Forget what was executed: a new episode."""
        ...

    def executed(self, state: Tensor, control: Tensor) -> None:
        """Take note of an executed model step: its first state (nq + nv,) and control (nu,)."""
        ...

    def score(self, state: Tensor, action: Tensor) -> Tensor:
        """Rewards, shape (N, T), of normalised actions (N, T, nu) from one state (nq + nv,)."""
        ...

    def predict(self, state: Tensor, action: Tensor) -> Tensor:
        """States, shape (N, T + 1, nq + nv), of normalised actions (N, T, nu) from one state."""
        ...


class _EngineRollout:
    """Shared by the analytical engines: they have no memory of what was executed."""

    def __init__(self, task: PlatformTask) -> None:
        self.task = task

    def begin(self) -> None:
        """Nothing to forget."""

    def executed(self, state: Tensor, control: Tensor) -> None:
        """Nothing to remember."""

    def score(self, state: Tensor, action: Tensor) -> Tensor:
        """Rewards of the states that follow each action."""
        return self.task.reward(self.predict(state, action)[:, 1:])

    def predict(self, state: Tensor, action: Tensor) -> Tensor:
        """States along the plans."""
        raise NotImplementedError


class MujocoRollout(_EngineRollout):
    """MuJoCo C in a thread pool."""

    name = "mujoco"

    def __init__(self, task: PlatformTask, *, threads: int | None = None) -> None:
        super().__init__(task)
        self._worlds = MujocoWorlds(task.robot, task.terrain, 1, threads=threads)

    def predict(self, state: Tensor, action: Tensor) -> Tensor:
        """States along the plans."""
        start = state.expand(len(action), -1)
        return self._worlds.rollout(start, self.task.to_control(action))


class MjWarpRollout(_EngineRollout):
    """Batched MuJoCo Warp.

    Rows are padded to one batch size, for which kernels, buffers and a graph are made once.
    """

    name = "mjwarp"

    def __init__(self, task: PlatformTask, num_samples: int, *, device: str = "cpu") -> None:
        super().__init__(task)
        self._worlds = MjWarpWorlds(task.robot, task.terrain, num_samples, device=device)

    def predict(self, state: Tensor, action: Tensor) -> Tensor:
        """States along the plans; NaN from where a world diverged."""
        n = self._worlds.nworld
        _check_rows(action, n)
        padded = torch.cat([action, action[-1:].expand(n - len(action), -1, -1)])
        states = self._worlds.rollout(state.expand(n, -1).clone(), self.task.to_control(padded))
        return states[: len(action)].cpu()


class NerdRollout:
    """The learned model: collider, network, integration and reward of one model step in one function.

    The function is compiled ahead of time where a C++ compiler is present (see ``nerd_core.compiled``); otherwise the
    same function runs eagerly. The history cache is kept at batch 1 and expanded to the samples. Fewer rows than
    ``num_samples`` are padded: one compiled size serves scoring and prediction.

    Args:
        model: The network, with a context encoder that can observe.
        task: Terrain and reward.
        num_samples: Rows of a rollout.
        compiled: Compile the step; None decides by what this machine has.
        threads: Threads of the compiled step; None for one per core.
        precision: ``float32`` or ``bfloat16`` for the matrix products of the blocks.
    """

    name = "nerd"

    def __init__(
        self,
        model: FlashNerd,
        task: PlatformTask,
        num_samples: int,
        *,
        compiled: bool | None = None,
        threads: int | None = None,
        precision: str = "float32",
    ) -> None:
        self.model, self.num_samples = model.eval().requires_grad_(False), num_samples
        self.compiled = can_compile() if compiled is None else compiled
        step = _ModelStep(model, task, precision)
        self.retarget(task)
        self.begin()
        state = torch.tensor(task.robot.home_state).repeat(num_samples, 1)
        action = torch.zeros(num_samples, task.robot.spec.nu)
        example = (state, action, self._cache.expand(num_samples), self._scene, self._goal)
        cores = threads or len(os.sched_getaffinity(0))
        self._step = compile_step(step, example, threads=cores) if self.compiled else flat_step(step, example)

    def retarget(self, task: PlatformTask) -> None:
        """Plan on another deck from now on; what is compiled stays."""
        self.task, self._goal = task, task.goal
        self._scene = scene(task.terrain)

    def begin(self) -> None:
        """Start from an empty history."""
        self._cache = self.model.init_cache(1)

    @torch.no_grad()
    def executed(self, state: Tensor, control: Tensor) -> None:
        """Push one executed step into the history."""
        observe = self.model.context_encoder.observe
        context = observe(state[None], self._scene)
        _, self._cache = self.model.step(state[None], control[None], context, self._cache)

    @torch.no_grad()
    def _roll(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(action)
        _check_rows(action, self.num_samples)
        action = torch.cat([action, action[-1:].expand(self.num_samples - rows, -1, -1)])
        state = state.expand(self.num_samples, -1).contiguous()
        # Leaves in the order of _ModelStep's inputs; of its outputs, all but the first and the last are the cache.
        memory = pytree.tree_leaves(self._cache.expand(self.num_samples))
        fixed = pytree.tree_leaves((self._scene, self._goal))
        states, rewards = [state], []
        for now in action.transpose(0, 1).contiguous():
            state, *memory, reward = self._step([state, now, *memory, *fixed])
            states.append(state)
            rewards.append(reward)
        return torch.stack(states, 1)[:rows], torch.stack(rewards, 1)[:rows]

    def score(self, state: Tensor, action: Tensor) -> Tensor:
        """Rewards along the plans."""
        return self._roll(state, action)[1]

    def predict(self, state: Tensor, action: Tensor) -> Tensor:
        """States along the plans."""
        return self._roll(state, action)[0]


def _check_rows(action: Tensor, num_samples: int) -> None:
    if not 1 <= len(action) <= num_samples:
        raise ValueError(f"action has {len(action)} rows, expected 1 to num_samples ({num_samples})")


class _ModelStep(nn.Module):
    """One model step of the samples, with the reward of where it leads."""

    def __init__(self, model: FlashNerd, task: PlatformTask, precision: str) -> None:
        super().__init__()
        self.model, self._task, self._precision = model, task, precision

    def forward(
        self,
        state: Tensor,
        action: Tensor,
        cache: KVCache,
        where: dict[str, Tensor],
        goal: Goal,
    ) -> tuple[Tensor, KVCache, Tensor]:
        """Next states (N, nq + nv), the new cache and the rewards (N,)."""
        context = self.model.context_encoder.observe(state, where)
        control = self._task.to_control(action)
        with torch.autocast(state.device.type, torch.bfloat16, enabled=self._precision == "bfloat16"):
            delta, cache = self.model.step(state, control, context, cache)
        state = self.model.codec.integrate(state, delta)
        return state, cache, self._task.reward(state, goal)
