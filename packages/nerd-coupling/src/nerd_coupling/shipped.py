"""The robots that ship with this package, and what their MJCF files do not say."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SHIPPED", "Shipped"]


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """What the MJCF file of a shipped robot does not say.

    Attributes:
        file: MJCF file.
        substeps: Physics steps per model step.
        control: Kind of control.
        feet: Foot geoms and sites.
        spacing: Largest distance between neighbouring probes on a capsule [m].
        margin: Largest gap of a contact row [m]; None for the encoder's own.
        fixed_points: Probes that make NeRD's fixed list.
        objects: MJCF files of the free objects that it handles.
    """

    file: str
    substeps: int
    control: Literal["effort", "position"] = "effort"
    feet: tuple[str, ...] = ()
    spacing: float = 0.07
    margin: float | None = None
    fixed_points: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()


_ANT_LEGS = ("front_left", "back_left", "back_right", "front_right")
_SIDES = ("left", "right")
SHIPPED = {
    "ant": Shipped(
        file="ant.xml",
        substeps=16,
        feet=tuple(f"{leg}_foot" for leg in _ANT_LEGS),
        spacing=0.15,
        # NeRD's max(4 · radius, 0.12 m) of the legs.
        margin=0.32,
        # Torso and both ends of every capsule: NeRD's 25 points.
        fixed_points=(
            "torso",
            *(
                f"{leg}_{part}_{end}"
                for leg in _ANT_LEGS
                for part, last in (("hip", 2), ("leg", 2), ("foot", 4))
                for end in (0, last)
            ),
        ),
    ),
    "anymal-c": Shipped(
        file="anymal_c.xml",
        substeps=4,
        control="position",
        feet=("LF_foot", "RF_foot", "LH_foot", "RH_foot"),
    ),
    "cartpole": Shipped(file="cartpole.xml", substeps=5),
    "double-pendulum": Shipped(
        file="double_pendulum.xml",
        substeps=5,
        # Against a plane the ends of a capsule say everything; the others serve edges.
        spacing=0.375,
        # NeRD's max(4 · radius, 0.12 m).
        margin=0.4,
        fixed_points=("link1_0", "link1_4", "link2_0", "link2_4"),
    ),
    # Its eight corners, as in NeRD; in reach as NeRD's 0.12 m.
    "cube": Shipped(file="cube.xml", substeps=20, margin=0.12, fixed_points=tuple(f"cube_{i}" for i in range(8))),
    "franka": Shipped(file="franka.xml", substeps=9),
    "g1": Shipped(
        file="g1.xml",
        substeps=4,
        control="position",
        feet=tuple(f"{side}_foot_{i}" for side in _SIDES for i in range(4)),
    ),
    "go2": Shipped(file="go2.xml", substeps=4, control="position", feet=("FR_foot", "FL_foot", "RR_foot", "RL_foot")),
    "leap-cube": Shipped(file="leap_hand.xml", substeps=4, control="position", objects=("leap_cube.xml",)),
    "microduck": Shipped(
        file="microduck.xml",
        substeps=4,
        control="position",
        feet=tuple(f"{side}_foot_{i}" for side in _SIDES for i in range(4)),
        spacing=0.02,
    ),
}
