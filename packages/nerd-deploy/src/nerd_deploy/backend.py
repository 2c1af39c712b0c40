"""Backends by name: what computes the steps of an artifact.

All have the face of :class:`~nerd_deploy.onnx_step.OnnxStep`: they own their worlds, and a name
that does not load is an error. :class:`~nerd_deploy.served_step.ServedStep` puts that face behind
``nerd_core``'s ``StreamingStep``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .onnx_step import OnnxStep

__all__ = ["BACKENDS", "Backend", "open_backend"]


class Backend(NamedTuple):
    """A way to compute steps.

    Attributes:
        provider: Execution provider of onnxruntime.
        how: How to get it where it is missing.
    """

    provider: str
    how: str


BACKENDS = {
    "ort-cpu": Backend("CPUExecutionProvider", "pip install onnxruntime"),
    "ort-cuda": Backend(
        "CUDAExecutionProvider",
        "with an NVIDIA GPU: pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'; the two "
        "share one module folder",
    ),
    "ort-tensorrt": Backend(
        "TensorrtExecutionProvider",
        "as ort-cuda, and the TensorRT 10 libraries (libnvinfer.so.10) on the library path",
    ),
}


def open_backend(
    source: str | Path | bytes,
    name: str = "ort-cpu",
    n: int = 1,
    *,
    threads: int = 1,
    spin: bool = False,
) -> OnnxStep:
    """Load an artifact into a backend; never into another one than was asked for.

    Args:
        source: Folder of an artifact, exported file, or the content of one.
        name: One of :data:`BACKENDS`.
        n: Number of worlds.
        threads: CPU threads within and between operators.
        spin: Let waiting threads spin.

    Raises:
        ValueError: An unknown name, a backend that does not load here, or a bad artifact.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}, expected one of {', '.join(BACKENDS)}")
    import onnxruntime as ort

    backend = BACKENDS[name]
    if backend.provider not in (offered := ort.get_available_providers()):
        raise ValueError(
            f"backend is {name!r}, but {backend.provider} does not load here, this onnxruntime offers "
            f"{', '.join(offered)}; {backend.how}"
        )
    return OnnxStep(source, n, provider=backend.provider, threads=threads, spin=spin)
