import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import onnx
import pytest

from nerd_deploy import OnnxStep, export_artifact, read_artifact
from nerd_deploy.artifact import write_artifact
from nerd_deploy.manifest import MANIFEST_KEY, canonical_json, check_seal, metadata_entries, seal


def rewrite(folder, change):
    """Edit manifest.json of an artifact."""
    document = json.loads((folder / "manifest.json").read_text())
    change(document)
    (folder / "manifest.json").write_text(json.dumps(document))


def replace(folder, name, data):
    """Put other content into an artifact, with its hash in manifest.json."""
    (folder / name).write_bytes(data)
    told = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    rewrite(folder, lambda d: d["files"].update({name: told}))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def golden_arrays(folder):
    with np.load(folder / "golden.npz") as file:
        return dict(file)


def as_npz(folder, **arrays):
    np.savez(folder / "x.npz", **arrays)
    return (folder / "x.npz").read_bytes()


def test_an_artifact_says_what_its_onnx_file_says_and_more(walker_nerd):
    folder = walker_nerd[1]
    assert sorted(path.name for path in folder.iterdir()) == ["golden.npz", "manifest.json", "model.onnx"]
    document = json.loads((folder / "manifest.json").read_text())
    within = {e.key: e.value for e in onnx.load(folder / "model.onnx").metadata_props}
    manifest = json.loads(within[MANIFEST_KEY])
    own = ("format", "format_version", "files", "golden")
    assert {k: v for k, v in document.items() if k not in own} == {k: v for k, v in manifest.items() if k not in own}
    assert (document["format"], document["format_version"]) == ("nerd-artifact", 1)
    for name, told in document["files"].items():
        data = (folder / name).read_bytes()
        assert told == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert len(document["limits"]["control"]) == len(document["limits"]["effort"]) == 12
    assert "normalised, w >= 0" in document["integration"]
    assert document["golden"]["single_step"] <= document["golden"]["tolerance"]


def test_metadata_is_read_without_an_onnx_library_as_onnx_reads_it(walker_nerd):
    data = (walker_nerd[1] / "model.onnx").read_bytes()
    assert metadata_entries(data, "x") == {e.key: e.value for e in onnx.load_from_string(data).metadata_props}
    with pytest.raises(ValueError, match="x: not an ONNX file"):
        metadata_entries(data[:-1], "x")


def test_two_artifacts_of_a_model_hold_the_same_bytes(cartpole_nerd, tmp_path):
    export_artifact(cartpole_nerd[0], tmp_path / "again.nerd")
    for name in ("model.onnx", "golden.npz", "manifest.json"):
        assert (tmp_path / "again.nerd" / name).read_bytes() == (cartpole_nerd[1] / name).read_bytes()


def test_an_untouched_copy_is_read(copied):
    found = read_artifact(copied)
    assert found.golden.state.shape == (3, 33, 4)
    assert found.manifest["name"] == found.document["name"]
    assert OnnxStep(copied, 2).n == 2
    single = read_artifact(copied / "model.onnx")
    assert single.manifest == found.manifest
    assert (single.golden, single.document) == (None, None)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: cut(d / "model.onnx"), r"model\.onnx: truncated or edited"),
        (lambda d: cut(d / "golden.npz"), r"golden\.npz: truncated or edited"),
        (lambda d: cut(d / "manifest.json"), r"manifest\.json: not valid JSON"),
        (lambda d: (d / "model.onnx").unlink(), r"model\.onnx: no such file"),
        (lambda d: (d / "golden.npz").unlink(), r"golden\.npz: no such file"),
        (lambda d: (d / "manifest.json").unlink(), r"manifest\.json: no such file.* not an artifact"),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe"), r"manifest\.json: not valid JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), "not of the format 'nerd-artifact'"),
        (lambda d: (d / "manifest.json").write_text('{"dt": NaN}'), "NaN is not a number of JSON"),
        (lambda d: (d / "manifest.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda d: rewrite(d, lambda m: m.update(format="nerd-model")), "not of the format 'nerd-artifact'"),
        (lambda d: rewrite(d, lambda m: m.update(format_version=2)), "format_version 2, this nerd-deploy reads 1"),
        (lambda d: rewrite(d, lambda m: m.update(dt=0.5)), r"edited; dt are not those inside model\.onnx"),
        (lambda d: rewrite(d, lambda m: m.update(extra=1)), "edited; extra are not those inside"),
        (lambda d: rewrite(d, lambda m: m["files"].pop("golden.npz")), r"expected model\.onnx and golden\.npz"),
        (lambda d: rewrite(d, lambda m: m["files"].update({"../x": {}})), r"expected model\.onnx and golden\.npz"),
        (lambda d: rewrite(d, lambda m: m.update(files=[])), r"files is \[\]"),
        (lambda d: rewrite(d, lambda m: m.update(golden=3)), "golden is 3"),
        (lambda d: rewrite(d, lambda m: m["files"].update({"model.onnx": 3})), "truncated or edited"),
        (lambda d: replace(d, "model.onnx", seal(b"")), r"holds no nerd\.manifest"),
        (lambda d: replace(d, "model.onnx", b"\x08\x0a"), "truncated, edited or not made by nerd-deploy"),
        (lambda d: replace(d, "golden.npz", b"PK\x03\x04noise"), "not readable as golden data"),
        (lambda d: replace(d, "golden.npz", as_npz(d, state=np.zeros(3))), "not readable as golden data"),
    ],
)
def test_a_spoiled_artifact_is_refused(copied, spoil, words):
    spoil(copied)
    for read in (read_artifact, OnnxStep):
        with pytest.raises(ValueError, match=words):
            read(copied)


def test_golden_data_of_another_shape_or_type_is_refused(copied):
    arrays = golden_arrays(copied)
    for change, words in (
        ({"state": arrays["state"][:, :-1]}, r"state is float32 of shape \(3, 32, 4\), expected .*\(3, 33, 4\)"),
        ({"control": arrays["control"].astype(np.float64)}, "control is float64"),
        ({"reset": arrays["reset"][:2]}, "reset is bool of shape"),
        ({"reset_at": np.array([1, 2])}, "not readable as golden data"),
    ):
        replace(copied, "golden.npz", as_npz(copied.parent, **{**arrays, **change}))
        with pytest.raises(ValueError, match=words):
            read_artifact(copied)


def test_a_newer_onnx_file_inside_is_refused(copied):
    model = onnx.load(copied / "model.onnx")
    manifest = json.loads({e.key: e.value for e in model.metadata_props}[MANIFEST_KEY])
    onnx.helper.set_model_props(model, {MANIFEST_KEY: canonical_json({**manifest, "format_version": 2})})
    replace(copied, "model.onnx", seal(model.SerializeToString()))
    with pytest.raises(ValueError, match="format_version 2, this nerd-deploy reads 1"):
        read_artifact(copied)


class Mine:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(copied, tmp_path):
    mark = tmp_path / "mark"
    trap = np.array([Mine(mark)], dtype=object)
    assert b"touch" in pickle.dumps(trap)
    replace(copied, "golden.npz", as_npz(tmp_path, **{**golden_arrays(copied), "state": trap}))
    with pytest.raises(ValueError, match="not readable as golden data"):
        read_artifact(copied)
    replace(copied, "golden.npz", pickle.dumps(trap))
    with pytest.raises(ValueError, match="not readable as golden data"):
        read_artifact(copied)
    assert not mark.exists()


def test_a_write_that_fails_leaves_nothing(copied, tmp_path, monkeypatch):
    found = read_artifact(copied)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_artifact(tmp_path / "new" / "x.nerd", found.model, found.manifest, b"", {})
    assert list((tmp_path / "new").iterdir()) == []


def test_an_existing_output_or_another_ending_is_refused_before_any_work(cartpole_nerd, tmp_path, monkeypatch):
    monkeypatch.setattr("nerd_deploy.export.load_source", lambda path: pytest.fail("work was done"))
    (tmp_path / "x.nerd").mkdir()
    with pytest.raises(ValueError, match="never overwritten"):
        export_artifact(cartpole_nerd[0], tmp_path / "x.nerd")
    with pytest.raises(ValueError, match=r"expected a name that ends in \.nerd"):
        export_artifact(cartpole_nerd[0], tmp_path / "x")
    assert list((tmp_path / "x.nerd").iterdir()) == []


def test_an_artifact_made_meanwhile_is_not_replaced(copied):
    found = read_artifact(copied)
    with pytest.raises(ValueError, match="never overwritten"):
        write_artifact(copied, found.model, found.manifest, b"", {})
    assert read_artifact(copied).golden is not None
    assert [path.name for path in copied.parent.iterdir()] == ["copied.nerd"]


def test_more_worlds_than_32_bit_indices_reach_are_refused(cartpole_nerd):
    found = read_artifact(cartpole_nerd[1])
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(found.model)).graph
    values = [*graph.input, *graph.output, *graph.value_info]
    rows = [[d.dim_value for d in v.type.tensor_type.shape.dim if d.dim_value] for v in values]
    assert found.manifest["limits"]["batch"] == (2**31 - 1) // max(int(np.prod(row)) for row in rows)
    check_seal(found.model, "x")
    with pytest.raises(ValueError, match=r"n is 2147483647, expected at most \d+"):
        OnnxStep(cartpole_nerd[1], 2**31 - 1)
