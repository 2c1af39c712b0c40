import json

import onnx
import onnxruntime
import pytest

from nerd_deploy.cli import main
from nerd_deploy.doctor import IDENTITY, PROBES, Probe, examine

BY_NAME = {probe.name: probe for probe in PROBES}


def test_a_crash_a_hang_and_a_missing_library_are_told_apart():
    probes = [
        Probe("crash", "import os; os.kill(os.getpid(), 11)", "a GPU"),
        Probe("absent", "import no_such_library", "pip install it"),
        Probe("says why", "raise SystemExit('the driver is too old')", "a newer one"),
        Probe("fine", "print('noise'); tell(version='1.2', device='x')", ""),
    ]
    assert examine(probes) == [
        {"name": "crash", "works": False, "missing": "crashes here (SIGSEGV)", "how": "a GPU"},
        {
            "name": "absent",
            "works": False,
            "missing": "ModuleNotFoundError: No module named 'no_such_library'",
            "how": "pip install it",
        },
        {"name": "says why", "works": False, "missing": "the driver is too old", "how": "a newer one"},
        {"name": "fine", "works": True, "version": "1.2", "device": "x"},
    ]
    (hung,) = examine([Probe("hang", "import threading; threading.Event().wait()", "patience")], timeout=0.2)
    assert (hung["works"], hung["missing"]) == (False, "no answer within 0.2 s")


def test_the_smallest_model_is_one():
    model = onnx.load_from_string(bytes.fromhex(IDENTITY))
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Identity"]


def test_backends_are_as_onnxruntime_has_them(capsys):
    names = ("ort-cpu", "ort-cuda", "ort-tensorrt")
    main(["doctor", "--only", *names])
    captured = capsys.readouterr()
    found = {row["name"]: row for row in json.loads(captured.out.splitlines()[-1])["backends"]}
    assert tuple(found) == names
    assert (found["ort-cpu"]["works"], found["ort-cpu"]["version"]) == (True, onnxruntime.__version__)
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        assert "CUDAExecutionProvider is not in this onnxruntime" in found["ort-cuda"]["missing"]
        assert "onnxruntime-gpu" in captured.err


def test_every_probe_says_how_to_get_what_it_misses():
    assert list(BY_NAME) == [
        *("ort-cpu", "ort-cuda", "ort-tensorrt", "torch", "torch-cuda", "tensorrt", "tensorrt-rtx", "export"),
    ]
    assert all(probe.how for probe in PROBES)
    for probe in PROBES:
        compile(probe.code, probe.name, "exec")


def test_tensorrt_is_not_touched_without_a_gpu(tmp_path, monkeypatch):
    # Stands for the real library, whose objects take the process down where there is no GPU.
    (tmp_path / "tensorrt.py").write_text("__version__ = '11.4'\ndef Runtime(*_): raise SystemError('touched')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (row,) = examine([BY_NAME["tensorrt"]])
    if row["works"]:
        pytest.skip("there is a GPU here")
    assert row["missing"].startswith("tensorrt 11.4 is installed, but")


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["doctor", "--only", "abacus"])
    assert leaving.value.code == 2
    assert "only has abacus, expected some of ort-cpu" in capsys.readouterr().err
