import json
import subprocess
import sys

import numpy as np
import onnx
import pytest

from nerd_core.cartpole import collect_cartpole
from nerd_deploy import read_artifact
from nerd_deploy.artifact import write_artifact
from nerd_deploy.cli import main
from nerd_deploy.golden import golden_bytes
from nerd_deploy.manifest import SEAL_KEY, seal

BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "nerd_core", "nerd_contact", "onnx", "onnxscript"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import numpy as np
from nerd_deploy import OnnxStep
from nerd_deploy.cli import main
"""

WITHOUT_TORCH = """
step = OnnxStep(sys.argv[1], 2)
for _ in range(4):
    after = step.step(np.zeros((2, 4), np.float32), np.zeros((2, 1), np.float32))
print(np.isfinite(after).all(), "torch" in sys.modules)
main(["export", "m", "--out", "x.onnx"])
"""

ARTIFACT_WITHOUT_TORCH = """
import os, pkgutil, importlib
import nerd_deploy
from nerd_deploy import open_backend, read_artifact
folder, there = sys.argv[1:]
os.chdir(there)
found = read_artifact(folder)
step = open_backend(folder, "ort-cpu", 1)
forked = step.fork(3)
forked.reset([1])
np.savez("in.npz", state=found.golden.state[:, 0], control=found.golden.control)
main(["inspect", folder])
main(["rollout", folder, "in.npz", "--out", "out.npz"])
main(["bench", folder, "--batches", "2", "--steps", "3", "--warmup", "0"])
apart = np.abs(np.load("out.npz")["state"][:, :17] - found.golden.state[:, :17]).max()
print(apart < 1e-5, sorted({"torch", "onnx", "nerd_core"} & set(sys.modules)))
main(["lint", folder])
"""


def run(*arguments):
    main([str(argument) for argument in arguments])


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        run(*arguments)
    captured = capsys.readouterr()
    assert (leaving.value.code, captured.out) == (2, "")
    assert "Traceback" not in captured.err
    return captured.err


def test_a_file_is_served_without_torch(cartpole):
    command = [sys.executable, "-c", BLOCKED + WITHOUT_TORCH, str(cartpole[1])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "True False\n"
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'nerd-deploy[export]'" in done.stderr


def test_an_artifact_is_read_checked_and_run_without_torch(cartpole_nerd, tmp_path):
    command = [sys.executable, "-c", BLOCKED + ARTIFACT_WITHOUT_TORCH, str(cartpole_nerd[1]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True []", done.stderr
    assert [json.loads(line)["command"] for line in done.stdout.splitlines()[:-1]] == ["inspect", "rollout", "bench"]
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "lint needs onnx, which is not installed: pip install 'nerd-deploy[export]'"
    )


def test_an_artifact_is_exported_verified_and_inspected(cartpole_nerd, tmp_path, capsys):
    run("export", cartpole_nerd[0], "--out", tmp_path / "x.nerd")
    assert sorted(path.name for path in (tmp_path / "x.nerd").iterdir()) == [
        "golden.npz",
        "manifest.json",
        "model.onnx",
    ]
    run("verify", cartpole_nerd[0], tmp_path / "x.nerd", "--steps", 4, "--batches", 2)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "float32"
    run("inspect", tmp_path / "x.nerd")
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert found["golden"]["passed"]
    assert found["manifest"]["files"].keys() == {"golden.npz", "model.onnx"}
    assert "golden data: as torch computed it" in captured.err
    assert "[rad" in captured.err


def test_golden_data_that_comes_out_otherwise_is_exit_code_1(cartpole_nerd, tmp_path, capsys):
    found = read_artifact(cartpole_nerd[1])
    golden = found.golden._replace(delta=found.golden.delta + np.float32(0.01))
    told = found.document["golden"]
    write_artifact(tmp_path / "x.nerd", found.model, found.manifest, golden_bytes(golden), told)
    with pytest.raises(SystemExit) as leaving:
        run("inspect", tmp_path / "x.nerd")
    assert leaving.value.code == 1
    captured = capsys.readouterr()
    assert not json.loads(captured.out.splitlines()[-1])["golden"]["passed"]
    assert "NOT as torch computed it" in captured.err


def test_lint_prints_its_findings_and_leaves_with_exit_code_1(cartpole_nerd, tmp_path, capsys):
    run("lint", cartpole_nerd[1])
    assert json.loads(capsys.readouterr().out) == {"command": "lint", "findings": []}
    model = onnx.load(cartpole_nerd[1] / "model.onnx")
    model.graph.node[0].doc_string = "/" + "home/someone/codec.py"
    kept = [entry for entry in model.metadata_props if entry.key != SEAL_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    (tmp_path / "x.onnx").write_bytes(seal(model.SerializeToString()))
    with pytest.raises(SystemExit) as leaving:
        run("lint", tmp_path / "x.onnx")
    assert leaving.value.code == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"][0]["rule"] == "path"
    assert "x.onnx: path: model.graph.node.doc_string: holds '/home/'" in captured.err


def test_a_run_folder_is_exported_and_the_file_passes(cartpole, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best").symlink_to(cartpole[0])
    run("export", tmp_path / "run", "--out", tmp_path / "deep" / "x.onnx")
    assert "nerd-deploy verify" in capsys.readouterr().err
    collect_cartpole(tmp_path / "data", trajectories=5, horizon=2, progress=False)
    arguments = ("--data", tmp_path / "data", "--steps", 8, "--batches", 1, 4)
    run("verify", tmp_path / "run", tmp_path / "deep" / "x.onnx", *arguments)
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert (found["command"], found["passed"], found["verdict"]) == ("verify", True, "float32")
    assert [row["step"] for row in found["drift"]] == [1, 2, 5, 8]
    assert "passed (float32)" in captured.err


def test_drift_is_exit_code_1_and_still_one_json_document(cartpole, capsys):
    arguments = ("--steps", 4, "--batches", 2, "--tolerance", 1e-12, "--strict")
    with pytest.raises(SystemExit) as leaving:
        run("verify", *cartpole, *arguments)
    assert leaving.value.code == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["passed"], found["verdict"]) == (False, "drift")


def test_bad_input_is_one_line_and_exit_code_2(cartpole, walker, tmp_path, capsys):
    model, onnx = cartpole
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(onnx.read_bytes()[:5000])
    for arguments, words in (
        (("export", model, "--out", cut), "never overwritten"),
        (("export", tmp_path / "nowhere", "--out", tmp_path / "x"), "no such model manifest"),
        (("verify", model, tmp_path / "x.onnx"), "no such file"),
        (("verify", model, tmp_path), "no such file"),
        (("verify", model, cut), "truncated, edited"),
        (("verify", walker[0], onnx), "made from another model"),
        (("verify", model, onnx, "--data", tmp_path), "no such dataset manifest"),
        (("verify", model, onnx, "--batches", 0), "batches"),
        (("verify", model, onnx, "--provider", "Toaster"), "provider is 'Toaster'"),
    ):
        message = refused(capsys, *arguments)
        assert words in message
        assert message.count("\n") == 1, message
    assert [path.name for path in tmp_path.iterdir()] == ["cut.onnx"]


@pytest.mark.parametrize("command", ["inspect", "lint", "bench", "rollout"])
def test_a_bad_artifact_is_one_line_and_exit_code_2(command, copied, tmp_path, capsys):
    rest = (tmp_path / "in.npz", "--out", tmp_path / "out.npz") if command == "rollout" else ()
    document = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps({**document, "format_version": 2}))
    for artifact, words in (
        (tmp_path / "nowhere.nerd", "no such file"),
        (tmp_path, "not an artifact of nerd-deploy"),
        (copied, "format_version 2, this nerd-deploy reads 1"),
    ):
        message = refused(capsys, command, artifact, *rest)
        assert words in message
        assert message.count("\n") == 1, message


def test_help_opens_with_an_example_that_is_read_back(capsys):
    with pytest.raises(SystemExit) as leaving:
        run("--help")
    assert leaving.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Example: nerd-deploy export go2-run --out go2.nerd" in told
    examples = {"export": "go2-run", "verify": "go2-run", "doctor": ""}
    examples |= dict.fromkeys(("inspect", "lint", "rollout", "bench"), "go2.nerd")
    for command, first in examples.items():
        with pytest.raises(SystemExit):
            run(command, "--help")
        assert f"Example: nerd-deploy {command} {first}".strip() in capsys.readouterr().out
