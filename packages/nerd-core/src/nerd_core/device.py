"""The processor that training runs on: which one, how many threads, which precision."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["cores", "processor", "select_device", "threads", "uses_bfloat16"]


def select_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu`` or ``cuda`` means here; ValueError if there is none.

    Under torchrun each process takes the GPU of its own number.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: got {name!r}, expected 'auto', 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: got {name!r}, but torch sees no CUDA device")
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether to autocast: asked for, or ``auto`` on hardware that multiplies bfloat16 natively."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private, so asked for softly
    able = getattr(torch.cpu, "get_capabilities", dict)()  # newer, and knows Arm's bf16
    return any(getattr(torch.cpu, name, bool)() for name in names) or bool(able.get("bf16"))


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with so many CPU threads of torch, None for as many as now; the caller's number comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "unknown")
