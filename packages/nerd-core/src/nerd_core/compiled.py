"""Ahead-of-time compilation of a step on the CPU, kept on disk between runs.

torch.compile would compile again in every process; a package of AOTInductor is compiled once per model, batch size and
machine and then loads in a moment. Nothing here changes what is computed.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["FlatStep", "cache_folder", "can_compile", "compile_step", "flat_step"]


def can_compile() -> bool:
    """Whether this machine has the C++ compiler that ahead-of-time compilation needs."""
    return sys.platform == "linux" and any(shutil.which(c) for c in ("g++", "clang++", "c++"))


def cache_folder() -> Path:
    """Where compiled steps are kept: $NERD_CACHE, or nerd/ in the user's cache folder."""
    root = os.environ.get("NERD_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nerd"


FlatStep = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""A step on the leaves of its inputs, which gives the leaves of its outputs: what a hot loop wants to call."""


def flat_step(step: nn.Module, example: tuple[Any, ...]) -> FlatStep:
    """``step`` on flat lists of tensors.

    Args:
        step: A module whose forward depends on its inputs and weights only.
        example: Inputs, nested tuples and dicts of tensors; gives the structure.
    """
    module = _Flat(step, pytree.tree_structure(example))
    return lambda leaves: list(module(*leaves))


def compile_step(step: nn.Module, example: tuple[Any, ...], *, threads: int) -> FlatStep:
    """A compiled form of :func:`flat_step` for inputs shaped like ``example``.

    Args:
        step: A module whose forward depends on its inputs and weights only; it may overwrite its inputs.
        example: Inputs, nested tuples and dicts of tensors. Shapes and strides become fixed; where an input is
            overwritten, no two share memory.
        threads: OpenMP threads of the generated loops; library products use torch's own number.
    """
    leaves, shape = pytree.tree_flatten(example)
    with torch.no_grad():
        program = torch.export.export(_Flat(step, shape), tuple(leaves), strict=False)
    path = cache_folder() / f"step-{_fingerprint(program, leaves, threads)}.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and renamed: a killed build leaves no half package behind.
        partial = path.with_name(f"{path.stem}-{os.getpid()}.pt2")
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(partial),
            inductor_configs={"freezing": True, "cpp.threads": threads},
        )
        os.replace(partial, path)
    # The loader's own entry, without the wrapper that sorts nested inputs at every call.
    return torch._inductor.aoti_load_package(str(path)).loader.boxed_run


class _Flat(nn.Module):
    """A step on flat lists of tensors: packages cannot hold the project's own named tuples."""

    def __init__(self, step: nn.Module, shape: pytree.TreeSpec) -> None:
        super().__init__()
        self.step, self._shape = step, shape

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(pytree.tree_leaves(self.step(*pytree.tree_unflatten(leaves, self._shape))))


def _fingerprint(program: torch.export.ExportedProgram, leaves: list[torch.Tensor], threads: int) -> str:
    """Digest of everything that the compiled code depends on: graph, weights, layout, torch and processor."""
    digest = hashlib.sha256()
    digest.update(program.graph_module.print_readable(print_output=False).encode())
    tensors = {**program.state_dict, **program.constants}
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            digest.update(name.encode())
            digest.update(ctypes.string_at(value.data_ptr(), value.nbytes))
    digest.update(str([(leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves]).encode())
    digest.update(f"{threads} threads, frozen".encode())
    digest.update(torch.__version__.encode())
    digest.update(torch.__config__.show().encode())
    digest.update(f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}".encode())
    return digest.hexdigest()[:24]
