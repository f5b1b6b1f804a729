"""A function in a forked process with limits: what it printed, how it ended, and how much memory and time it took."""

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.helpers import covered

SECONDS = 10  # of the processor
PATIENCE = 30  # seconds of the clock, on a busy machine
BYTES = 1 << 30


class Ended(NamedTuple):
    """How a process ended."""

    code: int | None  # None: by a signal
    signal: int
    seconds: float  # of the processor, all its children included
    grown: int  # bytes of memory, at most, beyond those of the process that it was forked from
    out: bytes
    err: bytes


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) << 10


@cache
def _resident(own: int) -> int:
    """Bytes in memory of a fork that does nothing: it lacks pages of files that this process has.

    `own` is the size of this process in units of 64 MiB; when it has grown, the answer is found anew.
    """
    child = os.fork()
    if not child:
        os._exit(0)
    return os.wait4(child, 0)[2].ru_maxrss << 10


def in_fork(function: Callable[[], int], cwd: Path) -> Ended:
    """Call the function in a fork; its result is the exit code. All that it starts is killed at its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        before = _resident(_status_bytes("VmRSS") >> 26)
        child = os.fork()
        if not child:
            _child(function, cwd, out.fileno(), err.fileno())
        _, status, usage = os.wait4(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 22))
    signalled = os.WIFSIGNALED(status)
    code = None if signalled else os.waitstatus_to_exitcode(status)
    return Ended(
        code,
        os.WTERMSIG(status) if signalled else 0,
        usage.ru_utime + usage.ru_stime,
        (usage.ru_maxrss << 10) - before,
        *texts,
    )


def _child(function: Callable[[], int], cwd: Path, out: int, err: int) -> None:
    """Never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(cwd)
        null = os.open(os.devnull, os.O_RDONLY)
        for to, number in ((null, 0), (out, 1), (err, 2)):
            os.dup2(to, number)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="strict", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        # Writable memory of the process: a mapped file of any size is no memory, an array is.
        limit = _status_bytes("VmData") + BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = SECONDS + int(used.ru_utime + used.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        faulthandler.dump_traceback_later(PATIENCE - 0.5, file=sys.stderr)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        if covered.FOLDER in os.environ:
            covered.start(covered.current_test())
        code = function()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        covered.save()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
