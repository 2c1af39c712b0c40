"""The released model inside the wheel, and loading any model for a climb."""

from importlib import resources
from pathlib import Path
from typing import Any

from nerd_core import FlashNerd, RobotSpec
from nerd_core.artifact import load_model

__all__ = ["load_climber", "released_model"]


def released_model() -> Path:
    """Folder of the released model: Go2, contacts anywhere, 20 ms."""
    return Path(str(resources.files("nerd_mpc") / "models" / "go2-climb"))


def load_climber(path: Path, robot: RobotSpec) -> tuple[FlashNerd, dict[str, Any]]:
    """A model that can plan a climb, and its manifest.

    Raises:
        ValueError: No model there, a damaged one, one of another robot, gains or time step, or one that cannot see
            its surroundings.
    """
    model, manifest = load_model(path, robot=robot)
    if not isinstance(model, FlashNerd):
        raise ValueError(f"model: {path} is a {manifest['architecture']}, expected a flash-nerd")
    if model.context_encoder is None or not hasattr(model.context_encoder, "observe"):
        raise ValueError(f"model: {path} has no context encoder, expected one that sees contacts")
    return model, manifest
