"""Serve an exported file: numpy in, numpy out, no torch.

An :class:`OnnxStep` advances n worlds one model step at a time and keeps their histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .artifact import model_bytes
from .manifest import read_manifest

__all__ = ["OnnxStep"]

_ORT_TYPES = {
    "float32": "tensor(float)",
    "float64": "tensor(double)",
    "int64": "tensor(int64)",
    "bool": "tensor(bool)",
}
_OWN = ("state", "control", "valid", "cursor")  # inputs that are neither context nor a ring


class OnnxStep:
    """n worlds that an exported model advances, with the rings of past keys and values it reads.

    Buffers are made and bound to the runtime once; a step writes them in place, and afterwards the
    pairs that the graph returned over the oldest slot of each ring. One thread and no spinning by
    default: the robot's other processes need the cores.

    Args:
        source: Folder of an artifact, exported file, or the content of one.
        n: Number of worlds.
        provider: Execution provider of onnxruntime; it is used or refused, never replaced by
            another.
        threads: Threads within and between operators.
        spin: Let waiting threads spin.

    Attributes:
        manifest: What the file says of itself; see :mod:`nerd_deploy.manifest`.
        n: Number of worlds.

    Raises:
        ValueError: A file that is missing, damaged, of another format version or not what its
            manifest says; an unknown provider.
    """

    def __init__(
        self,
        source: str | Path | bytes,
        n: int = 1,
        *,
        provider: str = "CPUExecutionProvider",
        threads: int = 1,
        spin: bool = False,
    ) -> None:
        where, data = model_bytes(source)
        self._session = _open(data, where, provider, threads, spin)
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.manifest = read_manifest(metadata, where)
        self._inputs = {tensor["name"]: tensor for tensor in self.manifest["inputs"]}
        self._outputs = {tensor["name"]: tensor for tensor in self.manifest["outputs"]}
        _compare("input", self._session.get_inputs(), self._inputs, where)
        _compare("output", self._session.get_outputs(), self._outputs, where)
        self._rings = {name: self._inputs[name]["shape"][1] for name in self._inputs if self._is_ring(name)}
        self._context = [n for n in self._inputs if n not in _OWN and n not in self._rings]
        self.init(n)

    def init(self, n: int) -> None:
        """Start ``n`` worlds without history; buffers are made anew where their number changes."""
        if n < 1:
            raise ValueError(f"n is {n}, expected at least 1")
        most = self.manifest.get("limits", {}).get("batch", n)
        if n > most:
            raise ValueError(f"n is {n}, expected at most {most}: this file's tensors outgrow 32-bit indices beyond")
        if getattr(self, "n", None) == n:
            self._cursor[...] = 0  # the order of sums over a ring follows it, down to the last bit
            return self.reset()
        self.n = n
        self._binding = self._session.io_binding()
        self._buffers: dict[str, NDArray[Any]] = {}
        for tensors, bind in (
            (self._inputs, self._binding.bind_input),
            (self._outputs, self._binding.bind_output),
        ):
            for name, tensor in tensors.items():
                shape = [n if size == "batch" else size for size in tensor["shape"]]
                buffer = np.zeros(shape, tensor["dtype"])
                self._buffers[name] = buffer
                bind(name, "cpu", 0, buffer.dtype.type, shape, buffer.ctypes.data)
        # A file whose blocks all have span 1 reads neither; the counts are kept all the same.
        self._valid = self._buffers.get("valid", np.zeros(n, np.int64))
        self._cursor = self._buffers.get("cursor", np.zeros((), np.int64))

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Forget the history of some worlds.

        Args:
            rows: Their indices, or a mask of shape (n,); None for all.
        """
        chosen = np.arange(self.n) if rows is None else np.asarray(rows)
        if chosen.dtype == bool and chosen.shape != (self.n,):
            raise ValueError(f"rows is a mask of shape {chosen.shape}, expected ({self.n},)")
        self._valid[chosen] = 0
        for name in self._rings:
            self._buffers[name][chosen] = 0  # a masked weight is 0, but 0 · NaN is NaN

    def fork(self, n: int) -> Self:
        """``n`` worlds that share this one world's past; this one is left as it is.

        Raises:
            ValueError: There is more than one world here.
        """
        if self.n != 1:
            raise ValueError(f"fork starts from 1 world, here are {self.n}")
        return self._with_my_past(n)

    def copy(self) -> Self:
        """As many worlds with the same past; they go on apart from these."""
        return self._with_my_past(self.n)

    def fresh(self, n: int) -> Self:
        """``n`` worlds without history on the session of these."""
        other = object.__new__(type(self))
        other.__dict__ |= {k: v for k, v in self.__dict__.items() if k != "n"}
        other.init(n)
        return other

    def _with_my_past(self, n: int) -> Self:
        other = self.fresh(n)
        for name in self._rings:
            other._buffers[name][:] = self._buffers[name]
        other._valid[:] = self._valid
        other._cursor[...] = self._cursor
        return other

    def step(
        self,
        state: NDArray[Any],
        control: NDArray[Any],
        context: Mapping[str, NDArray[Any]] | None = None,
        *,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Advance all worlds one model step of ``manifest["dt"]`` seconds.

        Args:
            state: States, shape (n, nq + nv), float32, in MuJoCo's order.
            control: Controls held over the step, shape (n, nu), float32.
            context: Contact rows by name, shapes (n, K, ...), with K at most the ``rows`` of the
                manifest; names that the file does not read are ignored, so the fields of a
                ContactSet fit as they are.
            out: Where to write the result; None for a new array.

        Returns:
            States after the step, shape (n, nq + nv).

        Raises:
            ValueError: A name is missing, or a shape or dtype is not the file's.
        """
        self.advance(state, control, context)
        after = self._buffers["next_state"]
        if out is None:
            return after.copy()
        np.copyto(out, after, casting="no")
        return out

    def advance(
        self, state: NDArray[Any], control: NDArray[Any], context: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """:meth:`step` for callers who read :attr:`delta` alone.

        Raises:
            ValueError: As :meth:`step`.
        """
        self._fill("state", state)
        self._fill("control", control)
        if missing := [name for name in self._context if name not in (context or {})]:
            raise ValueError(f"context lacks {', '.join(missing)}")
        for name in self._context:
            self._fill_rows(name, (context or {})[name])
        self._session.run_with_iobinding(self._binding)
        for name, span in self._rings.items():
            self._buffers[name][:, int(self._cursor) % span] = self._buffers[f"new_{name}"]
        self._valid += 1
        self._cursor += 1

    @property
    def delta(self) -> NDArray[Any]:
        """Increment of the last step, shape (n, 2·nv), a copy; the manifest names its entries."""
        return self._buffers["delta"].copy()

    def poison(self) -> None:
        """Fill the output buffers with NaN, so that one the next step leaves unwritten shows."""
        for name in self._outputs:
            self._buffers[name].fill(np.nan)

    def _is_ring(self, name: str) -> bool:
        return f"new_{name}" in self._outputs

    def _fill(self, name: str, value: NDArray[Any]) -> None:
        buffer, value = self._buffers[name], np.asarray(value)
        if value.shape != buffer.shape or value.dtype != buffer.dtype:
            raise ValueError(
                f"{name} is {value.dtype} of shape {value.shape}, expected {buffer.dtype} of shape {buffer.shape}"
            )
        buffer[...] = value

    def _fill_rows(self, name: str, value: NDArray[Any]) -> None:
        buffer, value = self._buffers[name], np.asarray(value)
        rows = value.shape[1] if value.ndim > 1 else 0
        shape = (self.n, rows, *buffer.shape[2:])
        if value.shape != shape or value.dtype != buffer.dtype or rows > buffer.shape[1]:
            raise ValueError(
                f"context[{name!r}] is {value.dtype} of shape {value.shape}, expected "
                f"{buffer.dtype} of shape {buffer.shape} or with fewer rows"
            )
        buffer[:, :rows] = value
        buffer[:, rows:] = 0  # no row there: the mask is false


def _open(data: bytes, where: str, provider: str, threads: int, spin: bool) -> Any:
    """A session of onnxruntime on exactly this provider."""
    import onnxruntime as ort

    offered = ort.get_available_providers()
    if provider not in offered:
        raise ValueError(f"provider is {provider!r}, this onnxruntime offers {', '.join(offered)}")
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 3
    for scope in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{scope}.allow_spinning", str(int(spin)))
    try:
        session = ort.InferenceSession(data, options, providers=[provider])
    except Exception as error:  # onnxruntime's errors share no public class
        raise ValueError(f"{where}: onnxruntime cannot load it: {error}") from None
    if (found := session.get_providers()[0]) != provider:
        raise ValueError(f"provider is {provider!r}, onnxruntime fell back to {found!r}")
    return session


def _compare(label: str, found: Any, wanted: dict[str, Any], where: str) -> None:
    """Refuse a graph that is not what its manifest says."""
    graph = {value.name: (value.type, list(value.shape)) for value in found}
    said = {name: (_ORT_TYPES.get(tensor["dtype"]), list(tensor["shape"])) for name, tensor in wanted.items()}
    for name in sorted({*graph, *said}):
        if graph.get(name) != said.get(name):
            raise ValueError(
                f"{where}: {label} {name} is {graph.get(name)} in the graph and {said.get(name)} in the manifest"
            )
