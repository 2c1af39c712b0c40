"""docs/paper-map.md ties each promise to a test; a promise without its test is none."""

import ast
import re

import pytest

NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")


@pytest.fixture(scope="module")
def rows(root):
    page = root / "docs" / "paper-map.md"
    if not page.exists():
        pytest.skip("there is no docs/paper-map.md yet")
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    # The first two lines of a table are its head and the rule below it.
    heads = {
        number + offset for number, line in enumerate(lines) if re.fullmatch(r"[|\s:-]+", line) for offset in (-1, 0)
    }
    return [line for number, line in enumerate(lines) if number not in heads]


def test_every_row_of_the_paper_map_names_a_test(rows):
    assert rows
    assert [row for row in rows if not NAMED.search(row)] == []


def test_every_test_in_the_paper_map_exists(rows, root):
    missing = []
    for path, name in {found for row in rows for found in NAMED.findall(row)}:
        file = root / path
        tree = ast.parse(file.read_text()) if file.exists() else None
        defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)} if tree else set()
        if tree is None or (name and name not in defined):
            missing.append(f"{path}::{name}" if name else path)
    assert missing == []
