"""Fixed sequences of Warp kernel launches on torch's device and stream, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import warp as wp

from .warp_worlds import _quiet

__all__ = ["Launches", "on_device"]


class Launches:
    """Kernel launches that are the same every time: run plainly once, then captured and replayed as a graph.

    The first run loads the kernels, which a capture cannot do. On a CPU, too, most of the time of a small launch is
    spent on preparing it, and a replay spares that.

    Args:
        run: Launches the kernels; it may neither read results nor depend on anything but device memory.
        use_graph: Whether to capture; otherwise every call runs plainly.
    """

    def __init__(self, run: Callable[[], None], *, use_graph: bool) -> None:
        self._run, self._use_graph = run, use_graph
        self._loaded = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Launch; the caller is inside ``on_device``."""
        if not (self._use_graph and self._loaded):
            self._run()
            self._loaded = True
            return
        if self._graph is None:
            self._graph = self._capture()
        wp.capture_launch(self._graph)

    def _capture(self) -> Any:
        device = wp.get_device()
        # CUDA refuses to capture torch's default stream; nothing runs during a capture, so any other will do.
        side = wp.ScopedStream(wp.Stream(device)) if device.is_cuda else nullcontext()
        with side, wp.ScopedCapture() as capture:
            self._run()
        return capture.graph


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Warp on this device and, on CUDA, on torch's own stream, so that both agree on order."""
    with _quiet(), wp.ScopedDevice(str(device)):
        stream = (
            wp.ScopedStream(wp.stream_from_torch(torch.cuda.current_stream(device)))
            if device.type == "cuda"
            else nullcontext()
        )
        with stream:
            yield
