"""Contact sets for neural robot dynamics: kinematics, primitive collider and set encoder in torch."""

from .collider import PrimitiveCollider, Probe
from .contacts import ContactSet, Counterpart
from .encoder import ContactEncoderConfig, ContactSetEncoder
from .fixed import FixedContactConfig, FixedContactFeatures
from .heightfield import HeightGrid
from .kinematics import BodyMotion, Kinematics, PointJacobian

__all__ = [
    "BodyMotion",
    "ContactEncoderConfig",
    "ContactSet",
    "ContactSetEncoder",
    "Counterpart",
    "FixedContactConfig",
    "FixedContactFeatures",
    "HeightGrid",
    "Kinematics",
    "PointJacobian",
    "PrimitiveCollider",
    "Probe",
]
