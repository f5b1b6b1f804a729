"""The borders of the package: who may import whom, and how large a file may grow."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_lite"
FLOORS = [
    {"__version__", "errors", "config"},
    {"parallel"},
    {"model", "pipeline", "data"},
    {"ddp"},
    {"optim"},
    {"checkpoint"},
    {"training", "plan"},
    {"cli"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# They only give other files' names, lazily or at the edge.
EXEMPT = {"__init__.py", "__main__.py", "mpu.py"}
# The one place that tells `mpu` which context to answer for.
REGISTERS_MPU = "training/initialize.py"

FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(file.relative_to(PACKAGE)) for file in FILES]


def imports(source: str) -> list[tuple[int, str]]:
    """Line and full module name of every import, at any depth; `from package import name` counts as package.name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "megatron_lite" else [module]
            found += [(node.lineno, name) for name in names]
    return found


def violations(name: str, source: str) -> list[str]:
    """Imports of the file `name` (relative to the package) that go up or sideways."""
    if name in EXEMPT:
        return []
    own = Path(name).parts[0].removesuffix(".py")
    wrong = []
    for line, module in imports(source):
        first, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if first == "":
            wrong.append(f"{name}:{line}: relative import {module}; write the full name")
        elif first == "torch" and FLOOR_OF[own] == 0:
            wrong.append(f"{name}:{line}: floor 0 must not load torch")
        elif first == "megatron_lite" and target == "mpu":
            if name != REGISTERS_MPU:
                wrong.append(f"{name}:{line}: mpu is for scripts outside the package")
        elif first == "megatron_lite" and target != own and FLOOR_OF[target] >= FLOOR_OF[own] and target != "errors":
            wrong.append(f"{name}:{line}: {own} (floor {FLOOR_OF[own]}) imports {module} (floor {FLOOR_OF[target]})")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_a_file_imports_only_from_lower_floors_and_its_own_package(name):
    """An import upwards, lazy ones too, means that a lower part cannot be read or tested alone."""
    assert violations(name, (PACKAGE / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "name, source",
    [
        ("parallel/grid.py", "from megatron_lite.training.step import train_step"),
        ("model/gpt.py", "from megatron_lite.data.loader import Batch"),
        ("model/gpt.py", "import megatron_lite.ddp.wrap"),
        ("model/gpt.py", "from megatron_lite import data"),
        ("model/gpt.py", "from .mlp import MLP"),
        ("model/gpt.py", "from megatron_lite import mpu"),
        ("config/load.py", "def late():\n    import torch.distributed"),
    ],
)
def test_the_check_sees_wrong_imports(name, source):
    """A check that accepts everything would keep no border."""
    assert len(violations(name, source)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_files_stay_under_400_lines_and_functions_under_80(name):
    """Past that, there is a second idea in it that wants a file or a function of its own."""
    source = (PACKAGE / name).read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    long = [f"{node.name}: {_lines(node)} lines" for node in functions if _lines(node) > 80]
    assert len(source.splitlines()) <= 400
    assert long == []


def _lines(node: ast.FunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1
