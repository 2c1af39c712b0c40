"""What the workspace tests look at: the repository, its members and its tracked files."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text()) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}

MARK = "--- report ---"
IMPORT_AND_TELL = f"""
import importlib, json, sys
package = importlib.import_module(sys.argv[1])
torch = sys.modules.get("torch")
print("{MARK}" + json.dumps({{
    "loaded": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "missing": [name for name in getattr(package, "__all__", ()) if not hasattr(package, name)],
    "torch": None if torch is None else [
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ],
}}))
"""


def pytest_generate_tests(metafunc):
    """Run a test that takes ``package`` once for each member."""
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", list(PROJECTS))


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def projects():
    """The parsed pyproject.toml of every member, by distribution name."""
    return PROJECTS


@pytest.fixture(scope="session")
def repository_files(root):
    """Content of each file that a commit of everything here would hold, by relative path.

    The lock is read as staged, because uv fills in the one in the work tree.
    """

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True)

    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = sorted(set(listed.stdout.decode().split("\0")) - {""})
    files = {name: (root / name).read_bytes() for name in names if (root / name).is_file()}
    staged = git("show", ":uv.lock")
    if staged.returncode == 0:
        files["uv.lock"] = staged.stdout
    return files


@pytest.fixture(scope="session")
def uv():
    """The command line of uv: the one that runs us, else the one on PATH."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not on PATH")
    return found


@pytest.fixture(scope="session")
def fresh_import():
    """Import a package in a new interpreter; return what IMPORT_AND_TELL reports of that."""
    reports = {}

    def report(package):
        if package not in reports:
            command = [sys.executable, "-c", IMPORT_AND_TELL, package.replace("-", "_")]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            printed, _, told = done.stdout.rpartition(MARK)
            reports[package] = json.loads(told) | {"printed": printed}
        return reports[package]

    return report
