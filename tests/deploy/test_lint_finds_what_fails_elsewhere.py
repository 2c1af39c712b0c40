import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from nerd_deploy.lint import TESTED_OPERATORS, lint_artifact, lint_graph


@pytest.fixture
def proto(cartpole_nerd):
    """The graph of an artifact that is fine."""
    return onnx.load(cartpole_nerd[1] / "model.onnx")


def rules(proto):
    return sorted({finding.rule for finding in lint_graph(proto)})


def test_what_is_exported_now_has_no_findings(cartpole_nerd, walker_nerd):
    for _, folder in (cartpole_nerd, walker_nerd):
        assert lint_artifact(folder) == []
        assert lint_artifact(folder / "model.onnx") == []


def test_an_operator_that_nobody_ran_is_found_inside_branches_too(proto):
    then = helper.make_graph([helper.make_node("Erf", ["state"], ["e"], "inner")], "then", [], [])
    proto.graph.node.append(helper.make_node("If", ["valid"], ["x"], "branch", then_branch=then, else_branch=then))
    proto.graph.node.append(helper.make_node("Gelu", ["state"], ["g"], "foreign", domain="com.microsoft"))
    found = {finding.text.split()[0]: finding for finding in lint_graph(proto)}
    assert set(found) == {"If", "Erf", "com.microsoft::Gelu"}
    assert {finding.rule for finding in found.values()} == {"operator"}
    assert (found["Erf"].where, found["If"].where) == ("inner", "branch")
    assert "Erf" not in TESTED_OPERATORS


def test_another_opset_is_found(proto):
    proto.opset_import[0].version = 24
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert [finding.where for finding in lint_graph(proto)] == ["onnx", "com.microsoft"]
    assert rules(proto) == ["opset"]


@pytest.mark.parametrize(
    "text",
    [
        "/" + "home/someone/model.py",
        "File C:\\" + "Users\\someone\\x",
        "lib/site-packages/torch",
        "at /tmp/build/x",
        'stack: "codec.py", line 3',
    ],
)
def test_paths_of_a_machine_are_found_wherever_they_hide(proto, text):
    proto.graph.node[3].doc_string = text
    (finding,) = lint_graph(proto)
    assert (finding.rule, finding.where) == ("path", "model.graph.node.doc_string")
    proto.graph.node[3].doc_string = ""
    helper.set_model_props(proto, {"note": text})
    assert rules(proto) == ["path"]


@pytest.mark.parametrize("text", ["m/s", "rad/s", "/model/blocks.0/MatMul", "version 2.0", "a data/b pair"])
def test_units_and_names_are_no_paths(proto, text):
    proto.graph.node[3].doc_string = text
    assert lint_graph(proto) == []


def test_float64_left_in_a_float32_graph_is_found(proto):
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(2), "left"))
    assert [(finding.rule, finding.where) for finding in lint_graph(proto)] == [("float64", "left")]
    del proto.graph.initializer[-1]
    proto.graph.node.append(helper.make_node("Cast", ["state"], ["wide"], "widen", to=TensorProto.DOUBLE))
    proto.graph.node.append(helper.make_node("Mul", ["wide", "wide"], ["square"], "square"))
    assert [finding.where for finding in lint_graph(proto)] == ["square", "wide", "widen"]
    assert lint_graph(proto, "float64") == []


def test_weights_in_another_file_are_found(proto):
    tensor = proto.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    assert [(finding.rule, finding.where) for finding in lint_graph(proto)] == [("external-data", tensor.name)]


def test_a_size_without_a_name_is_found(proto):
    shape = proto.graph.input[0].type.tensor_type.shape.dim
    shape[0].dim_param = "s0"
    shape[1].ClearField("dim_value")
    assert [finding.text.split(",")[0] for finding in lint_graph(proto)] == [
        "axis 0 is 's0'",
        "axis 1 is without a name",
    ]
