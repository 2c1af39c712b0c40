"""Each package imports in an environment that holds nothing but what the package declares."""

import json
import subprocess

import pytest

pytestmark = pytest.mark.slow

ABSENT = {
    "nerd-core": {"numpy", "mujoco", "mujoco-warp", "warp-lang", "newton", "onnx", "onnxruntime"},
    "nerd-contact": {"numpy", "mujoco", "mujoco-warp", "warp-lang", "newton", "onnx"},
    "nerd-coupling": {"matplotlib", "imageio", "onnx", "onnxruntime"},
    "nerd-mpc": {"onnx", "onnxscript", "onnxruntime"},
    "nerd-rl": {"matplotlib", "imageio", "onnxruntime"},
    "nerd-deploy": {"torch", "mujoco", "warp-lang", "newton", "onnx", "onnxscript"},
}
# Modules of these names come with an extra of the package; a module may fail for want of them.
OF_AN_EXTRA = {
    "nerd-mpc": {"nerd_deploy"},
    "nerd-deploy": {"nerd_contact", "nerd_core", "torch", "onnx", "onnxscript", "tensorrt"},
}
IMPORT_ALL = """
import importlib, json, pkgutil, sys
from importlib.metadata import distributions
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in sys.argv[2:]:
            raise
print(json.dumps(sorted({found.name.lower() for found in distributions()})))
"""


def test_every_module_imports_where_only_the_packages_requirements_are(package, root, uv):
    command = [uv, "run", "--quiet", "--isolated", "--package", package, "python", "-c", IMPORT_ALL]
    command += [package.replace("-", "_"), *OF_AN_EXTRA.get(package, set())]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed = set(json.loads(done.stdout.splitlines()[-1]))
    assert package in installed
    assert installed & ABSENT[package] == set()
