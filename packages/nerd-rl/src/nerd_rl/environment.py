"""Many worlds of one task, stepped by a physics that is passed in. Open this module first.

Episodes, rewards and observations are computed here, from states, by the same code for every physics: only the step
differs. Shown to learners by :func:`nerd_rl.rsl_env.rsl_env` and :class:`nerd_rl.gym_env.GymEnv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nerd_core.windows import seeded_generator

from .physics import Physics
from .task import Moment, Task

__all__ = ["Environment", "Step"]

# Beyond this a state is as good as not finite: NeRD's bound on what it records.
_MAX_VALUE = 1e5


class Step(NamedTuple):
    """What one model step of all worlds gave.

    Attributes:
        observation: Scaled observations, shape (N, O) float32; of a new episode where one has ended.
        reward: Rewards, shape (N,); 0 where the state was not finite.
        terminated: Episodes that ended for good, shape (N,) bool.
        truncated: Episodes that were cut off for their length, shape (N,) bool.
        final_observation: As ``observation``, but the ended episodes' last one.
        state: States that the step led to, shape (N, nq + nv), before starts and pushes; the last finite ones.
        terms: The reward's terms, shapes (N,).
        nonfinite: Worlds whose state was not finite, shape (N,) bool.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observation: Tensor
    state: Tensor
    terms: dict[str, Tensor]
    nonfinite: Tensor


class Environment:
    """The worlds of a task. A world whose episode ends starts a new one in the same step.

    A world whose state is not finite, or beyond 1e5, is terminated with reward 0, started anew and counted; its
    last observation is that of its last finite state. Random numbers are drawn for every world at every step, used or
    not: what one world draws does not depend on the others.

    Args:
        task: The task.
        physics: What steps the worlds; it is theirs alone.
        seed: Decides starts, commands and pushes.

    Attributes:
        task: The task.
        physics: The physics.
        now: The worlds at present.
        observation: Scaled observations of the present, shape (N, O) float32.
        world_steps: Model steps taken, over all worlds.
        nonfinite: Worlds that were started anew because their state was not finite.
        outside: Model steps that began outside what the physics was recorded from.

    Raises:
        ValueError: The physics has another robot than the task.
    """

    def __init__(self, task: Task, physics: Physics, *, seed: int = 0) -> None:
        if gaps := physics.robot.differences(task.robot.spec):
            raise ValueError(f"physics {physics.name} has another robot than task {task.name}: {'; '.join(gaps)}")
        self.task, self.physics = task, physics
        device, spec = physics.device, task.robot.spec
        self._offset, self._scale = (
            torch.tensor(values, device=device) for values in (task.action_offset, task.action_scale)
        )
        self._low, self._high = torch.tensor(spec.ctrl_range, device=device).unbind(-1)
        self._scales = torch.tensor(list(task.observation_scales.values()), device=device)
        self.seed(seed)
        self.reset()

    @property
    def nworld(self) -> int:
        """Worlds N."""
        return self.physics.nworld

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.physics.device

    def seed(self, seed: int) -> None:
        """Draw from the beginning of another seed's numbers, from the next reset or step on."""
        self._generator = seeded_generator(seed, "rl-environment")

    # Learners step within inference mode; tensors made there could not be written later, by a restore say.
    @torch.inference_mode(False)
    @torch.no_grad()
    def reset(self) -> Tensor:
        """Start a new episode in every world, counts from zero; gives the observations."""
        task, n = self.task, self.nworld
        start, command, _ = self._draw()
        everywhere = torch.ones(n, dtype=torch.bool, device=self.device)
        none = torch.zeros(n, task.num_actions, device=self.device)
        steps = torch.zeros(n, dtype=torch.int64, device=self.device)
        self.now = Moment(start, start, none, none, none, command, steps)
        self.physics.reset(start, everywhere)
        self.world_steps = self.nonfinite = self.outside = 0
        self.observation = self._observe(self.now)
        return self.observation

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, action: Tensor) -> Step:
        """One model step of every world.

        Args:
            action: Actions, shape (N, A), clipped to ± the task's limit.

        Raises:
            ValueError: A shape that does not fit, or an action that is not finite.
        """
        task, shape = self.task, (self.nworld, self.task.num_actions)
        if tuple(action.shape) != shape:
            raise ValueError(f"action has shape {tuple(action.shape)}, expected {shape}")
        action = action.detach().to(self.device, torch.float32).clone()
        if not bool(action.isfinite().all()):
            raise ValueError("action holds a number that is not finite, expected finite ones")
        action = action.clamp(-task.action_limit, task.action_limit)
        control = (self._offset + self._scale * action).clamp(self._low, self._high)
        before = self.now.state
        after = self.physics.step(control)
        # Written so that NaN compares as bad.
        bad = ~(after.abs() < _MAX_VALUE).all(-1)
        after = torch.where(bad[:, None], before, after)
        now = Moment(after, before, control, action, self.now.action, self.now.command, self.now.steps + 1)
        terms = task.reward(now)
        reward = torch.stack(list(terms.values())).sum(0).masked_fill(bad, 0.0)
        terminated = task.terminated(now) | bad
        truncated = (now.steps >= task.episode_steps) & ~terminated
        final = self._observe(now)
        self._count(bad)
        self._go_on(now, terminated | truncated)
        return Step(self.observation, reward, terminated, truncated, final, after, terms, bad)

    def _go_on(self, now: Moment, done: Tensor) -> None:
        """New episodes, commands and pushes."""
        task = self.task
        start, command, push = self._draw()
        written, state = done, torch.where(done[:, None], start, now.state)
        asked = done
        if task.command_steps is not None:
            asked = asked | (now.steps % task.command_steps == 0)
        if task.push is not None:
            pushed = (now.steps % task.push_steps == 0) & ~done
            state = torch.where(pushed[:, None], task.push(state, push), state)
            written = written | pushed
        if bool(written.any()):
            self.physics.reset(state, written)
        fresh = done[:, None]
        zero = torch.zeros_like(now.action)
        self.now = Moment(
            state=state,
            before=torch.where(fresh, state, now.before),
            control=torch.where(fresh, zero, now.control),
            action=torch.where(fresh, zero, now.action),
            last_action=torch.where(fresh, zero, now.last_action),
            command=torch.where(asked[:, None], command, now.command),
            steps=now.steps.masked_fill(done, 0),
        )
        self.observation = self._observe(self.now)

    def _draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """A start, a command and the numbers of a push for every world."""
        task = self.task
        sizes = (task.start_draws, task.command_draws, task.push_draws)
        draws = torch.rand(self.nworld, sum(sizes), generator=self._generator).to(self.device)
        start, command, push = draws.split(sizes, -1)
        return task.start(start), task.command(command), push

    def _observe(self, now: Moment) -> Tensor:
        return self.task.observe(now) * self._scales

    def _count(self, bad: Tensor) -> None:
        outside = self.physics.outside()
        self.world_steps += self.nworld
        self.nonfinite += int(bad.sum())
        self.outside += 0 if outside is None else int(outside.sum())

    def memory(self) -> dict[str, Tensor]:
        """All that the next steps depend on, random numbers included: a checkpoint's share of the environment."""
        counts = torch.tensor([self.world_steps, self.nonfinite, self.outside])
        worlds = {f"now.{name}": value for name, value in self.now._asdict().items()}
        physics = {f"physics.{name}": value for name, value in self.physics.memory().items()}
        return {"generator": self._generator.get_state(), "counts": counts, **worlds, **physics}

    @torch.no_grad()
    def restore(self, memory: Mapping[str, Tensor]) -> None:
        """Go back to what :meth:`memory` gave; on a CPU the steps that follow are the same bits."""
        self._generator.set_state(memory["generator"])
        self.world_steps, self.nonfinite, self.outside = memory["counts"].tolist()
        self.now = Moment(*(memory[f"now.{name}"].to(value) for name, value in self.now._asdict().items()))
        rest = {name.removeprefix("physics."): v for name, v in memory.items() if name.startswith("physics.")}
        self.physics.restore(rest)
        self.observation = self._observe(self.now)

    def close(self) -> None:
        """Close the physics."""
        self.physics.close()
