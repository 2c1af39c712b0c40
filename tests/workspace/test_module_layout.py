"""A module is one noun of the field, short enough to be read at one sitting."""

import ast

DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "base", "types"}
MAX_LINES = 600
MAX_PUBLIC_NAMES = 25


def modules(root, package):
    return sorted((root / "packages" / package / "src").rglob("*.py"))


def test_no_module_is_a_drawer(package, root):
    named = [path for path in modules(root, package) if {path.stem, path.parent.name} & DRAWERS]
    assert named == []


def test_no_python_file_is_longer_than_600_lines(repository_files):
    sizes = {name: content.count(b"\n") for name, content in repository_files.items() if name.endswith(".py")}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


def test_each_package_states_a_small_public_surface(package, root):
    path = root / "packages" / package / "src" / package.replace("-", "_") / "__init__.py"
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    assert len(listed) == 1, "__init__.py states its public names once, in __all__"
    # The version is no noun of the field and does not count.
    assert len(set(listed[0]) - {"__version__"}) <= MAX_PUBLIC_NAMES


def test_each_package_exports_what_it_lists(package, fresh_import):
    assert fresh_import(package)["missing"] == []
