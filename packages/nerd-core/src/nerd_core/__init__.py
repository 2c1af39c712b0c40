"""Streaming neural robot dynamics: model, training, rollout and evaluation."""

from .codec import StateCodec
from .dataset import TrajectoryDataset, TrajectoryWriter
from .model import FlashNerd, FlashNerdConfig, KVCache
from .normalizer import Normalizer
from .robot import Body, Joint, RobotSpec
from .rollout import Observe, StreamingStep, prefill, rollout

__all__ = [
    "Body",
    "FlashNerd",
    "FlashNerdConfig",
    "Joint",
    "KVCache",
    "Normalizer",
    "Observe",
    "RobotSpec",
    "StateCodec",
    "StreamingStep",
    "TrajectoryDataset",
    "TrajectoryWriter",
    "prefill",
    "rollout",
]
