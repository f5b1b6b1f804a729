"""The tests that docs/numerics.md names as proofs exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
PROOFS = re.findall(r"`(tests/\S+?\.py)::(\w+)`", PAGE)


def test_every_test_named_on_the_page_exists():
    """A claim whose test was renamed or deleted would have no proof."""
    files = {path: ROOT / path for path, _ in PROOFS}
    trees = {path: ast.parse(file.read_text(encoding="utf-8")) for path, file in files.items() if file.is_file()}
    existing = {
        (path, node.name) for path, tree in trees.items() for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    assert [f"{path}::{name}" for path, name in PROOFS if (path, name) not in existing] == []


def test_every_row_of_the_table_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(PROOFS) == len(set(PROOFS)) > 30
    wrong = [row for row in rows if len(row.split(" | ")) != 3 or not row.endswith("` |")]
    assert wrong == []
    assert [cell for row in rows for cell in row.split(" | ")[:2] if len(cell.split()) > 15] == []
