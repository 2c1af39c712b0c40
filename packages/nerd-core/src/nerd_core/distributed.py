"""Processes that train one model together, as torchrun starts them.

Every process holds all data and draws the same random numbers, and works on its own rows of each batch. What the
processes sum (gradients, moments of the data) comes out with the same bits in each, so their weights never part.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Group", "training_group"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """This process among those that train one model; the default is a process alone.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        device: Where the backend wants tensors to lie; None for the CPU.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes the files, shows progress and evaluates."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This process's rows of a batch (B, ...) that all processes drew alike: every size-th one."""
        return batch[self.rank :: self.size]

    def check_divides(self, name: str, rows: int) -> None:
        """ValueError unless each process gets the same number of rows, for the mean of means is the mean only then."""
        if rows % self.size:
            raise ValueError(f"{name}: got {rows}, expected a multiple of the {self.size} processes")

    def total(self, part: Tensor) -> Tensor:
        """Sum of every process's ``part``, in place, with the same bits in each process."""
        if self.size > 1:
            dist.all_reduce(part)
        return part

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor], loss: Tensor) -> Tensor:
        """Replace gradients by their mean over the processes, in one message.

        Args:
            parameters: Trained tensors; those without a gradient have none in any process.
            loss: This process's loss, shape ().

        Returns:
            The mean loss, shape ().
        """
        if self.size == 1:
            return loss.detach()
        gradients = [p.grad for p in parameters if p.grad is not None]
        parts = [*gradients, loss.detach()]
        flat = self.total(torch.cat([part.flatten() for part in parts])) / self.size
        *means, mean_loss = flat.split([part.numel() for part in parts])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        return mean_loss[0]

    def copy_from_leader(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of process 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def check_equal(self, name: str, value: Any) -> None:
        """Wait for all processes and see that each holds the same JSON value.

        Raises:
            ValueError: They differ, for example because each process sees its own disk.
        """
        if self.size == 1:
            return
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
        least = torch.tensor(list(digest), device=self.device)
        most = least.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise ValueError(f"{name}: not the same in all {self.size} processes, expected the same flags and files")

    def wait(self) -> None:
        """Return once every process has come here."""
        self.check_equal("wait", None)


@contextlib.contextmanager
def training_group(device: torch.device) -> Iterator[Group]:
    """The processes that torchrun started this one with, or this one alone.

    A process group that exists already is used and left as it is. Gloo connects processes on CPUs, NCCL those that
    have a GPU each.

    Args:
        device: Where this process trains.
    """
    if dist.is_available() and dist.is_initialized():
        yield Group(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Group(device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # This module's functions have the default group as a default argument. The optimizer imports it: were there a group
    # by then, its threads would outlive destroy_process_group and now and then abort the interpreter as it ends.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()
