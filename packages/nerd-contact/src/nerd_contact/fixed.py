"""Fixed contact points: the predecessor's way to see contacts, kept as an honest baseline."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nerd_core import RobotSpec

from .collider import PrimitiveCollider, Probe
from .encoder import probes_from_json

__all__ = ["FixedContactConfig", "FixedContactFeatures", "from_config"]


@dataclass(frozen=True, kw_only=True)
class FixedContactConfig:
    """Which surfaces the predefined points see.

    Attributes:
        surfaces: ``ground``, the plane alone (NeRD), or ``any``, the deepest of plane, boxes and height field.
        margin: A point farther than this from its surface reads as zero [m]; 0.12 in NeRD.
        field_cells: With ``any``, cells of a height field searched round each point (:class:`PrimitiveCollider`).
    """

    surfaces: str = "ground"
    margin: float = 0.12
    field_cells: int = 4

    def __post_init__(self) -> None:
        if self.surfaces not in ("ground", "any"):
            raise ValueError(f"surfaces is {self.surfaces!r}, expected 'ground' or 'any'")


class FixedContactFeatures(nn.Module):
    """One slot per predefined point: normal, point, gap and velocity, zero while the point is far.

    Source: NeRD Sec. 3 and its released configurations: a list of points fixed once, against the ground plane.
    Chosen here: the velocity and the point's gap less its radius, so that the baseline reads all that a row of
    a ContactSet holds; only the set is missing.
    """

    kind = "fixed-contact"

    def __init__(self, config: FixedContactConfig, robot: RobotSpec, probes: tuple[Probe, ...]) -> None:
        super().__init__()
        self.config, self.probes, self.dt = config, probes, robot.dt
        self.collider = PrimitiveCollider(
            robot,
            probes,
            margin=config.margin,
            ground_only=config.surfaces == "ground",
            merge=True,
            field_cells=config.field_cells,
        )
        self.out_size = 13 * len(probes)

    def observe(self, state: Tensor, scene: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Context of states (B, ..., nq + nv): one row per point, in the order of the points."""
        return self.collider(state, scene)._asdict()

    def forward(self, context: Mapping[str, Tensor]) -> Tensor:
        """Features, shape (..., 13 · points)."""
        # Cleared before anything is computed from them: the derivative of a NaN is NaN, and 0 · NaN is NaN.
        mask = context["mask"][..., None]
        point, normal, velocity = (torch.where(mask, context[k], 0.0) for k in ("point", "normal", "velocity"))
        gap = torch.where(mask, context["gap"][..., None], 0.0)
        closing = (normal * velocity).sum(-1, keepdim=True)
        feature = torch.cat(
            [
                point * 3,
                normal,
                gap / self.config.margin,
                torch.tanh(gap / 0.01),
                torch.tanh((gap + self.dt * closing) / 0.02),
                (velocity / 2).clamp(-5, 5),
                (closing / 2).clamp(-5, 5),
            ],
            -1,
        )
        return feature.flatten(-2)

    def config_json(self) -> dict[str, Any]:
        """What :func:`from_config` needs to build these features again, as plain JSON values."""
        config = asdict(self.config)
        if self.config.field_cells == FixedContactConfig.field_cells:
            del config["field_cells"]  # manifests older than the field stay what they were
        return {**config, "probes": [p.to_json() for p in self.probes]}


def from_config(config: dict[str, Any], robot: RobotSpec) -> FixedContactFeatures:
    """Features from a manifest's ``context.config``."""
    rest = {k: v for k, v in config.items() if k != "probes"}
    try:
        settings = FixedContactConfig(**rest)
    except TypeError as error:
        raise ValueError(f"context config is not readable: {error}") from None
    return FixedContactFeatures(settings, robot, probes_from_json(config.get("probes", [])))
