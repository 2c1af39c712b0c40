"""Dependencies between packages point downwards; import-linter holds the contracts of the root."""

import ast
import subprocess
import sys

SIMULATORS = {"warp", "mujoco", "mujoco_warp", "newton"}
# What must not be loaded by an import of the package; the library that serves on a robot's
# onboard computer does without torch.
NOT_LOADED = {
    "nerd-core": SIMULATORS | {"matplotlib", "onnx", "onnxruntime", "onnxscript", "imageio", "viser"},
    "nerd-contact": SIMULATORS | {"matplotlib", "onnx", "onnxruntime", "onnxscript"},
    "nerd-coupling": {"matplotlib", "imageio", "viser", "onnx", "onnxruntime", "onnxscript"},
    "nerd-mpc": {"matplotlib", "imageio", "viser", "onnx", "onnxruntime", "onnxscript"},
    "nerd-rl": {"rsl_rl", "tensordict", "tensorboard", "matplotlib", "imageio", "onnx", "onnxruntime", "onnxscript"},
    "nerd-deploy": SIMULATORS | {"torch", "onnx", "onnxruntime", "onnxscript", "tensorrt"},
}


def imported_names(path):
    """Top-level names of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def test_the_import_contracts_hold(root):
    code = "from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_nerd_core_never_imports_numpy(root):
    # torch loads numpy wherever it is installed, so sys.modules cannot tell: read the sources.
    sources = sorted((root / "packages/nerd-core/src").rglob("*.py"))
    assert [path.name for path in sources if "numpy" in imported_names(path)] == []


def test_an_import_loads_nothing_heavy(package, fresh_import):
    assert set(fresh_import(package)["loaded"]) & NOT_LOADED[package] == set()


def test_an_import_prints_nothing(package, fresh_import):
    assert fresh_import(package)["printed"] == ""


def test_an_import_leaves_torchs_global_settings_alone(package, fresh_import):
    found = fresh_import(package)["torch"]
    assert found in (None, ["torch.float32", True, "highest", False])
