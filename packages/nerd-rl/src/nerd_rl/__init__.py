"""Policies learned with PPO inside a learned dynamics model, or in the engine it was learned from."""

from .cartpole import cartpole_swing_up
from .environment import Environment, Step
from .evaluation import Evaluation, evaluate_policy
from .gym_env import GymEnv
from .physics import EnginePhysics, LearnedPhysics, Physics, TeacherPhysics, open_physics
from .policy import export_policy, load_policy, mean_policy
from .ppo import PpoConfig
from .rsl_env import rsl_env
from .task import Moment, Task
from .training import GapCheck, train_policy

__all__ = [
    "EnginePhysics",
    "Environment",
    "Evaluation",
    "GapCheck",
    "GymEnv",
    "LearnedPhysics",
    "Moment",
    "Physics",
    "PpoConfig",
    "Step",
    "Task",
    "TeacherPhysics",
    "cartpole_swing_up",
    "evaluate_policy",
    "export_policy",
    "load_policy",
    "mean_policy",
    "open_physics",
    "rsl_env",
    "train_policy",
]
