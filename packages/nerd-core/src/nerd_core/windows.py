"""Windows sampled on the fly from trajectories in memory, never across two of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .dataset import Trajectories

__all__ = ["TrajectoryPool", "WindowSampler", "seeded_generator"]


class TrajectoryPool:
    """Frames of several datasets in one flat tensor; a window is index arithmetic and one gather.

    Datasets may differ in trajectory length, not in widths or scene names.

    Attributes:
        states: Every frame of every trajectory, shape (F, nq+nv).
        controls: Every control, shape (G, nu).
        steps: Model steps T of each trajectory, shape (N,).
        scenes: Static surroundings, name to (N, ...).
    """

    def __init__(self, parts: Sequence[Trajectories], device: torch.device) -> None:
        names = set(parts[0].scenes)
        for part in parts:
            if set(part.scenes) != names:
                raise ValueError(f"datasets: scene {sorted(part.scenes)}, expected {sorted(names)} in each")
        self.states = _concatenate([p.states.flatten(0, 1) for p in parts]).to(device)
        self.controls = _concatenate([p.controls.flatten(0, 1) for p in parts]).to(device)
        self.steps = torch.cat([torch.full((len(p.controls),), p.controls.shape[1]) for p in parts])
        self.scenes = {n: _concatenate([p.scenes[n] for p in parts]).to(device) for n in names}
        self._first_control = self.steps.cumsum(0) - self.steps
        self._first_state = self._first_control + torch.arange(len(self.steps))

    @property
    def device(self) -> torch.device:
        """Where the frames lie."""
        return self.states.device

    def windows(self, rows: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Gather windows.

        Args:
            rows: Trajectories, shape (B,), on the CPU.
            offsets: First frame of each window within its trajectory, shape (B,).
            length: Model steps W; ``offsets + W`` must not exceed the trajectory's steps.

        Returns:
            States (B, W+1, nq+nv) and controls (B, W, nu); control t acts from state t to t+1.
        """
        state_index = (self._first_state[rows] + offsets)[:, None] + torch.arange(length + 1)
        control_index = (self._first_control[rows] + offsets)[:, None] + torch.arange(length)
        states = self.states.index_select(0, state_index.flatten().to(self.device))
        controls = self.controls.index_select(0, control_index.flatten().to(self.device))
        return (
            states.view(len(rows), length + 1, self.states.shape[1]),
            controls.view(len(rows), length, self.controls.shape[1]),
        )

    def scene(self, rows: Tensor) -> dict[str, Tensor]:
        """Surroundings of the rows, name to (B, ...)."""
        index = rows.to(self.device)
        return {name: tensor.index_select(0, index) for name, tensor in self.scenes.items()}


class WindowSampler:
    """Draws windows of W steps uniformly from chosen trajectories of a pool.

    Args:
        pool: The frames.
        rows: Trajectories to draw from, shape (M,), int64.
        length: Model steps W per window.

    Raises:
        ValueError: A chosen trajectory is shorter than the window.
    """

    def __init__(self, pool: TrajectoryPool, rows: Tensor, length: int) -> None:
        shortest = int(pool.steps[rows].min())
        if length > shortest:
            raise ValueError(f"window: got {length} steps, but trajectories have {shortest}")
        self.pool, self.rows, self.length = pool, rows, length
        self._ends = (pool.steps[rows] - length + 1).cumsum(0)  # windows up to and with each row

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Trajectories and first frames of ``count`` windows, each (count,), every window alike."""
        number = torch.randint(int(self._ends[-1]), (count,), generator=generator)
        slot = torch.searchsorted(self._ends, number, right=True)
        rows = self.rows[slot]
        before = self._ends[slot] - (self.pool.steps[rows] - self.length + 1)
        return rows, number - before


def seeded_generator(seed: int, *names: int | str) -> torch.Generator:
    """A CPU generator that depends on the seed and the names only, for example (seed, step).

    The names are hashed because torch's CPU generator reads only the low 32 bits of its seed.
    """
    text = ":".join(str(name) for name in (seed, *names))
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    return torch.Generator().manual_seed(value)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
