"""What may go wrong elsewhere with an exported graph that is fine here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .artifact import model_bytes
from .manifest import metadata_entries, read_manifest

__all__ = ["TESTED_OPERATORS", "Finding", "lint_artifact", "lint_graph"]

OPSET = 20
# fmt: off
TESTED_OPERATORS = frozenset(
    [
        "Add", "Cast", "Clip", "Concat", "Cos", "Div", "Equal", "Expand", "Floor", "Gather", "GatherND", "Gemm",
        "Less", "LessOrEqual", "Log", "MatMul", "Mod", "Mul", "Neg", "Pow", "Reciprocal", "ReduceL2", "ReduceMean",
        "ReduceSum", "Reshape", "Shape", "Sigmoid", "Sin", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub",
        "Tanh", "Transpose", "Unsqueeze", "Where",
    ]
)
# fmt: on
"""Operators of exported models that are run against torch; others may work, but nobody looked."""
BATCH = "batch"

_PATH = re.compile(
    r"(?<![\w/.])/(?:home|root|tmp|usr|opt|var|mnt|srv|work|workspace|data|private|Users|Volumes)/"
    r"|\b[A-Za-z]:[\\/](?=\w)|site-packages|\w\.py\b"
)


class Finding(NamedTuple):
    """One thing to look at.

    Attributes:
        rule: ``operator``, ``opset``, ``path``, ``float64``, ``external-data`` or ``dimension``.
        where: Node, tensor or field.
        text: What is wrong, in words.
    """

    rule: str
    where: str
    text: str


def lint_artifact(source: str | Path | bytes) -> list[Finding]:
    """Findings of an artifact's graph, none for what this version exports.

    Args:
        source: Folder of an artifact, exported file, or the content of one.

    Raises:
        ValueError: A bad artifact.
        ImportError: onnx is missing.
    """
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise ImportError(
            f"lint needs {error.name}, which is not installed: pip install 'nerd-deploy[export]'"
        ) from None
    where, data = model_bytes(source)
    manifest = read_manifest(metadata_entries(data, where), where)
    return lint_graph(onnx.load_from_string(data), manifest["precision"])


def lint_graph(proto: Any, precision: str = "float32") -> list[Finding]:
    """Findings of a ModelProto.

    Args:
        proto: The model.
        precision: Type that all its real numbers should have.
    """
    found = [
        Finding("opset", entry.domain or "onnx", f"version {entry.version}, tested with {OPSET} of onnx alone")
        for entry in proto.opset_import
        if (entry.domain or "ai.onnx", entry.version) != ("ai.onnx", OPSET)
    ]
    for graph in _graphs(proto.graph):
        for node in graph.node:
            name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            if name not in TESTED_OPERATORS:
                found.append(Finding("operator", node.name, f"{name} is not among the operators that are tested"))
    found += [Finding("external-data", t.name, "its numbers lie in another file") for t in _external(proto)]
    found += [
        Finding("path", field, f"holds {_PATH.search(text)[0]!r} in {_excerpt(text)!r}")  # type: ignore[index]
        for field, text in _strings(proto)
        if _PATH.search(text)
    ]
    if precision != "float64":
        found += [Finding("float64", name, "is float64 in a float32 graph") for name in _doubles(proto)]
    return found + _open_dimensions(proto.graph)


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else [*attribute.graphs]:
                yield from _graphs(inner)


def _tensors(proto: Any) -> Iterator[Any]:
    for graph in _graphs(proto.graph):
        yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                yield from ([attribute.t] if attribute.HasField("t") else attribute.tensors)


def _external(proto: Any) -> list[Any]:
    from onnx import TensorProto

    return [t for t in _tensors(proto) if t.data_location == TensorProto.EXTERNAL or t.external_data]


def _doubles(proto: Any) -> list[str]:
    """Names of values, constants and conversions of type float64."""
    import onnx

    double = onnx.TensorProto.DOUBLE
    try:
        graph = onnx.shape_inference.infer_shapes(proto).graph
    except onnx.shape_inference.InferenceError:  # an operator that onnx does not know, which is a finding of its own
        graph = proto.graph
    values = [*graph.input, *graph.output, *graph.value_info]
    names = [value.name for value in values if value.type.tensor_type.elem_type == double]
    names += [tensor.name or "constant" for tensor in _tensors(proto) if tensor.data_type == double]
    names += [
        node.name
        for inner in _graphs(proto.graph)
        for node in inner.node
        if node.op_type == "Cast" and any(a.name == "to" and a.i == double for a in node.attribute)
    ]
    return sorted(set(names))


def _open_dimensions(graph: Any) -> list[Finding]:
    """Sizes of inputs and outputs that are neither a number nor the batch."""
    found = []
    for value in (*graph.input, *graph.output):
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if size.HasField("dim_value") or size.dim_param == BATCH:
                continue
            name = repr(size.dim_param) if size.dim_param else "without a name"
            found.append(Finding("dimension", value.name, f"axis {axis} is {name}, expected a number or {BATCH!r}"))
    return found


def _strings(message: Any, path: str = "model") -> Iterator[tuple[str, str]]:
    """All text of a protobuf message; bytes, which hold weights, are left out."""
    for field, content in message.ListFields():
        label = f"{path}.{field.name}"
        if field.type == field.TYPE_STRING:
            yield from ((label, text) for text in ([content] if isinstance(content, str) else content))
        elif field.type == field.TYPE_MESSAGE:
            for inner in [content] if hasattr(content, "ListFields") else content:
                yield from _strings(inner, label)


def _excerpt(text: str) -> str:
    match = _PATH.search(text)
    assert match is not None
    return text[max(0, match.start() - 10) : match.end() + 30]
