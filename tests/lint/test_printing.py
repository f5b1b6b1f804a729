"""Ranks show text of others without control characters: each line that they print passes through `text.visible`.

The streams of a command do that for all it prints (`launch/streams.py`). Those of a rank leave the colours of a script.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_lite"
# In these, commands print, or `visible` stands before a variable that is printed.
EXEMPT = ("cli/", "doctor/", "launch/streams.py", "launch/submit.py", "training/console.py")
PRINTERS = ("print", "tqdm.write", "sys.stdout.write", "sys.stderr.write", "typer.echo")


def unsafe(source: str) -> list[int]:
    """The lines of calls that print an expression without `visible`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTERS:
            calls = [ast.unparse(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)]
            is_fixed = all(isinstance(word, ast.Constant) for word in node.args)
            found += [node.lineno] * (not is_fixed and "visible" not in calls)
    return found


def test_ranks_print_through_visible():
    """A task, a tensor or a file with an escape sequence in its name could rewrite the terminal."""
    files = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {name: lines for name, text in files.items() if not name.startswith(EXEMPT) and (lines := unsafe(text))}
    assert found == {}


def test_the_check_finds_a_print_of_a_name():
    """A check that accepts every call would be useless."""
    assert unsafe("print(f' WARNING: {name}', flush=True)") == [1]
    assert unsafe("if name:\n    sys.stderr.write(name)") == [2]
    assert unsafe("print(visible(name), file=sys.stderr)") == []
