"""Sampling-based predictive control inside a learned dynamics model: a quadruped climbs platforms."""

from .cem import CemConfig
from .dial import DialConfig, PlanInfo, PlanState, RolloutDynamics, draw_noise, plan, warm_start
from .dynamics import MjWarpRollout, MujocoRollout, NerdRollout, RolloutModel
from .episode import EpisodeRecord, run_episode, settled_start
from .mppi import MppiConfig
from .platform import TERRAINS, ClimbJudge, Outcome, PlatformTask, RewardWeights
from .predictive_sampling import PredictiveSamplingConfig
from .released import load_climber, released_model
from .spline import ControlSpline

__all__ = [
    "TERRAINS",
    "CemConfig",
    "ClimbJudge",
    "ControlSpline",
    "DialConfig",
    "EpisodeRecord",
    "MjWarpRollout",
    "MppiConfig",
    "MujocoRollout",
    "NerdRollout",
    "Outcome",
    "PlanInfo",
    "PlanState",
    "PlatformTask",
    "PredictiveSamplingConfig",
    "RewardWeights",
    "RolloutDynamics",
    "RolloutModel",
    "draw_noise",
    "load_climber",
    "plan",
    "released_model",
    "run_episode",
    "settled_start",
    "warm_start",
]
