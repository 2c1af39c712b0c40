"""A strip of pictures of an episode, traced on the CPU: no display, no OpenGL. matplotlib comes with nerd-rl[plot]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nerd_coupling.drawing import picture
from nerd_coupling.robots import Robot

__all__ = ["film_strip"]


def film_strip(robot: Robot, path: Tensor, *, count: int = 8) -> Any:
    """A matplotlib figure with the robot at evenly spaced times, the first and the last included.

    Args:
        robot: The robot.
        path: States of an episode, shape (T + 1, nq + nv).
        count: Pictures; fewer if there are fewer states.

    Raises:
        ValueError: If there is no state, or no picture is asked for.
    """
    if not len(path) or count < 1:
        raise ValueError(f"path has {len(path)} states and count is {count}, expected at least 1 each")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = torch.linspace(0, len(path) - 1, min(count, len(path))).round().long().tolist()
    figure = Figure(figsize=(1.9 * len(chosen), 2.0), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, index in zip(figure.subplots(1, len(chosen), squeeze=False).flat, chosen, strict=True):
        # The camera follows the robot: what moves past is the ground.
        posed = replace(robot, home_qpos=tuple(path[index, : robot.spec.nq].tolist()))
        axes.imshow(picture(posed, width=200, height=180))
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(f"{index * robot.spec.dt:.2f} s", fontsize=8)
        axes.spines[:].set_visible(False)
    return figure
