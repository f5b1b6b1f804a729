"""The line of the package that starts an operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

# Layers that many lines call; the caller tells more.
SHARED = ("parallel/linear.py", "parallel/collectives.py", "model/fused.py", "model/fusion.py", "model/norms.py")
PACKAGE = f"{Path(__file__).parents[1]}/"  # in full: a checkout of the same name may also have torch in it

_is_left_out = False


@contextmanager
def left_out() -> Iterator[None]:
    """A context that looks for no lines, which saves a few percent of a trace's time."""
    global _is_left_out
    _is_left_out = True
    try:
        yield
    finally:
        _is_left_out = False


def is_recomputed(frame: FrameType | None) -> bool:
    """Whether torch's checkpointing called this frame, to repeat a forward in backward."""
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
        frame = frame.f_back
    return frame is not None


def package_line(frame: FrameType | None, shared: tuple[str, ...] = SHARED) -> str:
    """The innermost line of the package that a frame is in, or was called from, outside of the `shared` files.

    If there is none, the innermost line. Lines outside of the engine's call are left out: for a backward they name only
    the loop that runs all of them.
    """
    innermost = ""
    while frame is not None and not _is_left_out:
        name = _name_in_package(frame.f_code.co_filename)
        if name == "pipeline/engine.py" and innermost:
            break
        if name:
            line = f"{name}:{frame.f_lineno}"
            if name not in shared:
                return line
            innermost = innermost or line
        frame = frame.f_back
    return innermost


@cache
def _name_in_package(file: str) -> str:
    """The name of a file that may be shown; empty outside of the package, and for files of plans and of commands."""
    name = file.removeprefix(PACKAGE)
    return "" if name == file or name.startswith(("plan/", "cli/", "__main__")) else name
