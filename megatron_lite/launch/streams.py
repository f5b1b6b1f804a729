"""Standard output and standard error that may fail: the reader is gone, the disk is full, the descriptor is closed.

A run continues without the stream that failed and reports it once. Messages of standard error then go to standard
output, or where both have failed to a file in run.dir. Other commands end at once; a reader that is gone, such as
`head`, gives them the exit code of SIGPIPE.
"""

import atexit
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE
DESCRIPTORS = {"stdout": 1, "stderr": 2}


class Owner(Protocol):
    """Decides what a failure means; `text` was not written."""

    def on_failure(self, name: str, error: Exception, text: str) -> None: ...


class Output:
    """The stream sys.stdout or sys.stderr, flushed after each line, whose failures its owner handles."""

    def __init__(self, name: str, owner: Owner) -> None:
        stream = getattr(sys, name)
        self.name, self.owner = name, owner
        self.stream: TextIO = stream.stream if isinstance(stream, Output) else stream or _opened(name)
        self._unwritten = ""
        setattr(sys, name, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._unwritten += text
        try:
            self.stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: closed, or no code for a character
            self._fail(error)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
            self._unwritten = ""
        except (OSError, ValueError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        text, self._unwritten = self._unwritten, ""
        self.owner.on_failure(self.name, error, text)

    def discard(self) -> None:
        """Empties the buffer, which Python would try to write at exit, and report."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
            self.stream.flush()


class _Command:
    """Ends the process: a command whose output is lost has nothing left to do."""

    def on_failure(self, name: str, error: Exception, text: str) -> None:
        sys.stdout.discard()  # type: ignore[attr-defined]
        if isinstance(error, BrokenPipeError):
            raise SystemExit(BROKEN_PIPE_EXIT_CODE)
        print(f"{name}: cannot write: {_reason(error)}", file=sys.stderr)
        raise SystemExit(1)


class _Run:
    """Continues; the other stream, or a file in run.dir, gets what must not be lost."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.closed = {name for name in DESCRIPTORS if getattr(sys, name) is None}
        self._failed: set[str] = set()
        self._is_passing_on = False

    def on_failure(self, name: str, error: Exception, text: str) -> None:
        if name == "stdout" and not self._is_passing_on:
            text = ""  # progress, which is in metrics.jsonl too
        if name not in self._failed:
            self._failed.add(name)
            atexit.register(getattr(sys, name).discard)
            rows = f"; {self.folder}/metrics.jsonl has every iteration" if self.folder and name == "stdout" else ""
            text = f"{name}: cannot write: {_reason(error)}; the run continues without it{rows}\n{text}"
        if text:
            self._pass_on(text, "stderr" if name == "stdout" else "stdout")

    def _pass_on(self, text: str, other: str) -> None:
        if other not in self._failed | self.closed:
            self._is_passing_on = True
            getattr(sys, other).write(text)
            self._is_passing_on = False
        elif self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / "lost_output.txt").open("a", encoding="utf-8") as file:
                    file.write(text)


def end_with_lost_output() -> None:
    """From here on this process ends, without a traceback, when standard output fails. A closed one loses its text."""
    if sys.stdout is not None:
        Output("stdout", _Command())


def survive_lost_output(folder: Path | None) -> None:
    """From here on this process continues when standard output or standard error fails.

    folder  run.dir; None: not known yet
    """
    owner, is_new = getattr(sys.stdout, "owner", None), False
    if not isinstance(owner, _Run):
        owner, is_new = _Run(), True
        for name in DESCRIPTORS:
            Output(name, owner)
    owner.folder = folder or owner.folder
    if is_new and os.environ.get("RANK", "0") == "0":  # others write nothing there but their errors
        for name in sorted(owner.closed):
            owner.on_failure(name, ValueError("it is closed"), "")


def _opened(name: str) -> TextIO:
    """A stream for one that is closed: /dev/null takes its descriptor, which the next file would get otherwise, and
    with it what libraries print."""
    descriptor = DESCRIPTORS[name]
    try:
        os.fstat(descriptor)  # it belongs to another file already
        return open(os.devnull, "w", encoding="utf-8")
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        if null != descriptor:
            os.close(null)
        os.set_inheritable(descriptor, True)
        return open(descriptor, "w", encoding="utf-8", closefd=False)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
