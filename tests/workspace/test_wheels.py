"""What is published: a wheel per package, with all of its files and its ranges."""

import subprocess
import zipfile
from email.parser import HeaderParser

import pytest
from packaging.requirements import Requirement


@pytest.fixture(scope="module")
def built(root, uv, tmp_path_factory):
    """Build the wheel of a package once and open it."""
    wheels = {}

    def build(package):
        if package not in wheels:
            out = tmp_path_factory.mktemp(package)
            # uv carries the build backend of the members itself, so this works without a network.
            command = [uv, "build", "--offline", "--package", package, "--wheel", "-o", str(out)]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (wheel,) = out.glob("*.whl")
            wheels[package] = zipfile.ZipFile(wheel)
        return wheels[package]

    yield build
    for wheel in wheels.values():
        wheel.close()


def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return HeaderParser().parsestr(wheel.read(name).decode())


def test_a_wheel_holds_every_source_and_asset_of_its_package(package, root, built):
    source = root / "packages" / package / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in built(package).namelist() if ".dist-info/" not in name}
    assert {name for name in packed if not name.endswith("/")} == expected
    assert f"{package.replace('-', '_')}/py.typed" in expected


def test_the_robot_descriptions_travel_in_the_wheel(built):
    names = built("nerd-coupling").namelist()
    assert "nerd_coupling/assets/go2.xml" in names


def test_a_wheel_carries_the_version_and_the_ranges_of_its_pyproject(package, projects, built):
    header = metadata(built(package))
    project = projects[package]["project"]
    assert (header["Name"], header["Version"]) == (package, project["version"])
    assert header["License-Expression"] == "Apache-2.0"
    wanted = {Requirement(line) for line in project["dependencies"]}
    packed = {Requirement(line) for line in header.get_all("Requires-Dist", [])}
    assert {requirement for requirement in packed if requirement.marker is None} == wanted


def test_no_wheel_is_larger_than_8_mib(package, built):
    assert sum(entry.compress_size for entry in built(package).infolist()) < 8 * 2**20
