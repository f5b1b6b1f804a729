"""The public names of the package: `__all__`, the docstring, type checkers and Python agree on them."""

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", megatron_lite.__all__)
def test_a_public_name_has_a_docstring_and_is_what_type_checkers_read(name):
    """An editor would show the signature of another function, or none."""
    found = getattr(megatron_lite, name)
    assert found.__doc__ and found.__doc__.strip()
    assert found is getattr(import_module(declared()[name]), name)


def test_all_lists_exactly_the_declared_and_documented_names():
    assert sorted(declared()) == megatron_lite.__all__
    assert set(megatron_lite.__all__) <= DOCUMENTED


def in_a_new_process(expression: str) -> Any:
    """The value of an expression after `import megatron_lite`, where no other test has loaded a module."""
    code = f"import json, sys, megatron_lite; print(json.dumps(sorted({expression})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout)


def test_no_other_public_name_exists():
    """A user would depend on a name that is not meant for scripts."""
    assert [name for name in in_a_new_process("vars(megatron_lite)") if not name.startswith("_")] == []
    assert dir(megatron_lite) == sorted([*megatron_lite.__all__, "__version__"])


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'megatron_lite' has no attribute 'pretrian'$"):
        megatron_lite.pretrian  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("expression", ["sys.modules", "megatron_lite.load_config and sys.modules"])
def test_importing_the_package_loads_no_torch(expression):
    """`--help` and the check of a config would take seconds."""
    assert not {"torch", "numpy", "typer"} & set(in_a_new_process(expression))


def test_the_version_is_that_of_the_project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*?)"', text, re.MULTILINE) == [megatron_lite.__version__]


def test_scripts_of_the_readme_import_public_names_only():
    """An example with a private import would break with any release."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    for script in blocks:
        for node in ast.walk(ast.parse(script)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megatron_lite":
                assert node.module == "megatron_lite" or (node.module or "").startswith("megatron_lite.parallel.")
                if node.module == "megatron_lite":
                    assert {alias.name for alias in node.names} <= set(megatron_lite.__all__) | MODULES
