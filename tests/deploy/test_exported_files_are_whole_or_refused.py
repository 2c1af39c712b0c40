import json

import numpy as np
import onnx
import pytest
import torch

from nerd_core.artifact import save_model
from nerd_deploy import OnnxStep, export_onnx
from nerd_deploy.manifest import MANIFEST_KEY, SEAL_KEY, seal

STATE, CONTROL = np.zeros((1, 4), np.float32), np.zeros((1, 1), np.float32)


def edited(path, change):
    """Content of a file whose manifest was changed, sealed as if nothing had happened."""
    model = onnx.load(path)
    entries = {entry.key: entry.value for entry in model.metadata_props}
    manifest = json.loads(entries[MANIFEST_KEY])
    change(manifest)
    onnx.helper.set_model_props(model, {MANIFEST_KEY: json.dumps(manifest)})
    return seal(model.SerializeToString())


def test_onnx_and_its_checker_read_the_file_as_any_other(cartpole):
    model = onnx.load(cartpole[1])
    onnx.checker.check_model(model, full_check=True)
    assert [entry.key for entry in model.metadata_props] == [MANIFEST_KEY, SEAL_KEY]


def test_every_batch_axis_is_open(walker):
    graph = onnx.load(walker[1]).graph
    for value in [*graph.input, *graph.output]:
        sizes = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        assert sizes[:1] == ([] if value.name == "cursor" else ["batch"])
        assert all(isinstance(size, int) for size in sizes[1:])


def test_the_file_tells_no_path_of_the_machine_that_made_it(walker):
    model = onnx.load(walker[1])
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
    data = walker[1].read_bytes()
    for word in (b"site-packages", b"stack_trace", b".py", str(walker[0]).encode()):
        assert word not in data


def test_the_manifest_names_every_entry(walker):
    manifest = OnnxStep(walker[1]).manifest
    tensors = {t["name"]: t for t in [*manifest["inputs"], *manifest["outputs"]]}
    for name in ("state", "control", "delta", "next_state"):
        width = tensors[name]["shape"][1]
        assert [len(tensors[name][k]) for k in ("entries", "units", "frames")] == [width] * 3
    state = dict(zip(tensors["state"]["entries"], tensors["state"]["units"], strict=True))
    assert (state["z"], state["quat_w"], state["linvel_world_x"]) == ("m", "1", "m/s")
    assert set(tensors["control"]["units"]) == {"rad"}
    assert tensors["point"]["shape"] == ["batch", 8, 3]
    assert (manifest["dt"], manifest["name"]) == (0.02, "go2")
    assert manifest["context"]["kind"] == "contact-set"
    told = json.loads((walker[0] / "manifest.json").read_text())
    assert manifest["model"]["weights_sha256"] == told["weights_sha256"]


def test_two_exports_of_a_model_are_the_same_file(cartpole, tmp_path):
    export_onnx(cartpole[0], tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == cartpole[1].read_bytes()


def test_a_damaged_file_is_refused(cartpole):
    data = cartpole[1].read_bytes()
    assert OnnxStep(data).n == 1
    flipped = [bytearray(data) for _ in range(3)]
    for copy, place in zip(flipped, (100, len(data) // 2, -10), strict=True):
        copy[place] ^= 1
    plain = onnx.load(cartpole[1])
    del plain.metadata_props[:]
    for spoiled in (*map(bytes, flipped), data[:-1], data[: len(data) // 2], b"", data + b"\0"):
        with pytest.raises(ValueError, match="truncated, edited or not made by nerd-deploy"):
            OnnxStep(spoiled)
    with pytest.raises(ValueError, match="truncated, edited or not made by nerd-deploy"):
        OnnxStep(plain.SerializeToString())
    with pytest.raises(ValueError, match=r"holds no nerd\.manifest"):
        OnnxStep(seal(plain.SerializeToString()))
    with pytest.raises(ValueError, match="onnxruntime cannot load it"):
        OnnxStep(seal(b"noise"))


def test_a_file_of_another_format_or_unlike_its_manifest_is_refused(cartpole):
    def widen(manifest):
        manifest["inputs"][0]["shape"] = ["batch", 5]

    for change, words in (
        (lambda m: m.update(format_version=2), "format_version 2, this nerd-deploy reads 1"),
        (lambda m: m.update(format="other"), "is not of the format 'nerd-onnx'"),
        (lambda m: m.pop("dt"), "lacks a usable dt"),
        (widen, "input state is .* in the graph and .* in the manifest"),
        (lambda m: m["outputs"].pop(), "output new_values_2"),
    ):
        with pytest.raises(ValueError, match=words):
            OnnxStep(edited(cartpole[1], change))


def test_a_provider_is_used_or_refused(cartpole):
    with pytest.raises(ValueError, match="provider is 'TensorrtExecutionProvider'"):
        OnnxStep(cartpole[1], provider="TensorrtExecutionProvider")


def test_an_output_that_is_not_written_shows(cartpole, monkeypatch):
    step = OnnxStep(cartpole[1])
    step.poison()
    assert np.isfinite(step.step(STATE, CONTROL)).all()

    class Idle:
        def run_with_iobinding(self, binding):
            pass

    monkeypatch.setattr(step, "_session", Idle())
    step.poison()
    assert np.isnan(step.step(STATE, CONTROL)).all()


class Sonar(torch.nn.Module):
    """An encoder that is none of nerd-contact's."""

    kind, out_size = "sonar", 2

    def forward(self, context):
        return context["echo"]

    def config_json(self):
        return {}


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(cartpole, forgetful, tmp_path, monkeypatch):
    with torch.no_grad():
        forgetful.embed.weight[0, 0] = torch.nan
    save_model(tmp_path / "nan", forgetful)
    out = tmp_path / "out" / "x.onnx"
    with pytest.raises(ValueError, match=r"weights that are not finite in embed\.weight"):
        export_onnx(tmp_path / "nan", out)
    with pytest.raises(ValueError, match="no such model manifest"):
        export_onnx(tmp_path / "nowhere", out)
    monkeypatch.setattr("nerd_deploy.export.MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="one ONNX file holds 1000"):
        export_onnx(cartpole[0], out)
    monkeypatch.undo()
    forgetful.context_encoder = Sonar()
    monkeypatch.setattr("nerd_deploy.export.load_model", lambda path: (forgetful, {}))
    with pytest.raises(ValueError, match="context encoder 'sonar' cannot be exported"):
        export_onnx(tmp_path / "nan", out)
    assert not out.parent.exists()


def test_an_existing_output_is_never_overwritten(cartpole, tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"mine")
    with pytest.raises(ValueError, match="never overwritten"):
        export_onnx(cartpole[0], tmp_path / "x.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]
    assert (tmp_path / "x.onnx").read_bytes() == b"mine"
