"""Planner-in-the-loop recording: where a planner goes is where the model must be right.

An episode is planned and executed on a random deck; from every state that it visits, rollouts around the plan are
proposed to the recorder, which labels them with the engine. With a learned model as the planner's dynamics the rollouts
lie where that model is optimistic, which is where the next one must learn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nerd_contact import PrimitiveCollider
from nerd_core.rotation import quat_multiply, rotvec_to_quat
from nerd_coupling.recording import Batch, place_on_ground
from nerd_coupling.terrain import scene
from nerd_coupling.worlds import MujocoWorlds

from .dial import DialConfig, PlanState, draw_noise, plan, warm_start
from .dynamics import RolloutModel
from .platform import PlatformTask

__all__ = ["PlannerRollouts", "PlannerRolloutsConfig"]


def loop_budget() -> DialConfig:
    """The planner's budget while recording."""
    return DialConfig(num_samples=128, horizon=20, num_knots=5, iterations=2, first_iterations=4)


@dataclass(frozen=True, kw_only=True)
class PlannerRolloutsConfig:
    """Settings of :class:`PlannerRollouts`.

    Attributes:
        heights: Range of deck heights [m].
        decisions: Decisions per episode, at most.
        episodes: Episodes per shard.
        rows: Rollouts proposed per decision.
        stance_fraction: Share of episodes that start in a random stance near or on the deck instead of on the
            ground before it.
        plan: Budget of the planner; samples, temperature and noise are varied around it.
    """

    heights: tuple[float, float] = (0.05, 0.28)
    decisions: int = 90
    episodes: int = 1
    rows: int = 96
    stance_fraction: float = 0.3
    plan: DialConfig = field(default_factory=loop_budget)

    def __post_init__(self) -> None:
        for name, least in (("decisions", 1), ("episodes", 1), ("rows", 3)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if self.plan.num_samples < 4:
            raise ValueError(f"plan.num_samples is {self.plan.num_samples}, expected at least 4: it is halved at times")
        if not 0 <= self.stance_fraction <= 1:
            raise ValueError(f"stance_fraction is {self.stance_fraction}, expected 0 to 1")
        if not 0 < self.heights[0] <= self.heights[1]:
            raise ValueError(f"heights is {self.heights}, expected a positive range [m], the lower one first")


class PlannerRollouts:
    """A proposal for :func:`nerd_coupling.recording.record`.

    Args:
        config: Settings.
        make_task: Gives the task for a deck height [m].
        make_dynamics: Gives the planner's dynamics for a task.
        label: Names those dynamics in the dataset's manifest.
        stances: Random states for a deck, from ``RandomTargets``: (count, terrain, generator) to states.
    """

    def __init__(
        self,
        config: PlannerRolloutsConfig,
        *,
        make_task: Callable[[float], PlatformTask],
        make_dynamics: Callable[[PlatformTask], RolloutModel],
        label: str,
        stances: Callable[..., Tensor],
    ) -> None:
        self.config, self.label = config, label
        self._make_task, self._make_dynamics, self._stances = make_task, make_dynamics, stances

    def settings(self) -> dict[str, Any]:
        """What identifies this proposal. JSON values."""
        c = self.config
        return {
            "proposal": "planner-in-the-loop",
            "dynamics": self.label,
            "heights": list(c.heights),
            "decisions": c.decisions,
            "episodes": c.episodes,
            "rows": c.rows,
            "stance_fraction": c.stance_fraction,
            "samples": c.plan.num_samples,
            "horizon": c.plan.horizon,
        }

    def __call__(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of one shard, one per episode."""
        for _ in range(self.config.episodes):
            yield self._episode(generator)

    def _episode(self, generator: torch.Generator) -> Batch:
        def pick(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=generator))

        c = self.config
        task = self._make_task(pick(*c.heights))
        dynamics = self._make_dynamics(task)
        config = replace(
            c.plan,
            num_samples=int(c.plan.num_samples * pick(0.5, 1.0)),
            temperature=c.plan.temperature * pick(0.5, 2.0),
            noise_scale=c.plan.noise_scale * pick(0.6, 1.0),
        )
        around = _Around(task, config, c.rows, generator)
        jitter = pick(0.0, 0.15)  # noise on what is executed, so that episodes leave the beaten track
        states, controls = [], []
        with MujocoWorlds(task.robot, task.terrain, 1, threads=1) as plant:
            plant.set_state(self._start(task, generator, pick)[None])
            home = task.to_action(torch.tensor(task.robot.home_ctrl))
            nominal = PlanState(home.repeat(config.num_knots, 1))
            for decision in range(c.decisions):
                state = plant.state[0]
                if not bool(torch.isfinite(state).all()) or float(state[2]) < 0.05:
                    break
                count = config.iterations if decision else config.first_iterations
                noise = draw_noise(config, generator, count, task.robot.spec.nu)
                nominal, info = plan(
                    nominal,
                    partial(dynamics.score, state),
                    config=config,
                    noise=noise,
                    iterations=count,
                    keep_samples=True,
                )
                assert info.sampled_knots is not None
                first, action = around(state, nominal.knots, info.sampled_knots)
                states.append(first)
                controls.append(task.to_control(action))
                act = nominal.knots[0] + jitter * torch.randn(nominal.knots[0].shape, generator=generator)
                control = task.to_control(act.clamp(-1, 1))
                dynamics.executed(state, control)
                plant.step(control[None])
                nominal = warm_start(nominal, config)
        return Batch(task.terrain, torch.cat(states), torch.cat(controls))

    def _start(self, task: PlatformTask, generator: torch.Generator, pick: Callable[[float, float], float]) -> Tensor:
        if pick(0.0, 1.0) < self.config.stance_fraction:
            return self._stances(1, task.terrain, generator)[0]
        state = torch.tensor(task.robot.home_state)
        state[0], state[1] = pick(-0.1, 0.65), pick(-0.1, 0.1)
        turn = torch.tensor([0.0, 0.0, pick(-0.2, 0.2)])
        state[3:7] = rotvec_to_quat(turn)
        collider = PrimitiveCollider(task.robot.spec, task.robot.probes, margin=5.0)
        return place_on_ground(state[None], scene(task.terrain), collider, torch.zeros(1))[0]


class _Around:
    """Rollouts around one decision: the planner's own samples, wide ones, and disturbed first states."""

    def __init__(
        self,
        task: PlatformTask,
        config: DialConfig,
        rows: int,
        generator: torch.Generator,
    ) -> None:
        self._task, self._spline, self._rows = task, config.control_spline, rows
        self._generator = generator
        self._collider = PrimitiveCollider(task.robot.spec, task.robot.probes, margin=5.0)
        self._scene = scene(task.terrain)

    def __call__(self, state: Tensor, nominal: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """First states (rows, nq + nv) and normalised actions (rows, T, nu)."""
        g, n = self._generator, self._rows
        third = n // 3
        chosen = samples[torch.randint(len(samples), (third,), generator=g)]
        # Noise of every size, so that plans near the chosen one are told apart and far ones are known.
        size = 0.03 + 0.8 * torch.rand(n - third - 1, 1, 1, generator=g).square()
        shape = (n - third - 1, *nominal.shape)
        noisy = nominal + size * torch.randn(shape, generator=g)
        knots = torch.cat([nominal[None], chosen, noisy]).clamp(-1, 1)
        action = self._spline.evaluate(knots).clamp(-1, 1)
        first = state.repeat(n, 1)
        first[-third:] = self._disturbed(first[-third:])
        return first, action

    def _disturbed(self, state: Tensor) -> Tensor:
        g, spec = self._generator, self._task.robot.spec
        n = len(state)

        def noise(width: int, scale: float) -> Tensor:
            return scale * torch.randn(n, width, generator=g) * torch.rand(n, 1, generator=g)

        state = state.clone()
        state[:, :3] += noise(3, 0.02)
        state[:, 3:7] = quat_multiply(state[:, 3:7], rotvec_to_quat(noise(3, 0.08)))
        state[:, 7 : spec.nq] += noise(len(spec.joints), 0.12)
        state[:, spec.nq : spec.nq + 3] += noise(3, 0.25)
        state[:, spec.nq + 3 : spec.nq + 6] += noise(3, 0.8)
        state[:, spec.nq + 6 :] += noise(len(spec.joints), 2.0)
        where = {k: v.expand(n, *v.shape[1:]) for k, v in self._scene.items()}
        depth = self._collider(state, where).gap.min(-1).values
        lifted = place_on_ground(state, where, self._collider, depth.clamp_min(-0.003))
        return lifted
