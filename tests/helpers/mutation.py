"""Mechanical mutants: one operator, constant or statement of a file changed at random.

Source of the operators: Offutt, Lee, Rothermel, Untch and Zapf, An Experimental Determination of Sufficient Mutant
Operators, ACM TOSEM 5(2), 1996.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.mutants import Mutant

FOLDERS = ("parallel", "model", "pipeline", "ddp", "optim", "checkpoint")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SIGNS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.And: "and",
    ast.Or: "or",
}
Change = tuple[int, str, str]  # number of the line from 1, the full line, the new one


def changes(source: str) -> list[Change]:
    """All changes of one line of a source, without those of messages, annotations, decorators and assertions."""
    tree, lines = ast.parse(source), source.splitlines()
    found: list[Change] = []
    for node in _computing(tree):
        found += [change for change in _of_node(node, lines) if change[1] != change[2]]
    return [change for change in dict.fromkeys(found) if _compiles(source, lines, change)]


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """The node and its parts that compute something at run time."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for part in value if isinstance(value, list) else [value]:
            is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
            if (
                isinstance(part, ast.AST)
                and not is_text
                and not isinstance(part, ast.Raise | ast.Assert | ast.JoinedStr)
            ):
                yield from _computing(part)


def _of_node(node: ast.AST, lines: list[str]) -> Iterator[Change]:
    if isinstance(node, ast.BinOp):
        yield from _swap(node.left, node.op, node.right, lines)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _swap(node.left, node.ops[0], node.comparators[0], lines)
    elif isinstance(node, ast.BoolOp):
        yield from _swap(node.values[0], node.op, node.values[1], lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _replace(node, node.operand.col_offset, "", lines)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
        yield from _replace(node, node.end_col_offset or 0, new, lines)
    elif isinstance(node, ast.AugAssign | ast.Expr) or (isinstance(node, ast.If) and not node.orelse):
        end = node.end_lineno or node.lineno
        if end == node.lineno:
            yield from _replace(node, node.end_col_offset or 0, "pass", lines)


def _swap(left: ast.expr, operator: ast.AST, right: ast.expr, lines: list[str]) -> Iterator[Change]:
    if left.end_lineno != right.lineno or type(operator) not in SWAPS:
        return
    line = lines[right.lineno - 1]
    start, end = left.end_col_offset or 0, right.col_offset
    between, sign = line[start:end], SIGNS[type(operator)]
    if between.count(sign) == 1 and line.isascii():
        new = between.replace(sign, SIGNS[SWAPS[type(operator)]])
        yield right.lineno, line, line[:start] + new + line[end:]


def _replace(node: ast.expr | ast.stmt, end: int, new: str, lines: list[str]) -> Iterator[Change]:
    line = lines[node.lineno - 1]
    if line.isascii() and node.lineno == node.end_lineno:
        yield node.lineno, line, line[: node.col_offset] + new + line[end:]


def _compiles(source: str, lines: list[str], change: Change) -> bool:
    number, _, new = change
    try:
        compile("\n".join([*lines[: number - 1], new, *lines[number:]]), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def random_mutants(root: Path, count: int, seed: int) -> list[tuple[Mutant, int]]:
    """`count` mutants of FOLDERS, and the number of the changed line; each line of code is as likely as another."""
    candidates: list[tuple[str, Change]] = []
    for folder in FOLDERS:
        for path in sorted((root / "megatron_lite" / folder).rglob("*.py")):
            name = str(path.relative_to(root))
            candidates += [(name, change) for change in changes(path.read_text(encoding="utf-8"))]
    by_line: dict[tuple[str, int], list[Change]] = {}
    for name, change in candidates:
        by_line.setdefault((name, change[0]), []).append(change)
    chooser = random.Random(seed)
    chosen = chooser.sample(sorted(by_line), count)
    return [
        (Mutant(f"{name}:{number}", old.strip() + "  ->  " + new.strip(), name, old, new), number)
        for name, number in chosen
        for _, old, new in [chooser.choice(by_line[name, number])]
    ]
