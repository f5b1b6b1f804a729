"""The floors of the package: which folder may import which, and the size limits of core, files and functions.

Tests have one rule: code that two test modules need is in tests/helpers/.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_lite"
# The folders that one reads to understand training, from the lowest floor to the highest.
CORE = [
    {"__version__", "errors", "files", "crc32", "text"},
    {"config"},
    {"parallel"},
    {"model", "pipeline", "data"},
    {"ddp"},
    {"optim"},
    {"checkpoint"},
    {"training"},
]
# The folders with features for users. They import the core; the core reaches them through hooks that `cli` passes.
RING = [
    {"architectures", "attentions", "megatron_calls", "mpu", "named_functions", "targets", "tokenizer_files"},
    {"engines", "observers", "stored_data"},
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
BUDGET = 13_600
# These files explain an algorithm of the papers; training does not need them to be read.
TEACHING = {"model/flash_tiled.py", "model/flash_triton.py", "model/flash_triton_tiles.py"}
# Kernels: the same arithmetic as eager functions of the core, which a reader can skip.
KERNELS = {
    *("model/fused_triton.py", "model/bf16_attention.py", "model/cudnn_attention.py", "model/functions.py"),
    *("parallel/loss_triton.py", "parallel/fp32_products.py"),
}

TESTS = Path(__file__).resolve().parents[1]


@cache
def sources(folder: Path) -> dict[str, str]:
    """The source of every Python file in a folder, by its name relative to the folder."""
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))}


class Contents(NamedTuple):
    """What the rules need of a source."""

    imports: list[tuple[int, str]]  # line and full module name, at any depth; `from p import n` of ours counts as p.n
    imports_at_the_top: list[str]
    functions: list[tuple[str, int]]  # name and number of lines
    strings: list[str]


@cache
def contents(source: str) -> Contents:
    """The parts of a source that the rules are about."""
    module = ast.parse(source)
    found = Contents([], [], [], [])
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.extend((node.lineno, name) for name in imported(node))
        elif isinstance(node, ast.FunctionDef):
            found.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.append(node.value)
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports_at_the_top.extend(imported(node))
    return found


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The full names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = "." * node.level + (node.module or "")
    if module == "megatron_lite" or module.startswith("tests"):
        return [f"{module}.{alias.name}" for alias in node.names]
    return [module]


def folder_of(name: str) -> str:
    return Path(name).parts[0].removesuffix(".py")


def violations(name: str, source: str) -> list[str]:
    """Imports of the file `name` (relative to the package) that go up or sideways."""
    if name in EXEMPT:
        return []
    own = folder_of(name)
    wrong = []
    for line, module in contents(source).imports:
        first, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if first == "":
            wrong.append(f"{name}:{line}: relative import {module}; write the full name")
        elif first == "torch" and FLOOR_OF[own] <= FLOOR_OF["config"]:
            wrong.append(f"{name}:{line}: floor {FLOOR_OF[own]} must not load torch")
        elif first == "megatron_lite" and target == "mpu" and own != "mpu":
            if name not in REGISTER_WITH_MPU:
                wrong.append(f"{name}:{line}: mpu is for scripts outside the package")
        elif first == "megatron_lite" and target != own and FLOOR_OF[target] >= FLOOR_OF[own] and target != "errors":
            wrong.append(f"{name}:{line}: {own} (floor {FLOOR_OF[own]}) imports {module} (floor {FLOOR_OF[target]})")
    return wrong


def excess(core: dict[str, str]) -> list[str]:
    """A message when the core, given as file name -> source, has more than BUDGET non-blank lines."""
    size = sum(
        bool(line.strip())
        for name, source in core.items()
        if (FLOOR_OF.get(folder_of(name), len(CORE)) < len(CORE) and name not in TEACHING | KERNELS)
        for line in source.splitlines()
    )
    return [f"the core has {size:,} non-blank lines, and its budget is {BUDGET:,}"] if size > BUDGET else []


def test_a_file_imports_only_from_lower_floors_and_its_own_package():
    """An import upwards, lazy ones too, means that a lower part cannot be read or tested alone."""
    assert [line for name, source in sources(PACKAGE).items() for line in violations(name, source)] == []


def test_the_check_finds_wrong_imports():
    """A check that accepts every import would be useless."""
    wrong = [
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
    ]
    assert [(name, source) for name, source in wrong if len(violations(name, source)) != 1] == []


def test_no_module_imports_deepspeed_at_its_top():
    """The import takes a second, and most runs do not need it."""
    assert [name for name, source in sources(PACKAGE).items() if loads_deepspeed(source)] == []
    assert loads_deepspeed("import deepspeed.ops") and loads_deepspeed("from deepspeed.ops import adam")
    assert not loads_deepspeed("def late():\n    import deepspeed")


def loads_deepspeed(source: str) -> bool:
    return any(name.partition(".")[0] == "deepspeed" for name in contents(source).imports_at_the_top)


def test_the_core_stays_within_its_budget():
    """A larger core would be too long for one person to read. Move a feature to the ring, or simplify."""
    assert excess(sources(PACKAGE)) == []


def test_the_budget_counts_only_non_blank_lines_of_the_core():
    """Blank lines and the ring do not count; code, comments and docstrings do."""
    lines = "x = 1\n\n# why\n" * (BUDGET // 2)
    assert excess({"model/gpt.py": lines, "cli/run.py": lines}) == []
    assert excess({"model/gpt.py": lines, "errors.py": "x = 1\n"}) == [
        f"the core has {BUDGET + 1:,} non-blank lines, and its budget is {BUDGET:,}"
    ]


def test_files_stay_under_400_lines_and_functions_under_80():
    """A longer one has a second idea, which belongs in another file or function."""
    long = []
    for name, source in sources(PACKAGE).items():
        size = len(source.splitlines())
        if size > (500 if name == "config/schema.py" else 400):  # a table of two lines a field
            long.append(f"{name}: {size} lines")
        long += [f"{name}: {function}: {lines} lines" for function, lines in contents(source).functions if lines > 80]
    assert long == []


def imported_test_modules(name: str, source: str) -> list[str]:
    """Test modules that the file `name` (relative to tests/) imports, also in programs within its strings.

    A file may name itself as the place of a function that ranks run. Relative imports count as wrong.
    """
    own = f"tests.{name.removesuffix('.py').replace('/', '.')}"
    modules = [module for _, module in contents(source).imports]
    texts = modules + contents(source).strings
    named = re.findall(r"(from |import )?\b(tests\.\w+\.test_\w+)", "\n".join(texts))
    relative = [module for module in modules if module.startswith(".")]
    return relative + [module for statement, module in named if statement or module != own]


def test_no_test_module_is_imported():
    """Otherwise a test cannot be changed or run without another one; shared code belongs in tests/helpers/."""
    imported = {name: imported_test_modules(name, source) for name, source in sources(TESTS).items()}
    assert {name: modules for name, modules in imported.items() if modules} == {}


def test_the_check_finds_an_imported_test_module():
    """A check that accepts every import would be useless."""
    # Here {other} and {own} are test modules; spelled out, they would be imports of this file.
    wrong = [
        "from tests.dist.{other} import alive",
        "from tests.dist import {other}",
        "from .{other} import alive",
        "def late():\n    import tests.dist.{other}",
        "PROGRAM = 'import sys; from tests.dist.{other} import alive'",
        "OWN_PROGRAM = 'from tests.lint.{own} import excess'",
        "preload(['tests.dist.{other}'])",
    ]
    found = {source: imported_in_this_file(source) for source in wrong}
    assert {source: modules for source, modules in found.items() if len(modules) != 1} == {}


def test_a_test_module_may_import_helpers_and_name_its_own_functions():
    """Ranks import the functions that they run from the module of their test."""
    assert imported_in_this_file("from tests.helpers.tiny import next_microbatches") == []
    assert imported_in_this_file("launch('tests.lint.{own}:hang')") == []


def imported_in_this_file(source: str) -> list[str]:
    """Test modules that this file would import with this source."""
    return imported_test_modules("lint/test_floors.py", source.format(other="test_memory", own="test_floors"))
