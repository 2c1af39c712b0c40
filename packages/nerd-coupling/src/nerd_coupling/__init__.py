"""Robots, batched MuJoCo and MuJoCo Warp worlds, and recorders for neural robot dynamics."""

from .coupled import CoupledWorlds
from .engine_free_motion import EngineFreeMotion
from .free_motion import FreeMotionConvention, free_accelerations, free_motion_convention
from .random_efforts import RandomEfforts
from .recording import Batch, Proposal, RandomTargets, engine_identity, record
from .robots import Robot, build_model, load_robot, robot_names, set_terrain
from .terrain import Box, Terrain, scene
from .warp_worlds import MjWarpWorlds
from .worlds import MujocoWorlds

__all__ = [
    "Batch",
    "Box",
    "CoupledWorlds",
    "EngineFreeMotion",
    "FreeMotionConvention",
    "MjWarpWorlds",
    "MujocoWorlds",
    "Proposal",
    "RandomEfforts",
    "RandomTargets",
    "Robot",
    "Terrain",
    "build_model",
    "engine_identity",
    "free_accelerations",
    "free_motion_convention",
    "load_robot",
    "record",
    "robot_names",
    "scene",
    "set_terrain",
]
