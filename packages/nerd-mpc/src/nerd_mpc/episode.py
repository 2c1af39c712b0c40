"""One episode: plan in some dynamics, execute in MuJoCo Warp, judge, and keep everything that happened."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nerd_contact import PrimitiveCollider
from nerd_core.rotation import quat_multiply, rotvec_to_quat
from nerd_coupling.terrain import scene

from .dial import DialConfig, PlanState, draw_noise, plan, warm_start
from .dynamics import MujocoRollout, RolloutModel
from .platform import ClimbJudge, Outcome, PlatformTask

__all__ = ["EpisodeRecord", "Plant", "Progress", "run_episode", "settled_start"]

ERROR_HORIZONS = (5, 10, 20)
"""Model steps after which the chosen plan is compared with the engine."""


class Plant(Protocol):
    """What executes: one world of MuJoCo Warp here."""

    @property
    def state(self) -> Tensor:
        """Present state, shape (1, nq + nv)."""
        ...

    def set_state(self, state: Tensor) -> None:
        """Write the state, shape (1, nq + nv)."""
        ...

    def step(self, control: Tensor) -> Tensor:
        """One model step under joint targets (1, nu) [rad]; the new state."""
        ...


class Progress(NamedTuple):
    """What the live line shows after each decision."""

    decision: int
    state: Tensor
    planning_ms: float
    score: float
    effective_samples: float
    feet_on_deck: int
    held: int
    outcome: Outcome | None


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """An executed episode of D decisions.

    Attributes:
        settings: What was run: robot, terrain, height [m], dynamics, seed, plan, model, versions, machine. JSON.
        outcome: How it ended, an ``Outcome`` value or ``interrupted``.
        states: Executed states, shape (D + 1, nq + nv).
        controls: Joint targets [rad], shape (D, nu).
        planning_ms: Wall time of each decision's planning [ms], shape (D,).
        reward: Reward of the state after each decision, shape (D,).
        score: Mean reward that the planner predicted for its plan, shape (D,).
        effective_samples: Effective sample size of the last refinement, shape (D,).
        feet_on_deck: Shape (D,), int64.
        held: Present run of decisions that satisfy the success condition, shape (D,), int64.
        on_plan_error: Horizon H in model steps to base position errors [m] of the chosen plan, model against
            engine from the same state, shape (D,); empty where the engine itself plans.
        plans_predicted: Base positions [m] along some chosen plans, in the planner's dynamics, shape (P, T + 1, 3).
        plans_engine: The same plans in the engine, shape (P, T + 1, 3).
        plan_decisions: Decision of each of those plans, shape (P,), int64.
        summary: Figures of the episode. JSON.
    """

    settings: dict[str, Any]
    outcome: str
    states: Tensor
    controls: Tensor
    planning_ms: Tensor
    reward: Tensor
    score: Tensor
    effective_samples: Tensor
    feet_on_deck: Tensor
    held: Tensor
    on_plan_error: dict[int, Tensor]
    plans_predicted: Tensor
    plans_engine: Tensor
    plan_decisions: Tensor
    summary: dict[str, Any]


def settled_start(task: PlatformTask, plant: Plant, seed: int) -> Tensor:
    """State (nq + nv,) of the robot standing still before the deck; also written into the plant.

    The robot drops from its home pose, settles for one second, and is then moved by the seed's jitter: ±3 cm along
    x and ±5° of yaw. A seed says where an episode starts and what noise its planner draws, nothing else.
    """
    robot = task.robot
    plant.set_state(torch.tensor(robot.home_state)[None])
    hold = torch.tensor(robot.home_ctrl)[None]
    for _ in range(50):
        plant.step(hold)
    state = plant.state[0].clone().float()
    jitter = 2 * torch.rand(2, generator=torch.Generator().manual_seed(seed)) - 1
    state[0], state[1] = 0.03 * jitter[0], 0.0
    turn = rotvec_to_quat(torch.tensor([0.0, 0.0, math.radians(5) * float(jitter[1])]))
    state[3:7] = quat_multiply(turn, state[3:7])  # about the vertical: the settled pitch stays
    state[robot.spec.nq :] = 0.0
    plant.set_state(state[None])
    return state


def run_episode(
    task: PlatformTask,
    dynamics: RolloutModel,
    plant: Plant,
    config: DialConfig,
    *,
    seed: int,
    settings: dict[str, Any],
    on_decision: Callable[[Progress], None] | None = None,
) -> EpisodeRecord:
    """Climb, or not.

    At each decision the plan's first knot is already committed: it is executed while the rest is refined, so one
    control period of latency is part of the loop. Ctrl-C ends the episode; what was done so far is returned.

    Args:
        task: Terrain, reward and success rule.
        dynamics: What plans are tried on.
        plant: What executes.
        config: Budget of the planner.
        seed: Start jitter and planner noise.
        settings: Copied into the record. JSON values.
        on_decision: Called after each decision.

    Raises:
        ValueError: The executed state stopped being finite.
    """
    spec = task.robot.spec
    generator = torch.Generator().manual_seed(seed)
    judge, log = ClimbJudge(task), _Log(task, dynamics)
    state = settled_start(task, plant, seed)
    dynamics.begin()
    home = task.to_action(torch.tensor(task.robot.home_ctrl))
    nominal = PlanState(home.repeat(config.num_knots, 1))
    log.states.append(state)
    # Once outside the timing: kernels, buffers and thread pools come into being at the first call.
    dynamics.score(state, home.expand(config.num_samples, config.horizon, -1))
    outcome: str | None = None
    while outcome is None:
        try:
            count = config.iterations if judge.decisions else config.first_iterations
            noise = draw_noise(config, generator, count, spec.nu)
            started = time.perf_counter()
            nominal, info = plan(
                nominal,
                partial(dynamics.score, state),
                config=config,
                noise=noise,
                iterations=count,
            )
            elapsed = 1e3 * (time.perf_counter() - started)
            log.compare(state, nominal, config)
            control = task.to_control(nominal.knots[0])
            dynamics.executed(state, control)
            state = plant.step(control[None])[0].clone().float()
            if not bool(torch.isfinite(state).all()):
                raise ValueError(
                    f"executed state: not finite after decision {judge.decisions + 1}, expected finite numbers"
                )
            outcome = judge.update(state, log.penetration(state))
            nominal = warm_start(nominal, config)
            now = Progress(
                judge.decisions,
                state,
                elapsed,
                info.nominal_score,
                info.effective_samples[-1],
                int(task.on_deck(state).sum()),
                judge.held,
                judge.outcome,
            )
            log.take(now, control, float(task.reward(state)))
            if on_decision is not None:
                on_decision(now)
        except KeyboardInterrupt:
            outcome = "interrupted"
    return log.record(str(outcome), settings, judge)


class _Log:
    """Collects an episode while it runs."""

    def __init__(self, task: PlatformTask, dynamics: RolloutModel) -> None:
        self._task, self._dynamics = task, dynamics
        self._collider = PrimitiveCollider(task.robot.spec, task.robot.probes, margin=1.0)
        self._scene = scene(task.terrain)
        self._engine = None if dynamics.name == "mujoco" else MujocoRollout(task)
        self.states: list[Tensor] = []
        # State, control and reward go with their row: a decision is in the record whole or not at all.
        self._rows: list[tuple[Progress, Tensor, float]] = []
        self._errors: dict[int, list[float]] = {}
        self._plans: list[tuple[int, Tensor, Tensor]] = []
        self._depth = 0.0

    def penetration(self, state: Tensor) -> float:
        """Deepest contact of a state [m]."""
        depth = max(0.0, -float(self._collider(state[None], self._scene).gap.min()))
        self._depth = max(self._depth, depth)
        return depth

    def compare(self, state: Tensor, nominal: PlanState, config: DialConfig) -> None:
        """Base position error of the chosen plan, planner's dynamics against the engine."""
        if self._engine is None:
            return
        action = config.control_spline.evaluate(nominal.knots[None]).clamp(-1, 1)
        predicted = self._dynamics.predict(state, action)[0, :, :3]
        truth = self._engine.predict(state, action)[0, :, :3]
        distance = (predicted - truth).norm(dim=-1)
        for horizon in ERROR_HORIZONS:
            if horizon < len(distance):
                self._errors.setdefault(horizon, []).append(float(distance[horizon]))
        if len(self._rows) % 10 == 0:
            self._plans.append((len(self._rows), predicted, truth))

    def take(self, now: Progress, control: Tensor, reward: float) -> None:
        """One executed decision."""
        self.states.append(now.state)
        self._rows.append((now, control, reward))

    def record(self, outcome: str, settings: dict[str, Any], judge: ClimbJudge) -> EpisodeRecord:
        """Everything as one value."""
        n = len(self._rows)
        rows = [now for now, _, _ in self._rows]
        planning = torch.tensor([r.planning_ms for r in rows])
        # A decision that was interrupted may have been compared already.
        errors = {h: torch.tensor(v[:n]) for h, v in self._errors.items()}
        controls = torch.stack([c for _, c, _ in self._rows]) if n else torch.empty(0, self._task.robot.spec.nu)
        plans = [p for p in self._plans if p[0] < n] or [(0, torch.empty(0, 3), torch.empty(0, 3))]
        return EpisodeRecord(
            settings=settings,
            outcome=outcome,
            states=torch.stack(self.states[: n + 1]),
            controls=controls,
            planning_ms=planning,
            reward=torch.tensor([reward for _, _, reward in self._rows]),
            score=torch.tensor([r.score for r in rows]),
            effective_samples=torch.tensor([r.effective_samples for r in rows]),
            feet_on_deck=torch.tensor([r.feet_on_deck for r in rows], dtype=torch.int64),
            held=torch.tensor([r.held for r in rows], dtype=torch.int64),
            on_plan_error=errors,
            plans_predicted=torch.stack([p[1] for p in plans]),
            plans_engine=torch.stack([p[2] for p in plans]),
            plan_decisions=torch.tensor([p[0] for p in plans], dtype=torch.int64),
            summary=self._summary(outcome, judge, controls, planning, errors),
        )

    def _summary(
        self,
        outcome: str,
        judge: ClimbJudge,
        controls: Tensor,
        planning: Tensor,
        errors: dict[int, Tensor],
    ) -> dict[str, Any]:
        # The first decision makes more refinements, so it is not one of a kind.
        steady = planning[1:] if len(planning) > 1 else planning
        quantiles = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        dt = self._task.robot.spec.dt
        top = judge.time_to_top
        return {
            "outcome": outcome,
            "decisions": len(controls),
            "time_to_top_s": None if top is None else round(top * dt, 3),
            "max_feet_on_deck": judge.max_feet,
            "longest_hold": judge.longest_hold,
            "deepest_penetration_m": round(self._depth, 5),
            "peak_effort_fraction": self._peak_effort(controls),
            "planning_ms": {
                name: round(float(steady.quantile(q)), 2) if len(steady) else None for name, q in quantiles.items()
            },
            # JSON knows no NaN: a model that diverges along most of its plans has no median.
            "on_plan_error_median_m": {
                str(h): round(float(v.median()), 5) for h, v in errors.items() if len(v) and v.median().isfinite()
            },
        }

    def _peak_effort(self, controls: Tensor) -> float:
        """Largest joint effort at the start of a model step, over its limit."""
        if not len(controls):
            return 0.0
        spec = self._task.robot.spec
        states = torch.stack(self.states[: len(controls)])
        kp, kd, limit = (torch.tensor(v) for v in (spec.kp, spec.kd, spec.effort_limit))
        effort = kp * (controls - states[:, 7 : spec.nq]) - kd * states[:, spec.nq + 6 :]
        return round(float((effort.abs() / limit).clamp(max=1).max()), 3)
