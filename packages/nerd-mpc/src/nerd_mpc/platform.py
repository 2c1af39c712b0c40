"""The platform task: a quadruped in front of a deck, what it is paid for, and when it has climbed.

Everything is batched torch on states, so that the reward can be part of a compiled rollout.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from nerd_contact import Kinematics
from nerd_contact.collider import box_distance
from nerd_core.rotation import quat_to_matrix
from nerd_coupling.robots import Robot
from nerd_coupling.terrain import Terrain

__all__ = [
    "GO2_RANGE",
    "TERRAINS",
    "ClimbJudge",
    "Goal",
    "Outcome",
    "PlatformTask",
    "RewardWeights",
    "terrain_height",
]

TERRAINS: Mapping[str, float] = {
    "T1": 0.06,
    "T2": 0.10,
    "T3": 0.14,
    "T4": 0.181,
    "T5": 0.22,
    "T6": 0.26,
}
"""Deck heights [m] of the six evaluation terrains."""

HEIGHT_RANGE = (0.0, 0.35)
"""Deck heights [m] that the task accepts; the released model was trained on a part of it."""


def terrain_height(terrain: str | None, height: float | None) -> float:
    """Deck height [m] of a named terrain or of a number; T4 where neither is given.

    Raises:
        ValueError: Both are given, the name is unknown (close names are offered), or the height is not supported.
    """
    if terrain is not None and height is not None:
        raise ValueError("--terrain and --height are both given, expected one of them")
    if height is not None:
        low, high = HEIGHT_RANGE
        if not low < height <= high:  # a NaN fails too
            raise ValueError(f"--height is {height:g} m, expected more than {low:g} and at most {high:g} m")
        return height
    name = "T4" if terrain is None else terrain
    if name not in TERRAINS:
        close = difflib.get_close_matches(name.upper(), TERRAINS, n=3, cutoff=0.4) or list(TERRAINS)
        raise ValueError(
            f"--terrain is {name!r}, expected one of {', '.join(TERRAINS)}; did you mean {', '.join(close)}?"
        )
    return TERRAINS[name]


_FRONT, _LENGTH, _WIDTH = 0.99, 0.62, 0.92  # [m] deck of DIAL-MPC's crate climb
_EDGE = 0.02  # [m] a foot may overhang the footprint by this much and still count


@dataclass(frozen=True, kw_only=True)
class RewardWeights:
    """Weights of the reward per model step; larger rewards are better.

    Source: DIAL-MPC's crate climb for position, upright, yaw and feet. Chosen here: ``stance``, without which a robot
    may wait before the deck with its head over it; ``speed``, ``rate`` and ``posture``, which make it stand still once
    it is up; ``impact``, since feet that slam into the ground sink into its soft contacts, which no real ground allows.

    Attributes:
        position: On minus the squared distance of the head point to its target [1/m²].
        upright: On minus the squared difference of the body's z axis and the world's.
        yaw: On minus the squared heading [1/rad²].
        foot: On the fraction of feet inside the footprint and near the deck's surface.
        stance: On minus the mean squared distance of the feet to where they stand at the target [1/m²].
        speed: On minus the squared base velocity, close to the target [s²/m²].
        rate: On minus the mean squared joint velocity [s²/rad²].
        impact: On minus the depth of the deepest foot beyond 1 cm [1/m].
        posture: On minus the mean squared deviation of the joints from standing [1/rad²], close to the target.
    """

    position: float = 1.0
    upright: float = 0.05
    yaw: float = 0.3
    foot: float = 0.15
    stance: float = 1.0
    speed: float = 0.02
    rate: float = 0.0002
    posture: float = 0.02
    impact: float = 20.0


class Outcome(StrEnum):
    """How an episode ended."""

    CLIMBED = "climbed"
    TIMEOUT = "timeout"
    FELL = "fell"
    OFF_DECK = "off-deck"
    NON_FINITE = "non-finite"
    PENETRATION = "penetration"


class Goal(NamedTuple):
    """What a reward depends on besides the state, as tensors, so that one compiled rollout serves every deck.

    Attributes:
        height: Deck height [m], shape ().
        head: Where the head point should be [m], world frame, shape (3,).
        feet: Where the feet should be [m], world frame, shape (feet, 3).
    """

    height: Tensor
    head: Tensor
    feet: Tensor


class PlatformTask:
    """Climb a deck whose front face stands at x = 0.99 m, then stand on it.

    Controls of the planner are normalised: -1 and 1 are the ends of a narrow range of joint targets per joint.

    Args:
        robot: A quadruped with sites ``head`` and one per foot.
        height: Deck height [m].
        weights: Reward weights.
        standing: Height of the base above what the feet stand on [m].
        control_range: Lower and upper joint target of each control [rad], shape (nu, 2).
    """

    max_decisions = 150  # 3 s at 50 Hz
    hold_decisions = 25  # 0.5 s

    def __init__(
        self,
        robot: Robot,
        height: float,
        *,
        weights: RewardWeights | None = None,
        standing: float = 0.27,
        control_range: Tensor | None = None,
    ) -> None:
        low, high = HEIGHT_RANGE
        if not low < height <= high:
            raise ValueError(f"height is {height} m, expected more than {low} and at most {high} m")
        self.robot, self.height = robot, float(height)
        self.weights = weights or RewardWeights()
        self.standing = standing
        self.terrain = Terrain.platform(height)
        self.control_range = GO2_RANGE if control_range is None else control_range
        places = {point.name: (point.body, point.pos) for point in robot.points}
        feet = [places[name] for name in robot.foot_sites]
        self._foot_radius = next(p.radius for p in robot.probes if p.name == robot.foot_geoms[0])
        self._kinematics = Kinematics(robot.spec)
        self._bodies = [body for body, _ in (*feet, places["head"])]
        self._local = torch.tensor([pos for _, pos in (*feet, places["head"])])
        self._home = torch.tensor(robot.home_ctrl)
        self._stance = self._feet_at_target()

    @property
    def target(self) -> tuple[float, float, float]:
        """Where the head point should be [m]: 0.15 m past the deck's centre, at standing height."""
        return (_FRONT + _LENGTH / 2 + 0.15, 0.0, self.height + self.standing)

    def _feet_at_target(self) -> Tensor:
        """Feet [m] of the robot standing with its head at the target and no foot over an edge, shape (feet, 3)."""
        state = torch.tensor(self.robot.home_state)
        points = self.points_world(state)
        feet = points[:-1] - points[-1] + torch.tensor(self.target)
        # Level with its head at DIAL-MPC's target, the robot would stand with its rear feet 2 cm before the deck.
        feet[:, 0].clamp_(_FRONT + 0.04, _FRONT + _LENGTH - 0.04)
        feet[:, 2] = self.height + self._foot_radius
        return feet

    def to_control(self, action: Tensor) -> Tensor:
        """Joint targets [rad] of normalised actions in [-1, 1], shapes (..., nu)."""
        low, high = self.control_range.to(action).unbind(-1)
        return low + (action + 1) / 2 * (high - low)

    def to_action(self, control: Tensor) -> Tensor:
        """Normalised actions of joint targets [rad], clipped to [-1, 1], shapes (..., nu)."""
        low, high = self.control_range.to(control).unbind(-1)
        return (2 * (control - low) / (high - low) - 1).clamp(-1, 1)

    def points_world(self, state: Tensor) -> Tensor:
        """Feet and head [m] in the world frame, shape (..., feet + 1, 3)."""
        local = self._local.to(state)
        base, _ = self._kinematics(state).points(self._bodies, local)
        mat = quat_to_matrix(state[..., 3:7])
        return state[..., None, :3] + (mat[..., None, :, :] * base[..., None, :]).sum(-1)

    @property
    def goal(self) -> Goal:
        """What the reward depends on besides the state."""
        return Goal(torch.tensor(self.height), torch.tensor(self.target), self._stance.clone())

    def reward(self, state: Tensor, goal: Goal | None = None) -> Tensor:
        """Reward of states, shape (..., nq + nv) to (...,).

        Args:
            state: States.
            goal: Another deck's goal; None for this task's own.
        """
        goal = self.goal if goal is None else goal
        w, nq = self.weights, self.robot.spec.nq
        points = self.points_world(state)
        feet, head = points[..., :-1, :], points[..., -1, :]
        distance2 = (head - goal.head.to(head)).square().sum(-1)
        mat = quat_to_matrix(state[..., 3:7])
        tilt2 = mat[..., 0, 2].square() + mat[..., 1, 2].square() + (1 - mat[..., 2, 2]).square()
        yaw = torch.atan2(mat[..., 1, 0], mat[..., 0, 0])
        inside = torch.sigmoid((feet[..., 0] - _FRONT - 0.02) / 0.02)
        inside = inside * torch.sigmoid((_FRONT + _LENGTH - 0.02 - feet[..., 0]) / 0.02)
        inside = inside * torch.sigmoid((_WIDTH / 2 - 0.02 - feet[..., 1].abs()) / 0.02)
        level = feet[..., 2] - goal.height.to(feet)
        near = torch.sigmoid(level / 0.01) * torch.sigmoid((0.06 - level) / 0.01)
        arrived = torch.exp(-distance2 / 0.15**2)
        joints, rates = state[..., 7:nq], state[..., nq + 6 :]
        return (
            -w.position * distance2
            - w.upright * tilt2
            - w.yaw * yaw.square()
            + w.foot * (inside * near).mean(-1)
            - w.stance * (feet - goal.feet.to(feet)).square().sum(-1).mean(-1)
            - w.speed * arrived * state[..., nq : nq + 3].square().sum(-1)
            - w.rate * rates.square().mean(-1)
            - w.impact * (self._depth(feet, goal) - 0.01).clamp_min(0)
            - w.posture * arrived * (joints - self._home.to(joints)).square().mean(-1)
        )

    def _depth(self, feet: Tensor, goal: Goal) -> Tensor:
        """Depth [m] of the deepest foot (..., feet, 3) inside the ground or the deck, shape (...,)."""
        half = feet.new_tensor([_LENGTH / 2, _WIDTH / 2, 0.5])
        centre = torch.stack(
            [
                feet.new_tensor(_FRONT + _LENGTH / 2),
                feet.new_tensor(0.0),
                goal.height.to(feet) - 0.5,
            ]
        )
        deck, _ = box_distance(feet - centre, half, feet.new_tensor(0.0))
        return self._foot_radius - torch.minimum(deck, feet[..., 2]).amin(-1)

    def on_deck(self, state: Tensor) -> Tensor:
        """Feet above the deck and inside its footprint, shape (..., feet), bool."""
        feet = self.points_world(state)[..., :-1, :]
        x, y, z = feet.unbind(-1)
        return (
            (z > self.height) & (x > _FRONT - _EDGE) & (x < _FRONT + _LENGTH + _EDGE) & (y.abs() < _WIDTH / 2 + _EDGE)
        )

    def standing_on_deck(self, state: Tensor) -> Tensor:
        """The success condition at one instant, shape (...,), bool."""
        up = quat_to_matrix(state[..., 3:7])[..., 2, 2]
        high = state[..., 2] > self.height + 0.15
        return self.on_deck(state).all(-1) & high & (up > 0.8) & torch.isfinite(state).all(-1)


GO2_RANGE = torch.tensor([[-0.25, 0.25], [-1.0, 1.4], [-2.7, -1.0]] * 2 + [[-0.25, 0.25], [0.0, 1.8], [-2.7, -1.0]] * 2)
"""Joint targets [rad] of Go2's plans: abduction, thigh, knee of FR, FL, RR, RL (DIAL-MPC's ranges)."""


class ClimbJudge:
    """Watches an executed episode, one state per decision, and says how it ended.

    Success: 25 consecutive decisions (0.5 s) within 3 s in which all four foot centres are above the deck and
    inside its footprint (+2 cm), the base is 0.15 m above it, up·z > 0.8 and the state is finite.

    Attributes:
        outcome: None while the episode goes on.
        decisions: Decisions seen.
        held: Present run of decisions that satisfy the condition.
        time_to_top: First decision of the successful run, in decisions; None without success.
        max_feet: Most feet on the deck at once.
    """

    def __init__(self, task: PlatformTask) -> None:
        self.task = task
        self.outcome: Outcome | None = None
        self.decisions = self.held = self.max_feet = 0
        self.longest_hold = 0
        self.time_to_top: int | None = None

    def update(self, state: Tensor, penetration: float = 0.0) -> Outcome | None:
        """Take the state after one more decision.

        Args:
            state: Executed state, shape (nq + nv,).
            penetration: Deepest contact of the executed state [m].
        """
        self.decisions += 1
        if not bool(torch.isfinite(state).all()):
            self.outcome = Outcome.NON_FINITE
            return self.outcome
        feet = int(self.task.on_deck(state).sum())
        self.max_feet = max(self.max_feet, feet)
        self.held = self.held + 1 if bool(self.task.standing_on_deck(state)) else 0
        self.longest_hold = max(self.longest_hold, self.held)
        up = float(quat_to_matrix(state[3:7])[2, 2])
        if penetration > 0.03:
            self.outcome = Outcome.PENETRATION
        elif up < 0:
            self.outcome = Outcome.FELL
        elif self.held >= self.task.hold_decisions:
            self.outcome = Outcome.CLIMBED
            self.time_to_top = self.decisions - self.held + 1
        elif self.decisions >= self.task.max_decisions:
            self.outcome = Outcome.OFF_DECK if self.max_feet == 4 else Outcome.TIMEOUT
        return self.outcome
