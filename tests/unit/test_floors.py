"""The floors of the package: which folder may import which, and the size limits of core, files and functions.

Tests have one rule: code that two test modules need is in tests/helpers/.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_lite"
# The folders that one reads to understand training, from the lowest floor to the highest.
CORE = [
    {"__version__", "errors", "files", "crc32", "text", "config"},
    {"parallel"},
    {"model", "pipeline", "data"},
    {"ddp"},
    {"optim"},
    {"checkpoint"},
    {"training"},
]
# The folders with features for users. They import the core; the core reaches them through hooks that `cli` passes.
RING = [
    {"mpu"},
    {"engines"},
    {"plan"},
    {"convert", "preprocess", "generate"},
    {"evaluation"},
    {"launch"},
    {"doctor"},
    {"cli"},
]
FLOOR_OF = {name: floor for floor, names in enumerate(CORE + RING) for name in names}
# These files only re-export names of other files.
EXEMPT = {"__init__.py", "__main__.py"}
# The files that register the context of a run with `mpu`, and the current chunk of its model.
REGISTER_WITH_MPU = {"training/initialize.py", "training/provider.py"}
# Non-blank lines of the core, docstrings included. It is not raised further: move a feature to the ring instead.
BUDGET = 13_050
# These files explain an algorithm of the papers; training does not need them to be read.
TEACHING = {"model/flash_tiled.py", "model/flash_triton.py"}
# Kernels: the same arithmetic as eager functions of the core, which a reader can skip.
KERNELS = {
    *("model/fused_triton.py", "model/bf16_attention.py", "model/cudnn_attention.py", "model/functions.py"),
    *("parallel/loss_triton.py", "parallel/fp32_products.py"),
}

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(file.relative_to(PACKAGE)) for file in FILES]


def folder_of(name: str) -> str:
    return Path(name).parts[0].removesuffix(".py")


def imports(source: str) -> list[tuple[int, str]]:
    """Line and full module name of every import, at any depth; `from package import name` counts as package.name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [module]
            if module == "megatron_lite" or module.startswith("tests"):
                names = [f"{module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names]
    return found


def violations(name: str, source: str) -> list[str]:
    """Imports of the file `name` (relative to the package) that go up or sideways."""
    if name in EXEMPT:
        return []
    own = folder_of(name)
    wrong = []
    for line, module in imports(source):
        first, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if first == "":
            wrong.append(f"{name}:{line}: relative import {module}; write the full name")
        elif first == "torch" and FLOOR_OF[own] == 0:
            wrong.append(f"{name}:{line}: floor 0 must not load torch")
        elif first == "megatron_lite" and target == "mpu" and own != "mpu":
            if name not in REGISTER_WITH_MPU:
                wrong.append(f"{name}:{line}: mpu is for scripts outside the package")
        elif first == "megatron_lite" and target != own and FLOOR_OF[target] >= FLOOR_OF[own] and target != "errors":
            wrong.append(f"{name}:{line}: {own} (floor {FLOOR_OF[own]}) imports {module} (floor {FLOOR_OF[target]})")
    return wrong


def excess(sources: dict[str, str]) -> list[str]:
    """A message when the core, given as file name -> source, has more than BUDGET non-blank lines."""
    size = sum(
        bool(line.strip())
        for name, source in sources.items()
        if (FLOOR_OF.get(folder_of(name), len(CORE)) < len(CORE) and name not in TEACHING | KERNELS)
        for line in source.splitlines()
    )
    return [f"the core has {size:,} non-blank lines, and its budget is {BUDGET:,}"] if size > BUDGET else []


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
        ("training/start.py", "def late():\n    from megatron_lite.convert.driver import recognised"),
        ("training/pretrain.py", "from megatron_lite.launch.nodes import Nodes"),
        ("convert/driver.py", "import megatron_lite.launch.nodes"),
    ],
)
def test_the_check_finds_wrong_imports(name, source):
    """A check that accepts every import would be useless."""
    assert len(violations(name, source)) == 1


def test_the_core_stays_within_its_budget():
    """A larger core would be too long for one person to read. Move a feature to the ring, or simplify."""
    assert excess({name: (PACKAGE / name).read_text(encoding="utf-8") for name in NAMES}) == []


def test_the_budget_counts_only_non_blank_lines_of_the_core():
    """Blank lines and the ring do not count; code, comments and docstrings do."""
    lines = "x = 1\n\n# why\n" * (BUDGET // 2)
    assert excess({"model/gpt.py": lines, "cli/run.py": lines}) == []
    assert excess({"model/gpt.py": lines, "errors.py": "x = 1\n"}) == [
        f"the core has {BUDGET + 1:,} non-blank lines, and its budget is {BUDGET:,}"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_files_stay_under_400_lines_and_functions_under_80(name):
    """A longer one has a second idea, which belongs in another file or function."""
    source = (PACKAGE / name).read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    long = [f"{node.name}: {_lines(node)} lines" for node in functions if _lines(node) > 80]
    assert len(source.splitlines()) <= (500 if name == "config/schema.py" else 400)  # a table of two lines a field
    assert long == []


def _lines(node: ast.FunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def imported_test_modules(name: str, source: str) -> list[str]:
    """Test modules that the file `name` (relative to tests/) imports, also in programs within its strings.

    A file may name itself as the place of a function that ranks run. Relative imports count as wrong.
    """
    own = f"tests.{name.removesuffix('.py').replace('/', '.')}"
    modules = [module for _, module in imports(source)]
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    texts = modules + [value for value in constants if isinstance(value, str)]
    named = re.findall(r"(from |import )?\b(tests\.\w+\.test_\w+)", "\n".join(texts))
    relative = [module for module in modules if module.startswith(".")]
    return relative + [module for statement, module in named if statement or module != own]


@pytest.mark.parametrize("name", [str(file.relative_to(TESTS)) for file in sorted(TESTS.rglob("*.py"))])
def test_no_test_module_is_imported(name):
    """Otherwise a test cannot be changed or run without another one; shared code belongs in tests/helpers/."""
    assert imported_test_modules(name, (TESTS / name).read_text(encoding="utf-8")) == []


# Here {other} and {own} are test modules; spelled out, they would be imports of this file.
@pytest.mark.parametrize(
    "source",
    [
        "from tests.dist.{other} import alive",
        "from tests.dist import {other}",
        "from .{other} import alive",
        "def late():\n    import tests.dist.{other}",
        "PROGRAM = 'import sys; from tests.dist.{other} import alive'",
        "OWN_PROGRAM = 'from tests.unit.{own} import excess'",
        "preload(['tests.dist.{other}'])",
    ],
)
def test_the_check_finds_an_imported_test_module(source):
    """A check that accepts every import would be useless."""
    source = source.format(other="test_memory", own="test_floors")
    assert len(imported_test_modules("unit/test_floors.py", source)) == 1


@pytest.mark.parametrize(
    "source", ["from tests.helpers.tiny import next_microbatches", "launch('tests.unit.{own}:hang')"]
)
def test_a_test_module_may_import_helpers_and_name_its_own_functions(source):
    """Ranks import the functions that they run from the module of their test."""
    assert imported_test_modules("unit/test_floors.py", source.format(own="test_floors")) == []
