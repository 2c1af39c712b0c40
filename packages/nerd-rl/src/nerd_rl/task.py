"""A task as a value: how episodes start and end, what is seen, what is rewarded. Nothing here knows what steps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from nerd_coupling.robots import Robot
from nerd_coupling.terrain import Terrain

from .ppo import PpoConfig

__all__ = ["Moment", "Task"]


class Moment(NamedTuple):
    """All worlds at one time sample: everything that an observation or a reward may depend on.

    Attributes:
        state: qpos and qvel, shape (N, nq + nv); [m, rad, m/s, rad/s], MuJoCo's order and frames.
        before: The state one model step earlier, shape (N, nq + nv); equal to ``state`` at an episode's start.
        control: The control held in between, shape (N, nu); zero at an episode's start.
        action: The clipped action that led here, shape (N, A); zero at an episode's start.
        last_action: The one before it, shape (N, A).
        command: What is asked of the policy, shape (N, C); C may be 0.
        steps: Model steps since the episode's start, shape (N,), int64.
    """

    state: Tensor
    before: Tensor
    control: Tensor
    action: Tensor
    last_action: Tensor
    command: Tensor
    steps: Tensor


def _no_command(draws: Tensor) -> Tensor:
    return draws[:, :0]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a policy learns to do.

    Everything random is a function of uniform numbers in [0, 1), shape (N, n), which the environment draws: equal
    draws give equal episodes in every physics.

    Attributes:
        name: Name.
        robot: The robot.
        terrain: What it stands on.
        episode_steps: Model steps after which an episode is cut off.
        action_offset: Control at zero action (nu) [N, N m or rad].
        action_scale: Control per unit of action (nu); control = offset + scale · action, within the robot's range.
        action_limit: Actions are clipped to ± this.
        observation_scales: Name, with its unit, of each entry of an observation, and what it is multiplied by.
        start_draws: Uniform numbers of a start.
        start: (N, start_draws) to states (N, nq + nv).
        observe: Moment to quantities in SI units, shape (N, O), not yet scaled.
        reward: Moment to named terms, shapes (N,), whose sum is the reward of the step that led there.
        terminated: Moment to worlds (N,) bool whose episode ends for good.
        command_names: Name, with its unit, of each entry of the command.
        command_draws: Uniform numbers of a command.
        command: (N, command_draws) to commands (N, C).
        command_steps: Model steps between commands within an episode; None for one command per episode.
        push_draws: Uniform numbers of a push.
        push: States and (N, push_draws) to states after a push; None for no pushes.
        push_steps: Model steps between pushes of a world.
        ppo: Settings that PPO learns it with.
    """

    name: str
    robot: Robot
    episode_steps: int
    action_offset: tuple[float, ...]
    action_scale: tuple[float, ...]
    observation_scales: Mapping[str, float]
    start_draws: int
    start: Callable[[Tensor], Tensor]
    observe: Callable[[Moment], Tensor]
    reward: Callable[[Moment], dict[str, Tensor]]
    terminated: Callable[[Moment], Tensor]
    ppo: PpoConfig
    terrain: Terrain = field(default_factory=Terrain)
    action_limit: float = 1.0
    command_names: tuple[str, ...] = ()
    command_draws: int = 0
    command: Callable[[Tensor], Tensor] = _no_command
    command_steps: int | None = None
    push_draws: int = 0
    push: Callable[[Tensor, Tensor], Tensor] | None = None
    push_steps: int = 1

    def __post_init__(self) -> None:
        nu = self.robot.spec.nu
        for name in ("action_offset", "action_scale"):
            if len(getattr(self, name)) != nu:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, expected one per control ({nu})")
        for name in ("episode_steps", "push_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.command_steps is not None and self.command_steps < 1:
            raise ValueError(f"command_steps is {self.command_steps}, expected at least 1")
        if not 0 < self.action_limit < math.inf:
            raise ValueError(f"action_limit is {self.action_limit}, expected a positive number")

    @property
    def num_actions(self) -> int:
        """Width A of an action."""
        return self.robot.spec.nu

    @property
    def num_observations(self) -> int:
        """Width O of an observation."""
        return len(self.observation_scales)

    def to_json(self) -> dict[str, Any]:
        """What a run or a policy remembers of its task: numbers and names, not the functions."""
        joints = self.robot.spec.joints
        return {
            "name": self.name,
            "robot": self.robot.name,
            "robot_digest": self.robot.spec.digest(),
            "dt": self.robot.spec.dt,
            "episode_steps": self.episode_steps,
            "actions": [joints[joint].name for joint in self.robot.spec.actuated],
            "action_offset": list(self.action_offset),
            "action_scale": list(self.action_scale),
            "action_limit": self.action_limit,
            "control": self.robot.spec.control,
            "ctrl_range": [list(bounds) for bounds in self.robot.spec.ctrl_range],
            # A list of pairs: a JSON object would lose the order.
            "observations": [[name, scale] for name, scale in self.observation_scales.items()],
            "commands": list(self.command_names),
            "command_steps": self.command_steps,
            "push_steps": None if self.push is None else self.push_steps,
            "ppo": asdict(self.ppo),
        }
