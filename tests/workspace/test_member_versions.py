"""Members are versioned independently; inside a workspace uv ignores the ranges between them."""

import re
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements(project):
    """Requirements of a project, those of its extras included."""
    table = project["project"]
    extras = table.get("optional-dependencies", {}).values()
    lines = [*table.get("dependencies", []), *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in lines]


def test_each_range_between_members_contains_the_siblings_version(projects):
    versions = {name: project["project"]["version"] for name, project in projects.items()}
    outside = [
        f"{name} wants {requirement}, the workspace has {versions[requirement.name]}"
        for name, project in projects.items()
        for requirement in requirements(project)
        if requirement.name in versions and versions[requirement.name] not in requirement.specifier
    ]
    assert outside == []


def test_each_range_between_members_ends_below_the_next_minor_version(projects):
    # While major is 0, a minor release may break: an open range would promise too much.
    for project in projects.values():
        for requirement in requirements(project):
            if requirement.name in projects:
                upper = [clause for clause in requirement.specifier if clause.operator == "<"]
                assert len(upper) == 1, f"{project['project']['name']}: {requirement}"


def test_the_folder_the_distribution_and_the_import_package_share_one_name(projects, root):
    for folder, project in projects.items():
        assert project["project"]["name"] == folder
        assert (root / "packages" / folder / "src" / folder.replace("-", "_")).is_dir()


def test_every_script_is_named_as_its_distribution(projects):
    for folder, project in projects.items():
        assert set(project["project"].get("scripts", {})) <= {folder}


def test_all_members_share_one_python_range_and_one_licence(projects):
    assert {project["project"]["requires-python"] for project in projects.values()} == {">=3.11"}
    assert {project["project"]["license"] for project in projects.values()} == {"Apache-2.0"}


def test_the_installed_version_is_the_one_in_pyproject(package, projects):
    assert metadata.version(package) == projects[package]["project"]["version"]


def test_nerd_core_requires_torch_safetensors_tyro_and_rich_only():
    always = [line for line in metadata.requires("nerd-core") if "extra ==" not in line]
    names = {canonicalize_name(re.split(r"[^\w.-]", line)[0]) for line in always}
    assert names == {"torch", "safetensors", "tyro", "rich"}
