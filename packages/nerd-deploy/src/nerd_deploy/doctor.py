"""What works on this machine: each library is tried in a process of its own.

Some native libraries take the whole process down where there is no GPU, so none is loaded here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from .backend import BACKENDS

__all__ = ["PROBES", "Probe", "examine"]

TIMEOUT = 120.0  # [s]; a first import of torch on a busy robot takes its time

# In hex, an ONNX model of opset 20 whose one node copies x, float32 of shape (1,), to y.
IDENTITY = (
    "080a3a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801"
    "620f0a0179120a0a08080112040a02080142040a001014"
)


class Probe(NamedTuple):
    """Something to try.

    Attributes:
        name: What it is called.
        code: Python that ends with a call of ``tell(**values)``, or raises.
        how: How to get what is missing.
    """

    name: str
    code: str
    how: str


_TELL = "import json\ndef tell(**values): print('\\n' + json.dumps(values))\n"

_PROVIDER = """
import onnxruntime as ort
name = {provider!r}
offered = ort.get_available_providers()
if name not in offered:
    raise SystemExit(f"{{name}} is not in this onnxruntime {{ort.__version__}}, which offers {{', '.join(offered)}}")
import numpy as np
options = ort.SessionOptions()
options.log_severity_level = 4
session = ort.InferenceSession(bytes.fromhex({model!r}), options, providers=[name])
if session.get_providers()[0] != name:
    raise SystemExit(f"{{name}} did not load, onnxruntime fell back to {{session.get_providers()[0]}}")
one = session.run(None, {{"x": np.ones(1, np.float32)}})[0]
assert one.tolist() == [1.0]
tell(version=ort.__version__)
"""

# TensorRT's own objects are not touched before a CUDA device is known to exist: without one they crash.
_TENSORRT = """
import ctypes
import {module} as trt
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit(f"{module} {{trt.__version__}} is installed, but there is no NVIDIA driver (libcuda.so.1)")
if cuda.cuInit(0) != 0:
    raise SystemExit(f"{module} {{trt.__version__}} is installed, but the driver finds no GPU")
tell(version=trt.__version__)
"""

_TORCH_CUDA = """
import torch
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} finds no GPU")
tell(version=torch.__version__, device=torch.cuda.get_device_name())
"""

PROBES = (
    *(
        Probe(name, _PROVIDER.format(provider=backend.provider, model=IDENTITY), backend.how)
        for name, backend in BACKENDS.items()
    ),
    Probe("torch", "import torch; tell(version=torch.__version__)", "pip install 'nerd-deploy[export]'"),
    Probe("torch-cuda", _TORCH_CUDA, "an NVIDIA GPU with its driver, and a build of torch for CUDA"),
    Probe(
        "tensorrt",
        _TENSORRT.format(module="tensorrt"),
        "an NVIDIA GPU with its driver; pip install tensorrt-cu13, which fetches its libraries from NVIDIA's own index",
    ),
    Probe(
        "tensorrt-rtx",
        _TENSORRT.format(module="tensorrt_rtx"),
        "a GeForce RTX GPU with its driver; pip install tensorrt-rtx-cu13",
    ),
    Probe(
        "export",
        "import onnx, onnxscript, nerd_contact; tell(version=onnx.__version__, onnxscript=onnxscript.__version__)",
        "pip install 'nerd-deploy[export]'",
    ),
)


def examine(probes: Sequence[Probe] = PROBES, *, timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """Try each probe in a child process.

    Args:
        probes: What to try.
        timeout: Seconds that each may take.

    Returns:
        Per probe ``name``, ``works``, ``version`` and what else it told, or ``missing`` (why it does
        not work) and ``how`` to get it.
    """
    return [_try(probe, timeout) for probe in probes]


def _try(probe: Probe, timeout: float) -> dict[str, Any]:
    command = [sys.executable, "-c", _TELL + probe.code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        return _absent(probe, f"no answer within {timeout:g} s")
    if done.returncode < 0:
        return _absent(probe, f"crashes here ({signal.Signals(-done.returncode).name})")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return _absent(probe, said[-1].strip() if said else f"exit code {done.returncode}")
    return {"name": probe.name, "works": True, **json.loads(done.stdout.splitlines()[-1])}


def _absent(probe: Probe, why: str) -> dict[str, Any]:
    return {"name": probe.name, "works": False, "missing": why, "how": probe.how}
