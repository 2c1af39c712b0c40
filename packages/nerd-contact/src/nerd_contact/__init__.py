"""Contact sets for neural robot dynamics: kinematics, primitive collider and set encoder in torch."""

from .collider import PrimitiveCollider, Probe
from .contacts import ContactSet, Counterpart
from .encoder import ContactEncoderConfig, ContactSetEncoder
from .fixed import FixedContactConfig, FixedContactFeatures
from .kinematics import BodyMotion, Kinematics

__all__ = [
    "BodyMotion",
    "ContactEncoderConfig",
    "ContactSet",
    "ContactSetEncoder",
    "Counterpart",
    "FixedContactConfig",
    "FixedContactFeatures",
    "Kinematics",
    "PrimitiveCollider",
    "Probe",
]
