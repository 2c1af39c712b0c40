import json
import subprocess
import sys

import pytest

from nerd_core.cartpole import collect_cartpole
from nerd_deploy.cli import main

WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "nerd_core", "nerd_contact", "onnx", "onnxscript"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import numpy as np
from nerd_deploy import OnnxStep
from nerd_deploy.cli import main
step = OnnxStep(sys.argv[1], 2)
for _ in range(4):
    after = step.step(np.zeros((2, 4), np.float32), np.zeros((2, 1), np.float32))
print(np.isfinite(after).all(), "torch" in sys.modules)
main(["export", "m", "--out", "x.onnx"])
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
    command = [sys.executable, "-c", WITHOUT_TORCH, str(cartpole[1])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "True False\n"
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'nerd-deploy[export]'" in done.stderr


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


def test_help_opens_with_an_example_that_is_read_back(capsys):
    with pytest.raises(SystemExit) as leaving:
        run("--help")
    assert leaving.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Example: nerd-deploy export go2-run --out go2.onnx" in told
    for command in ("export", "verify"):
        with pytest.raises(SystemExit):
            run(command, "--help")
        assert f"Example: nerd-deploy {command} go2-run" in capsys.readouterr().out
