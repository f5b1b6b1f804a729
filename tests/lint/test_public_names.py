"""The public names of the package: `__all__`, the docstring, type checkers and Python agree on them."""

import ast
import re
from importlib import import_module
from pathlib import Path

import megatron_lite

ROOT = Path(megatron_lite.__file__).resolve().parents[1]
TREE = ast.parse(Path(megatron_lite.__file__).read_text(encoding="utf-8"))
DOCUMENTED = set(re.findall(r"\w+", (megatron_lite.__doc__ or "").partition("Everything else")[0]))
# Submodules that the docstring names.
MODULES = {"mpu", "parallel"}


def declared() -> dict[str, str]:
    """Public name -> module, as type checkers read them from the block `if TYPE_CHECKING`."""
    (block,) = [node for node in TREE.body if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute)]
    return {
        alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_every_public_name_has_a_docstring_and_is_what_type_checkers_read():
    """An editor would show the signature of another function, or none."""
    names = megatron_lite.__all__
    assert [name for name in names if not (getattr(megatron_lite, name).__doc__ or "").strip()] == []
    modules = {name: import_module(module) for name, module in declared().items()}
    assert [name for name in names if getattr(megatron_lite, name) is not getattr(modules[name], name)] == []


def test_all_lists_exactly_the_declared_and_documented_names():
    assert sorted(declared()) == megatron_lite.__all__
    assert set(megatron_lite.__all__) <= DOCUMENTED


def test_the_version_is_that_of_the_project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*?)"', text, re.MULTILINE) == [megatron_lite.__version__]


def test_scripts_of_the_readme_import_public_names_only():
    """An example with a private import would break with any release."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    allowed = {f"megatron_lite.{name}" for name in (*megatron_lite.__all__, *MODULES)}
    imports = [node for script in blocks for node in ast.walk(ast.parse(script)) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    own = [name for name in names if name.startswith("megatron_lite.") and name not in allowed]
    assert [name for name in own if not name.startswith("megatron_lite.parallel.")] == []
