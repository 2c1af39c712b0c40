"""Export neural robot dynamics to ONNX, verify the export, serve it without torch.

Serving needs numpy and onnxruntime; ``export_onnx`` and ``verify_onnx`` need the extra ``export``
and load torch when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .onnx_step import OnnxStep

if TYPE_CHECKING:
    from .export import export_onnx
    from .verify import verify_onnx

__all__ = ["OnnxStep", "export_onnx", "verify_onnx"]

_OF_THE_EXTRA = {"export_onnx": ".export", "verify_onnx": ".verify"}


def __getattr__(name: str) -> Any:
    if name not in _OF_THE_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_OF_THE_EXTRA[name], __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: pip install 'nerd-deploy[export]'"
        ) from None
