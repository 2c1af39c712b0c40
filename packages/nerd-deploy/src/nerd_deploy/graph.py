"""Whether two exported files hold the same graph, whatever the precision of its numbers."""

from __future__ import annotations

from typing import Any

__all__ = ["same_graph"]


def same_graph(one: bytes, other: bytes) -> str | None:
    """The first difference of two graphs in words, or None.

    Nodes must be the same, in the same order, with the same wiring and attributes; constants must
    be equal after rounding to float32. Names of intermediate values and the two float types do not
    count.

    Args:
        one: Content of an ONNX file.
        other: Content of another.
    """
    import onnx

    left, right = onnx.load_from_string(one).graph, onnx.load_from_string(other).graph
    for kind in ("input", "output"):
        names = [[value.name for value in getattr(graph, kind)] for graph in (left, right)]
        if names[0] != names[1]:
            return f"{kind}s are {names[0]} and {names[1]}"
    if len(left.node) != len(right.node):
        return f"{len(left.node)} and {len(right.node)} nodes"
    constants = [_constants(graph) for graph in (left, right)]
    renamed = {value.name: value.name for value in left.input}
    for a, b in zip(left.node, right.node, strict=True):
        if _signature(a) != _signature(b) or len(a.input) != len(b.input):
            return f"nodes {a.name} and {b.name}"
        for x, y in zip(a.input, b.input, strict=True):
            if x in constants[0] and y in constants[1]:
                if not _equal(constants[0][x], constants[1][y]):
                    return f"constants {x} and {y}"
            elif renamed.get(x, x) != y:
                return f"inputs of {a.name} and {b.name}"
        renamed |= dict(zip(a.output, b.output, strict=True))
    return None


def _constants(graph: Any) -> dict[str, Any]:
    from onnx import numpy_helper

    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def _equal(a: Any, b: Any) -> bool:
    if a.dtype.kind != b.dtype.kind or a.shape != b.shape:
        return False
    if a.dtype.kind == "f":
        a, b = a.astype("float32"), b.astype("float32")
    return bool((a == b).all())


def _signature(node: Any) -> tuple[Any, ...]:
    """Operator and attributes, the float types taken as one."""
    from onnx import TensorProto, helper

    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Cast" and attributes["to"] == TensorProto.DOUBLE:
        attributes["to"] = TensorProto.FLOAT
    return node.op_type, node.domain, sorted((name, repr(v)) for name, v in attributes.items())
