"""Export of a model's streaming step to one ONNX file.

The step is a pure function. The rings of past keys and values stay with the caller: the graph reads
them whole and returns the present pair only, which the caller writes over the oldest. Normalisers,
codec and the integration of the state are in the graph, so that the file speaks SI units.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import math
import os
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nerd_core import FlashNerd, RobotSpec
from nerd_core.artifact import load_model
from nerd_core.model import Block
from nerd_core.storage import check_writable

from .artifact import SUFFIX, write_artifact
from .golden import golden_bytes, replay
from .manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_KEY,
    canonical_json,
    metadata_entry,
    seal,
)
from .onnx_step import OnnxStep
from .recording import record_golden
from .signature import BATCH, CONTEXT_NAMES, input_tensors, output_tensors

__all__ = ["ExportedStep", "export_artifact", "export_onnx", "load_source", "onnx_bytes", "require_exporter"]

OPSET = 20
# Exported with two worlds: with one, the exporter would fix the batch at one without a word.
EXAMPLE_BATCH = 2
MAX_BYTES = 1_500_000_000  # one protobuf message holds at most 2 GiB
MAX_ELEMENTS = 2**31 - 1  # of one tensor, as far as 32-bit indices of kernels reach
TOLERANCE = 1e-4
"""Chosen here: largest difference of a golden increment, in SI units, times the largest increment where that is over
1, since float32 rounds by a share."""


class ExportedStep(nn.Module):
    """:meth:`FlashNerd.step` and :meth:`StateCodec.integrate` as one function that returns no ring.

    Args:
        model: The network, in evaluation mode.
    """

    def __init__(self, model: FlashNerd) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        state: Tensor,
        control: Tensor,
        context: list[Tensor],
        rings: list[Tensor],
        valid: Tensor,
        cursor: Tensor,
    ) -> tuple[Tensor, ...]:
        """One model step.

        Args:
            state: States, shape (B, nq + nv).
            control: Controls held over the step, shape (B, nu).
            context: Contact rows, the fields of a ContactSet less the count, leading shape (B, K);
                empty for models without an encoder.
            rings: Keys and values of each block of span over 1, in turn, shapes (B, S, H, D).
            valid: Time samples since the last reset of each world, shape (B,).
            cursor: Time samples seen in all, shape ().

        Returns:
            Increment (B, 2·nv), next state (B, nq + nv), and the pair of each ring, shapes (B, H,
            D).
        """
        model = self.model
        frame = model.frame(state, control, self._named(context))
        h, left, pairs = model.embed(frame), list(rings), []
        for block in model.blocks:
            assert isinstance(block, Block)
            past = (left.pop(0), left.pop(0)) if block.span > 1 else None
            h, *pair = _attend(block, h, past, valid, cursor)
            pairs += pair if past else []
        hidden = F.silu(model.readout_in(torch.cat([model.norm(h), frame], -1)))
        delta = model.increment(state, model.affine(frame) + model.readout_out(hidden))
        return delta, model.codec.integrate(state, delta), *pairs

    def _named(self, context: list[Tensor]) -> dict[str, Tensor] | None:
        if not context:
            return None
        named = dict(zip(CONTEXT_NAMES, context, strict=True))
        return {**named, "count": named["mask"].sum(-1)}


def _attend(
    block: Block, x: Tensor, past: tuple[Tensor, Tensor] | None, valid: Tensor, cursor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """:meth:`Block.step` without its new rings: the frame after the block, its key, its value."""
    q, k, v, a, b = block.project_in(block.norm(x)).split(block.sizes, -1)
    shape = (-1, block.heads, block.head_width)
    q, k, v = q.reshape(shape) * block.head_width**-0.5, k.reshape(shape), v.reshape(shape)
    mixed = v
    if past is not None:
        lag = torch.remainder(cursor - torch.arange(block.span), block.span)  # 0 is the present
        now = (lag == 0)[:, None, None]
        keys, values = torch.where(now, k[:, None], past[0]), torch.where(now, v[:, None], past[1])
        score = (q[:, None] * keys).sum(-1) + block.lag_bias.T.index_select(0, lag)  # (B, S, H)
        score = torch.where((lag <= valid[:, None])[..., None], score, -torch.inf)
        mixed = (score.softmax(1)[..., None] * values).sum(1)  # (B, H, D)
    gated = F.silu(a) * b
    return x + block.project_out(torch.cat([mixed.flatten(-2), gated], -1)), k, v


def load_source(path: str | Path) -> tuple[FlashNerd, dict[str, Any]]:
    """Model and what an exported file says of it, from a model folder or a run folder."""
    path = Path(path)
    model, manifest = load_model(path)
    if not isinstance(model, FlashNerd):
        raise ValueError(f"model: {path} is a {manifest['architecture']}, expected a flash-nerd")
    rows = _context_rows(model)
    described = {
        "name": manifest.get("name", model.robot.name),
        "robot": model.robot.to_json(),
        "robot_digest": model.robot.digest(),
        "dt": model.robot.dt,
        "model": {
            "digest": hashlib.sha256(canonical_json(manifest).encode()).hexdigest(),
            "weights_sha256": manifest["weights_sha256"],
            "datasets": manifest.get("datasets", []),
            "parameters": model.num_parameters,
        },
        "config": manifest["config"],
        "context": manifest["context"] and {**manifest["context"], "rows": rows},
        "spans": list(model.config.spans),
        "receptive_field": model.config.receptive_field,
    }
    return model, described


def export_onnx(model: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the streaming step of a model as one ONNX file for batches of any size.

    Args:
        model: Model folder, or a run folder, whose best model is taken.
        out: File to create.

    Returns:
        The manifest that the file carries.

    Raises:
        ValueError: ``out`` exists, ``model`` is not a model, or one that cannot be exported.
        ImportError: The libraries of the extra ``export`` are missing.
    """
    require_exporter()
    out = Path(out)
    if out.exists():
        raise ValueError(f"out: {out} exists; an artifact is never overwritten")
    check_writable(out)
    data, manifest = onnx_bytes(*load_source(model))
    _publish(data, out)
    return manifest


def export_artifact(model: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the streaming step of a model as a folder ``NAME.nerd`` with golden data.

    The file is held against the golden data before anything is written. Only single steps decide: a
    model may amplify rounding over recursive ones, which :func:`~nerd_deploy.verify.verify_onnx`
    tells from a mistake.

    Args:
        model: Model folder, or a run folder, whose best model is taken.
        out: Folder to create; its name ends in ``.nerd``.

    Returns:
        The document of ``manifest.json``.

    Raises:
        ValueError: ``out`` exists or has another ending, ``model`` is not a model, or one that
            cannot be exported.
        ImportError: The libraries of the extra ``export`` are missing.
    """
    require_exporter()
    out = Path(out)
    if out.suffix != SUFFIX:
        raise ValueError(f"out: {out}, expected a name that ends in {SUFFIX}")
    if out.exists():
        raise ValueError(f"out: {out} exists; an artifact is never overwritten")
    check_writable(out)
    network, described = load_source(model)
    _refuse_unfit(network)
    golden = record_golden(network)
    data, manifest = onnx_bytes(network, described)
    found = replay(OnnxStep(data, len(golden.control)), golden)
    tolerance = TOLERANCE * max(1.0, float(abs(golden.delta).max()))
    if not found.single_step <= tolerance:
        raise ValueError(f"model: its graph is {found.single_step:g} from torch after one step, expected {tolerance:g}")
    worlds, steps = golden.control.shape[:2]
    told = {"worlds": worlds, "steps": steps, "reset_at": golden.reset_at, "tolerance": tolerance}
    drift = {"single_step": found.single_step, "recursive": found.recursive if math.isfinite(found.recursive) else None}
    return write_artifact(out, data, manifest, golden_bytes(golden), {**told, **drift})


def onnx_bytes(
    model: FlashNerd, described: dict[str, Any], *, precision: str = "float32"
) -> tuple[bytes, dict[str, Any]]:
    """Content of an exported file, and its manifest.

    Args:
        model: The network, as :func:`load_source` gave it.
        described: What the manifest says of it.
        precision: ``float32``, or ``float64`` for a copy that tells rounding from errors.

    Raises:
        ValueError: The network cannot be exported.
    """
    _refuse_unfit(model)
    if precision == "float64":
        model = copy.deepcopy(model).double()
    inputs = input_tensors(model, _context_rows(model), precision)
    outputs = output_tensors(model, precision)
    proto = _trace(model, inputs, outputs)
    read = {name for node in proto.graph.node for name in node.input}
    # The exporter keeps inputs that no node reads; nobody should have to fill them.
    inputs = [tensor for tensor in inputs if tensor["name"] in read]
    for unread in [value for value in proto.graph.input if value.name not in read]:
        proto.graph.input.remove(unread)
    _strip(proto)
    _check_graph(proto, inputs, outputs)
    limits = {"batch": MAX_ELEMENTS // _widest_row(proto), **_robot_limits(model.robot)}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **described,
        "cache": "caller's rings; the graph returns the present pair, for slot cursor % span",
        "normaliser": "in the graph",
        "integration": _integration_rule(model.robot),
        "quaternion": "w x y z, base to world",
        "limits": limits,
        "precision": precision,
        "inputs": inputs,
        "outputs": outputs,
        "versions": _versions(),
    }
    body = proto.SerializeToString(deterministic=True)
    return seal(body + metadata_entry(MANIFEST_KEY, canonical_json(manifest))), manifest


def require_exporter() -> None:
    """Raise an ImportError that names the extra where the exporter's libraries are missing."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'nerd-deploy[export]'") from None


def _context_rows(model: FlashNerd) -> int:
    """Contact rows of one world; 0 for models without an encoder."""
    encoder = model.context_encoder
    if encoder is None:
        return 0
    kind = getattr(encoder, "kind", type(encoder).__name__)
    collider = getattr(encoder, "collider", None)
    if collider is None:
        raise ValueError(
            f"model: context encoder {kind!r} cannot be exported, expected contact-set or fixed-contact of nerd-contact"
        )
    return collider.max_rows or len(collider.probes)


def _refuse_unfit(model: FlashNerd) -> None:
    values = [*model.named_parameters(), *model.named_buffers()]
    if bad := [name for name, value in values if not bool(value.isfinite().all())]:
        raise ValueError(f"model: weights that are not finite in {', '.join(bad)}")
    if odd := [name for name, value in values if value.dtype != torch.float32]:
        raise ValueError(f"model: expected float32 weights, got others in {', '.join(odd)}")
    if (size := sum(value.nbytes for _, value in values)) > MAX_BYTES:
        raise ValueError(f"model: {size} bytes of weights, one ONNX file holds {MAX_BYTES}")


def _trace(model: FlashNerd, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> Any:
    """The ONNX graph of the step, as a ModelProto."""
    names = [tensor["name"] for tensor in inputs]
    example = {tensor["name"]: _example(tensor) for tensor in inputs}
    if model.robot.floating:
        example["state"][:, 3] = 1  # a unit quaternion
    context = [example[n] for n in names if n in CONTEXT_NAMES]
    rings = [example[n] for n in names if n.startswith(("keys_", "values_"))]
    now = [example["state"], example["control"]]
    arguments = [*now, context, rings, example["valid"], example["cursor"]]
    batch = {0: torch.export.Dim(BATCH)}
    shapes = (batch, batch, [batch] * len(context), [batch] * len(rings), batch, {})
    with _quiet_exporter():
        program = torch.onnx.export(
            ExportedStep(model).eval(),
            tuple(arguments),
            input_names=names,
            output_names=[tensor["name"] for tensor in outputs],
            dynamic_shapes=shapes,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
            custom_translation_table={torch.ops.aten.scalar_tensor.default: _exact_number},
        )
    assert program is not None
    return program.model_proto


def _exact_number(s: float, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """A plain number of the code as a constant.

    The exporter's own way goes through float32, in a float64 graph too.
    """
    import onnx
    from onnxscript import opset20

    return opset20.Constant(value=onnx.helper.make_tensor("", dtype, [], [s]))


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Without remarks on libraries that the exporter does without and axes that it renames."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        log.setLevel(level)


def _example(tensor: dict[str, Any]) -> Tensor:
    shape = [EXAMPLE_BATCH if size == BATCH else size for size in tensor["shape"]]
    return torch.zeros(shape, dtype=getattr(torch, tensor["dtype"]))


def _strip(proto: Any) -> None:
    """Drop the exporter's notes on its source, which hold paths of this machine; name the batch."""
    graph = proto.graph
    del graph.value_info[:]
    for element in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        element.doc_string = ""
        del element.metadata_props[:]
    values = [*graph.input, *graph.output]
    sizes = [size for value in values for size in value.type.tensor_type.shape.dim]
    named = [size for size in sizes if size.dim_param]
    if len({size.dim_param for size in named}) == 1:  # else the check that follows fails
        for size in named:
            size.dim_param = BATCH


def _check_graph(proto: Any, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
    """Refuse a graph whose inputs and outputs are not what the manifest says of them."""
    import onnx

    onnx.checker.check_model(proto, full_check=True)
    for label, values, tensors in (
        ("input", proto.graph.input, inputs),
        ("output", proto.graph.output, outputs),
    ):
        found = {value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}
        wanted = {tensor["name"]: tensor["shape"] for tensor in tensors}
        if found != wanted:
            raise ValueError(f"model: exported {label}s are {found}, expected {wanted}")


def _widest_row(proto: Any) -> int:
    """Elements that one world has in the largest tensor of a graph."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(proto).graph
    shapes = [value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output, *graph.value_info)]
    return max(math.prod(size.dim_value or 1 for size in shape) for shape in shapes)


def _robot_limits(robot: RobotSpec) -> dict[str, Any]:
    return {
        "control": [list(bounds) for bounds in robot.ctrl_range],
        "joint": [list(joint.range) if joint.range else None for joint in robot.joints],
        "effort": list(robot.effort_limit),
    }


def _integration_rule(robot: RobotSpec) -> str:
    """:meth:`StateCodec.integrate` in words."""
    base = "position and linvel_world by delta turned from the base frame of state into the world, the quaternion "
    base += "by quat * exp(rotation), normalised, w >= 0, "
    joints = "all else by addition"
    if any(joint.continuous for joint in robot.joints):
        joints += ", then joints without end wrapped to [-pi, pi)"
    return f"in the graph: next_state is state moved by delta: {base if robot.floating else ''}{joints}"


def _versions() -> dict[str, str | int]:
    packages = ("nerd-deploy", "nerd-core", "torch", "onnx", "onnxscript")
    return {**{name: version(name) for name in packages}, "opset": OPSET}


def _publish(data: bytes, out: Path) -> None:
    """Write a file that is whole from the moment it has its name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, out)
