"""Sizes and training settings that go together, for robots like CartPole: a few joints, no surroundings.

docs/training.md says what each of them reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from .baseline import NerdBaselineConfig
from .model import FlashNerdConfig
from .train import TrainConfig

__all__ = ["FULL", "SMALL", "TINY", "Architecture", "Preset", "PresetName", "preset"]

Architecture = Literal["flash-nerd", "nerd-baseline"]
PresetName = Literal["tiny", "small", "full"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes of either network and the settings they are trained with.

    Attributes:
        model: Sizes of FlashNerd.
        baseline: Sizes of NerdBaseline.
        train: Settings for FlashNerd.
        baseline_batch: Windows per update of NerdBaseline.
    """

    model: FlashNerdConfig = field(default_factory=FlashNerdConfig)
    baseline: NerdBaselineConfig = field(default_factory=NerdBaselineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    baseline_batch: int = 256

    def settings(self, architecture: Architecture) -> TrainConfig:
        """Settings for one of the networks.

        The baseline's differ in the window, which is its own, in the batch, which gives it at least as many frames
        per update, and in the recursive phase, which NeRD does not have.
        """
        if architecture == "flash-nerd":
            return self.train
        return replace(self.train, window=self.baseline.window, batch_size=self.baseline_batch, recursive_steps=0)


TINY = Preset(
    model=FlashNerdConfig(width=32, heads=2, spans=(3, 3), hidden=64, readout_hidden=64),
    baseline=NerdBaselineConfig(width=96, heads=6, layers=4),
    train=TrainConfig(
        steps=300,
        batch_size=64,
        window=16,
        lr=3e-3,
        warmup=30,
        ema=0.99,
        eval_every=100,
        checkpoint_every=100,
        eval_horizons=(1, 15, 100),
        eval_trajectories=128,
    ),
    baseline_batch=128,
)
"""Seconds to a minute on one core: shows that everything works, proves nothing about accuracy."""

SMALL = Preset(train=TrainConfig(eval_horizons=(1, 15, 100)))
"""Minutes on two cores: the defaults."""

FULL = Preset(
    model=FlashNerdConfig(spans=(4, 4, 4)),
    train=TrainConfig(
        steps=100_000,
        batch_size=256,
        warmup=1000,
        ema=0.9995,
        eval_every=2500,
        checkpoint_every=1000,
        eval_horizons=(1, 15, 100, 200),
        recursive_steps=10_000,
        recursive_horizon=16,
        recursive_batch=256,
    ),
    baseline_batch=1024,
)
"""Hours on a GPU: a receptive field of ten frames, as NeRD has, and a recursive phase."""


def preset(name: PresetName | None) -> Preset:
    """The preset of that name; every default for None."""
    return {"tiny": TINY, "small": SMALL, "full": FULL, None: Preset()}[name]
