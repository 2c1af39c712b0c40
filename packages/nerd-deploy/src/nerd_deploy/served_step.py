"""An artifact as a ``StreamingStep``: it goes wherever a model of nerd-core goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nerd_core import RobotSpec

from .backend import open_backend
from .onnx_step import OnnxStep

__all__ = ["ServedCache", "ServedStep"]


class ServedCache:
    """History of n worlds, kept in buffers of a backend.

    As with the fast steps of nerd-core, :meth:`ServedStep.step` overwrites the cache that it is
    given and returns it; ``reset`` and ``expand`` give new ones and leave this one as it was.

    Args:
        worlds: The backend with its n worlds; owned from now on.
    """

    def __init__(self, worlds: OnnxStep) -> None:
        self.worlds = worlds

    def reset(self, mask: Tensor) -> ServedCache:
        """The history without the rows where ``mask``, shape (n,), is true."""
        other = self.worlds.copy()
        other.reset(mask.cpu().numpy())
        return ServedCache(other)

    def expand(self, n: int) -> ServedCache:
        """Fork a history of one row into ``n`` rows."""
        return ServedCache(self.worlds.fork(n))


class ServedStep:
    """An artifact as a streaming step of nerd-core, computed by a backend.

    Tensors may lie on any device; what the CPU backends read is copied there and back.

    Args:
        source: Folder of an artifact, exported file, or the content of one.
        robot: If given, the artifact must have been made for exactly this robot.
        backend: Name of a backend; see :mod:`nerd_deploy.backend`.
        threads: CPU threads within and between operators.
        spin: Let waiting threads spin.

    Attributes:
        robot: The robot.

    Raises:
        ValueError: A bad artifact, another robot (every difference is listed), or a backend that
            does not load here.
    """

    def __init__(
        self,
        source: str | Path | bytes,
        *,
        robot: RobotSpec | None = None,
        backend: str = "ort-cpu",
        threads: int = 1,
        spin: bool = False,
    ) -> None:
        self._step = open_backend(source, backend, threads=threads, spin=spin)
        self.robot = RobotSpec.from_json(self._step.manifest["robot"])
        if robot is not None and (gaps := self.robot.differences(robot)):
            where = "source" if isinstance(source, bytes) else source
            raise ValueError(f"{where}: made for another robot: {'; '.join(gaps)}")

    def init_cache(self, n: int) -> ServedCache:
        """Empty history for ``n`` worlds."""
        return ServedCache(self._step.fresh(n))

    def step(
        self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None, cache: ServedCache
    ) -> tuple[Tensor, ServedCache]:
        """Increment of one model step, shape (B, 2·nv), and the cache, overwritten in place.

        Args:
            state: States, shape (B, nq + nv), float32.
            control: Controls held over the step, shape (B, nu), float32.
            context: Contact rows by name, shapes (B, K, ...); None for models that see none.
            cache: History of the B worlds.

        Raises:
            ValueError: A name is missing, or a shape or dtype is not the artifact's.
        """
        rows = {name: value.detach().cpu().numpy() for name, value in (context or {}).items()}
        cache.worlds.advance(state.detach().cpu().numpy(), control.detach().cpu().numpy(), rows)
        return torch.from_numpy(cache.worlds.delta).to(state.device), cache
