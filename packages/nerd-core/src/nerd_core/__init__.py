"""Streaming neural robot dynamics: model, training, rollout and evaluation."""

from .artifact import load_model, save_model
from .baseline import NerdBaseline, NerdBaselineConfig
from .codec import StateCodec
from .dataset import TrajectoryDataset, TrajectoryWriter
from .evaluate import evaluate
from .model import FlashNerd, FlashNerdConfig, KVCache
from .normalizer import Normalizer
from .robot import Body, Joint, RobotSpec
from .rollout import Observe, StreamingStep, prefill, rollout
from .streaming import compile_streaming
from .train import TrainConfig, train

__all__ = [
    "Body",
    "FlashNerd",
    "FlashNerdConfig",
    "Joint",
    "KVCache",
    "NerdBaseline",
    "NerdBaselineConfig",
    "Normalizer",
    "Observe",
    "RobotSpec",
    "StateCodec",
    "StreamingStep",
    "TrainConfig",
    "TrajectoryDataset",
    "TrajectoryWriter",
    "compile_streaming",
    "evaluate",
    "load_model",
    "prefill",
    "rollout",
    "save_model",
    "train",
]
