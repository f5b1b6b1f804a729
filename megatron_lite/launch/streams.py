"""Failures of standard output and standard error: a closed pipe, a full disk, a closed descriptor.

A run continues without the failed stream and reports the failure once. Its error messages then go to standard output,
or, if both streams failed, to a file in run.dir. Other commands exit; on a closed pipe with the exit code of SIGPIPE.
"""

import atexit
import io
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron_lite.text import visible

BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE
DESCRIPTORS = {"stdout": 1, "stderr": 2}


class Owner(Protocol):
    """Decides about the text of an `Output`, and handles its failures."""

    def shown(self, name: str, text: str) -> str:
        """The text as stream `name` shows it."""
        ...

    def on_failure(self, name: str, error: Exception, text: str) -> None:
        """Handle the failure of stream `name`, which did not write `text`."""


class Output:
    """Replaces sys.stdout or sys.stderr. It flushes after each line, and its owner handles failures."""

    def __init__(self, name: str, owner: Owner) -> None:
        stream = getattr(sys, name)
        self.name, self.owner = name, owner
        self.stream: TextIO = stream.stream if isinstance(stream, Output) else stream or _open(name)
        self._unwritten = ""
        if isinstance(owner, _Command) and isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(errors="backslashreplace")  # a name may have characters outside the encoding
        setattr(sys, name, self)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer" and isinstance(self.owner, _Command):  # click would write past `write`
            raise AttributeError(name)
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        shown = self.owner.shown(self.name, text)
        self._unwritten += shown
        try:
            self.stream.write(shown)
        except (OSError, ValueError) as error:  # ValueError: closed, or a character outside the encoding
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
        """Empty the buffer; otherwise Python would fail to write it at exit, with a traceback."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
            self.stream.flush()


class _Command:
    """Shows escape sequences of names and texts of files as text. Exits without standard output, as it is useless."""

    def shown(self, name: str, text: str) -> str:
        bar = text[: len(text) - len(text.lstrip("\r"))] if name == "stderr" else ""  # of tqdm, which starts so
        return bar + visible(text.removeprefix(bar))

    def on_failure(self, name: str, error: Exception, text: str) -> None:
        if name == "stderr":
            return sys.stderr.discard()  # type: ignore[attr-defined]
        sys.stdout.discard()  # type: ignore[attr-defined]
        if isinstance(error, BrokenPipeError):
            raise SystemExit(BROKEN_PIPE_EXIT_CODE)
        print(f"{name}: cannot write: {_reason(error)}", file=sys.stderr)
        raise SystemExit(1)


class _Run:
    """Continues. Error messages go to the other stream or to a file in run.dir.

    Text stays as it is: a script may print colours. The lines of the program are made `visible` where it prints them.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.closed = {name for name in DESCRIPTORS if getattr(sys, name) is None}
        self._failed: set[str] = set()
        self._is_forwarding = False  # True while the other stream writes a message

    def shown(self, name: str, text: str) -> str:
        return text

    def on_failure(self, name: str, error: Exception, text: str) -> None:
        if name == "stdout" and not self._is_forwarding:
            text = ""  # progress; metrics.jsonl has it too
        if name not in self._failed:
            self._failed.add(name)
            atexit.register(getattr(sys, name).discard)
            rows = f"; {self.folder}/metrics.jsonl has every iteration" if self.folder and name == "stdout" else ""
            text = f"{name}: cannot write: {_reason(error)}; the run continues without it{rows}\n{text}"
        if text:
            self._forward(text, "stderr" if name == "stdout" else "stdout")

    def _forward(self, text: str, other: str) -> None:
        if other not in self._failed | self.closed:
            self._is_forwarding = True
            getattr(sys, other).write(text)
            self._is_forwarding = False
        elif self.folder is not None:
            from megatron_lite.files import not_through_links

            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(self.folder / "lost_output.txt", "a", encoding="utf-8", opener=not_through_links) as file:
                    file.write(text)


def exit_on_lost_output() -> None:
    """Make this process exit without a traceback when standard output fails, and print text of others visibly.

    Text for a closed stream is lost.
    """
    owner = _Command()
    for name in DESCRIPTORS:
        if getattr(sys, name) is not None:
            Output(name, owner)


def show_as_it_is() -> None:
    """Let a script of the user, which this process runs from now on, print any characters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(owner := getattr(stream, "owner", None), _Command):
            vars(owner)["shown"] = lambda name, text: text


def survive_lost_output(folder: Path | None) -> None:
    """Make this process continue when standard output or standard error fails.

    folder  run.dir; None: unknown so far
    """
    owner, is_new = getattr(sys.stdout, "owner", None), False
    if not isinstance(owner, _Run):
        owner, is_new = _Run(), True
        for name in DESCRIPTORS:
            Output(name, owner)
    owner.folder = folder or owner.folder
    if is_new and os.environ.get("RANK", "0") == "0":  # other ranks print only errors
        for name in sorted(owner.closed):
            owner.on_failure(name, ValueError("it is closed"), "")


def _open(name: str) -> TextIO:
    """A stream to /dev/null in place of a closed one.

    It takes the closed descriptor. Otherwise the next opened file would get it, and with it the output of libraries.
    """
    descriptor = DESCRIPTORS[name]
    try:
        os.fstat(descriptor)  # raises OSError if the descriptor is free
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
