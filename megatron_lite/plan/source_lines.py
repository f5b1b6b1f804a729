"""The line of the package that starts an operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from types import FrameType

# Layers that many lines call; the caller tells more.
SHARED = ("parallel/linear.py", "parallel/collectives.py", "model/fused.py", "model/fusion.py", "model/norms.py")

_is_left_out = False


@contextmanager
def left_out() -> Iterator[None]:
    """A context that looks for no lines, which saves a sixth of a trace's time."""
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
    """The innermost line of the package that a frame is in, or was called from, outside of the `shared` files."""
    if _is_left_out:
        return ""
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return first_shown(lines, shared)


def first_shown(lines: list[tuple[str, int]], shared: tuple[str, ...]) -> str:
    """The innermost line of the package outside of the shared files, else the innermost one.

    Lines outside of the engine's call are left out: for a backward they name only the loop that runs all of them.
    """
    inside = [(file.rpartition("megatron_lite/")[2], number) for file, number in lines if "megatron_lite/" in file]
    inside = [(file, number) for file, number in inside if not file.startswith(("plan/", "cli/", "__main__"))]
    of_pass = list(takewhile(lambda entry: entry[0] != "pipeline/engine.py", inside)) or inside
    chosen = next((entry for entry in of_pass if entry[0] not in shared), of_pass[0] if of_pass else ("", 0))
    return f"{chosen[0]}:{chosen[1]}" if chosen[0] else ""
