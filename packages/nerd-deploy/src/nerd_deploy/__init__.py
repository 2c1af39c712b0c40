"""Export neural robot dynamics to ONNX, verify the export, serve it without torch.

Serving needs numpy and onnxruntime; ``export_artifact``, ``export_onnx``, ``verify_onnx`` and
``ServedStep`` need the extra ``export`` and load torch when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .artifact import Artifact, read_artifact
from .backend import open_backend
from .onnx_step import OnnxStep

if TYPE_CHECKING:
    from .export import export_artifact, export_onnx
    from .served_step import ServedStep
    from .verify import verify_onnx

__all__ = [
    "Artifact",
    "OnnxStep",
    "ServedStep",
    "export_artifact",
    "export_onnx",
    "open_backend",
    "read_artifact",
    "verify_onnx",
]

_OF_THE_EXTRA = {
    "ServedStep": ".served_step",
    "export_artifact": ".export",
    "export_onnx": ".export",
    "verify_onnx": ".verify",
}


def __getattr__(name: str) -> Any:
    if name not in _OF_THE_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_OF_THE_EXTRA[name], __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: pip install 'nerd-deploy[export]'"
        ) from None
