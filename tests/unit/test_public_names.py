"""What a script gets from `import megatron_lite`: the public names, no other name, and no heavy module."""

import json
import subprocess
import sys
from typing import Any

import pytest

import megatron_lite
from tests.helpers.command import ROOT


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
