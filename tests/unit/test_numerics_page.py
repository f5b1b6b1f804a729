"""The tests that docs/numerics.md names as proofs exist."""

import ast
import re

import pytest

from tests.helpers.command import ROOT

PAGE = (ROOT / "docs" / "numerics.md").read_text()
PROOFS = re.findall(r"`(tests/\S+?\.py)::(\w+)`", PAGE)


@pytest.mark.parametrize("path, name", PROOFS, ids=[f"{path}::{name}" for path, name in PROOFS])
def test_a_test_named_on_the_page_exists(path, name):
    """A claim whose test was renamed or deleted would have no proof."""
    source = ROOT / path
    assert source.is_file(), f"docs/numerics.md names {path}, which does not exist"
    found = [node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in found, f"docs/numerics.md names {path}::{name}, which does not exist"


def test_every_row_of_the_table_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(PROOFS) == len(set(PROOFS)) > 30
    for row in rows:
        assert len(row.split(" | ")) == 3 and row.endswith("` |"), row
        for cell in row.split(" | ")[:2]:
            assert len(cell.split()) <= 15, cell
