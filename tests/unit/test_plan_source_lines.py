"""The lines of code that a plan shows."""

import sys
from collections.abc import Callable

from megatron_lite.plan.source_lines import PACKAGE, left_out, package_line


def line(*files: str) -> str:
    """The line shown for an operation in the last of these files, each of which calls the next in its line 2."""
    call: Callable[[], str] = lambda: package_line(sys._getframe(1))
    for file in reversed(files):
        names = {"call": call}
        exec(compile("def function():\n    return call()", file, "exec"), names)
        call = names["function"]
    return call()


def test_the_innermost_line_outside_of_shared_layers_is_shown():
    block, linear, norms, engine, stage = (
        PACKAGE + name
        for name in ("model/block.py", "parallel/linear.py", "model/norms.py", "pipeline/engine.py", "plan/stage.py")
    )
    assert line(stage, engine, block, linear, "torch/linear.py") == "model/block.py:2"
    assert line(engine, linear, norms) == "model/norms.py:2"  # all are shared: the innermost one, not the engine's loop
    assert line(block, engine) == "pipeline/engine.py:2"
    assert line(stage, "torch/linear.py") == ""
    with left_out():
        assert line(block) == ""


def test_torch_in_a_checkout_with_the_name_of_the_package_is_not_shown():
    """Every operation would be at a line of torch."""
    assert line(f"{PACKAGE}model/block.py", "/src/megatron_lite/.venv/lib/torch/a.py") == "model/block.py:2"
