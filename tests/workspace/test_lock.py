"""The lock pins versions and hashes, and names no package index."""

import importlib.util
import subprocess
import sys
import tomllib

import pytest

INDEX = "https://index.example/simple"
HASH = "sha256:" + "0" * 64
AS_UV_WRITES_IT = """version = 1

[[package]]
name = "alpha"
version = "1.0"
source = { registry = "INDEX" }
dependencies = [
    { name = "beta", version = "2.0", source = { registry = "INDEX" } },
]
sdist = { url = "https://files.example/a/b/alpha-1.0.tar.gz", hash = "HASH", size = 1 }
wheels = [
    { url = "https://files.example/c/alpha-1.0%2Bcpu-py3-none-any.whl#x", hash = "HASH" },
]

[[package]]
name = "member"
version = "0.1.0"
source = { editable = "packages/member" }

[package.metadata]
requires-dist = [
    { name = "alpha", extras = ["sim"] },
    { name = "beta", specifier = ">=2" },
]
provides-extras = ["engine"]

[[package]]
name = "other"
version = "0.1.0"
source = { editable = "packages/other" }

[package.metadata]
requires-dist = [{ name = "member", editable = "packages/member" }]
""".replace("HASH", HASH).replace("INDEX", INDEX)

NEUTRAL = """version = 1

[[package]]
name = "alpha"
version = "1.0"
source = { registry = "pypi" }
dependencies = [
    { name = "beta", version = "2.0", source = { registry = "pypi" } },
]
sdist = { path = "alpha-1.0.tar.gz", hash = "HASH", size = 1 }
wheels = [
    { path = "alpha-1.0+cpu-py3-none-any.whl", hash = "HASH" },
]

[[package]]
name = "member"
version = "0.1.0"
source = { editable = "packages/member" }

[package.metadata]
provides-extras = ["engine"]

[[package]]
name = "other"
version = "0.1.0"
source = { editable = "packages/other" }

[package.metadata]
""".replace("HASH", HASH)


@pytest.fixture(scope="module")
def lock(root):
    spec = importlib.util.spec_from_file_location("lock", root / "scripts" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_lock_names_no_host(repository_files):
    text = repository_files["uv.lock"].decode()
    assert "://" not in text
    for package in tomllib.loads(text)["package"]:
        assert package["source"].get("registry", "pypi") == "pypi"


def test_the_lock_in_the_work_tree_pins_what_is_committed(root):
    # Under `uv run` the lock has just been filled in, so this compares a real resolution.
    command = [sys.executable, "scripts/lock.py", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_registry_file_in_the_committed_lock_has_a_hash(repository_files, lock):
    pins = lock.pins(repository_files["uv.lock"].decode())
    assert {"torch", "mujoco", "newton"} <= {name for name, _ in pins}
    for files in pins.values():
        assert files
        assert all(value.startswith("sha256:") for value in files.values())


def test_a_lock_from_uv_becomes_neutral_and_stays_so(lock):
    assert lock.neutralise(AS_UV_WRITES_IT) == NEUTRAL
    assert lock.neutralise(NEUTRAL) == NEUTRAL


def test_neutralising_changes_no_pin(lock):
    pins = lock.pins(AS_UV_WRITES_IT.replace("#x", ""))
    assert pins == lock.pins(NEUTRAL)
    assert pins == {
        ("alpha", "1.0"): {
            "alpha-1.0.tar.gz": HASH,
            "alpha-1.0+cpu-py3-none-any.whl": HASH,
        }
    }


def test_a_source_that_cannot_be_made_neutral_is_refused(lock):
    text = AS_UV_WRITES_IT.replace('editable = "packages/other"', 'git = "https://code.example/o"')
    with pytest.raises(ValueError, match=r"expected sources from a registry only.*code\.example"):
        lock.neutralise(text)


def test_another_version_or_hash_is_a_difference_and_a_further_wheel_is_none(lock):
    committed = {("alpha", "1.0"): {"a.whl": "sha256:1"}}
    assert lock.differences(committed, {("alpha", "1.0"): {"a.whl": "sha256:1", "b.whl": "2"}}) == []
    assert lock.differences(committed, {("alpha", "1.1"): {"a.whl": "sha256:1"}}) == [
        "alpha 1.0: only committed",
        "alpha 1.1: only resolved",
    ]
    assert lock.differences(committed, {("alpha", "1.0"): {"a.whl": "sha256:2"}}) == [
        "a.whl: committed sha256:1, got sha256:2"
    ]
