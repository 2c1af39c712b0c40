"""Set encoder: any number of contact rows to a fixed number of slots and a count."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nerd_core import RobotSpec

from .collider import PrimitiveCollider, Probe
from .contacts import ContactSet, cleared

__all__ = ["ContactEncoderConfig", "ContactSetEncoder", "from_config"]


@dataclass(frozen=True, kw_only=True)
class ContactEncoderConfig:
    """Sizes of a :class:`ContactSetEncoder`.

    Attributes:
        num_slots: Slots M.
        slot_width: Width of each slot.
        hidden: Width of the row network.
        margin: Largest gap of a row [m].
        max_rows: Rows K that are kept, the deepest first.
        pooling: ``gated`` sums (extensive, as forces are) or ``softmax`` averages.
        field_cells: Cells of a height field searched round each probe (:class:`PrimitiveCollider`).
    """

    num_slots: int = 8
    slot_width: int = 16
    hidden: int = 32
    margin: float = 0.08
    max_rows: int = 16
    pooling: str = "gated"
    field_cells: int = 4

    def __post_init__(self) -> None:
        if self.pooling not in ("gated", "softmax"):
            raise ValueError(f"pooling is {self.pooling!r}, expected 'gated' or 'softmax'")
        for name in ("num_slots", "slot_width", "hidden", "max_rows", "field_cells"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")


class ContactSetEncoder(nn.Module):
    """Pools contact rows into M slots; permutation and padding change nothing.

    ::

        h_i = φ(r_i, link_i, kind_i)                       shared row network
        w_i = mask_i · clamp(1 - gap_i / margin, 0, 1)      rows fade in, the set never jumps
        slot_m = Σ_i w_i σ(g_m(h_i)) W_v h_i                (gated), or softmax over i of g_m(h_i) + log w_i
        out = [slot_1 … slot_M, log(1 + Σ mask)]

    Source: FlashNeRD Fig. 1a (shared row encoder, learned pooling into M slots, a count). Chosen here: the gated
    sum; closing speed n·v and the gap one model step ahead as row features; fixed physical scales of the
    features, so that the encoder needs no fitted statistics; fading with the gap.
    """

    kind = "contact-set"

    def __init__(self, config: ContactEncoderConfig, robot: RobotSpec, probes: tuple[Probe, ...]) -> None:
        super().__init__()
        self.config, self.dt, self.probes = config, robot.dt, probes
        self.collider = PrimitiveCollider(
            robot, probes, margin=config.margin, max_rows=config.max_rows, field_cells=config.field_cells
        )
        self.out_size = config.num_slots * config.slot_width + 1
        self.row_in = nn.Linear(14, config.hidden)
        self.link = nn.Embedding(len(robot.bodies), config.hidden)
        self.counterpart = nn.Embedding(3, config.hidden)
        self.row_hidden = nn.Linear(config.hidden, config.hidden)
        self.gate = nn.Linear(config.hidden, config.num_slots)
        self.value = nn.Linear(config.hidden, config.slot_width)

    def observe(self, state: Tensor, scene: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Context of states (B, ..., nq + nv) in scenes of leading size B: the fields of a ContactSet."""
        return self.collider(state, scene)._asdict()

    def _features(self, rows: ContactSet) -> Tensor:
        closing = (rows.normal * rows.velocity).sum(-1, keepdim=True)
        gap = rows.gap[..., None]
        ahead = gap + self.dt * closing
        return torch.cat(
            [
                rows.point * 3,
                rows.normal,
                gap / self.config.margin,
                torch.tanh(gap / 0.01),
                torch.tanh(ahead / 0.02),
                (rows.velocity / 2).clamp(-5, 5),
                (closing / 2).clamp(-5, 5),
                rows.friction[..., None],
            ],
            -1,
        )

    def forward(self, context: Mapping[str, Tensor]) -> Tensor:
        """Features, shape (..., M · slot_width + 1), of the fields of a ContactSet, shapes (..., K, ...)."""
        # Padding may hold anything, NaN too: clear it before anything is computed from it.
        rows = cleared(ContactSet(**context))
        h = F.silu(self.row_in(self._features(rows)) + self.link(rows.link) + self.counterpart(rows.kind))
        h = F.silu(self.row_hidden(h))
        fade = (1 - rows.gap / self.config.margin).clamp(0, 1) * rows.mask
        logit, value = self.gate(h), self.value(h)
        if self.config.pooling == "gated":
            weight = torch.sigmoid(logit) * fade[..., None]
        else:
            score = logit + fade.clamp_min(1e-12).log()[..., None]
            weight = score.softmax(-2) * rows.mask.any(-1)[..., None, None]
        slots = weight.transpose(-1, -2) @ value
        count = torch.log1p(rows.mask.sum(-1, keepdim=True).to(slots.dtype))
        return torch.cat([slots.flatten(-2), count], -1)

    def config_json(self) -> dict[str, Any]:
        """What :func:`from_config` needs to build this encoder again, as plain JSON values."""
        config = asdict(self.config)
        if self.config.field_cells == ContactEncoderConfig.field_cells:
            del config["field_cells"]  # manifests older than the field stay what they were
        return {**config, "probes": [p.to_json() for p in self.probes]}


def probes_from_json(values: list[dict[str, Any]]) -> tuple[Probe, ...]:
    """Probes of a manifest; ValueError where a field is missing or unknown."""
    try:
        return tuple(Probe(**{**v, "pos": tuple(v["pos"])}) for v in values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"probes of the context encoder are not readable: {error}") from None


def from_config(config: dict[str, Any], robot: RobotSpec) -> ContactSetEncoder:
    """Encoder from a manifest's ``context.config``."""
    rest = {k: v for k, v in config.items() if k != "probes"}
    try:
        sizes = ContactEncoderConfig(**rest)
    except TypeError as error:
        raise ValueError(f"context config is not readable: {error}") from None
    return ContactSetEncoder(sizes, robot, probes_from_json(config.get("probes", [])))
