"""Processes that fork from a server which has already loaded torch and the package; loading takes seconds a process.

The server is Python's fork server of this process. Commands, launchers' ranks and the pool of ranks fork from it.
"""

import atexit
import concurrent.futures.thread
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.popen_forkserver import Popen as forkserver_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO
from unittest import mock

from megatron_lite.errors import STOP_SIGNALS
from tests.helpers import covered

CONTEXT = get_context("forkserver")
PRELOADED = [
    "torch._dynamo",  # every optimizer imports it
    "megatron_lite.training.pretrain",
    "megatron_lite.launch.agent",
    "megatron_lite.generate.run",
    "megatron_lite.convert.driver",
    "megatron_lite.cli.run",
]
# Names that select the command of `run_words`.
LITE, PYTHON = "megatron-lite", "python"


def start_server() -> None:
    """Let the fork server of this process load the package, unless it runs already."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()  # before a pool asks for fewer modules


def run_words(name: str, words: list[str]) -> int:
    """Run `megatron-lite WORDS`, `python FILE WORDS` or `python -m MODULE WORDS` in this process; its exit code."""
    try:
        if name == LITE:
            from megatron_lite.cli import main

            sys.argv = [name, *words]
            main()
        elif words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _default_signals() -> None:
    """The handlers of a new interpreter, in place of the launcher's."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def fork_ranks() -> None:
    """Let launchers of this process fork their ranks. For a process without threads, which exits soon."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    # The agent forks ranks from a pool's thread. A rank would join that thread, which is itself, when it exits.
    os.register_at_fork(after_in_child=concurrent.futures.thread._threads_queues.clear)  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_default_signals)
    LocalElasticAgent.__init__ = partialmethod(LocalElasticAgent.__init__, start_method="fork")  # type: ignore[method-assign]


def become(name: str, words: list[str], folder: str, variables: Mapping[str, str], streams: list[int]) -> None:
    """Make this process the command, with `streams` as its standard input, output and error; it does not return."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    _default_signals()
    fork_ranks()
    if covered.FOLDER in variables:
        covered.start(covered.current_test())
    code = 1
    try:
        code = run_words(name, words)
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _in_new_session(
    name: str, words: list[str], folder: str, variables: dict[str, str], streams: list[Connection]
) -> None:
    os.setsid()
    gc.freeze()  # what the server has loaded stays
    become(name, words, folder, variables, [stream.fileno() for stream in streams])


def start(
    name: str, words: list[str], folder: str, variables: Mapping[str, str], streams: list[Connection]
) -> BaseProcess:
    """Start a command in a session of its own, with `streams` as its standard input, output and error."""
    start_server()
    process = CONTEXT.Process(target=_in_new_session, args=(name, words, folder, dict(variables), streams))
    process.start()
    return process


class Command:
    """A command in a session of its own. It has those members of `subprocess.Popen[str]` that tests use."""

    def __init__(self, name: str, words: list[str], *, cwd: Path | str, env: Mapping[str, str]):
        out, write_out = CONTEXT.Pipe(duplex=False)
        err, write_err = CONTEXT.Pipe(duplex=False)
        nothing = Connection(os.open(os.devnull, os.O_RDWR))
        self.args = [name, *words]
        self._process = start(name, list(map(str, words)), str(cwd), env, [nothing, write_out, write_err])
        self.pid = self._process.pid or 0
        self.stdout: IO[str] = os.fdopen(os.dup(out.fileno()))
        self.stderr: IO[str] = os.fdopen(os.dup(err.fileno()))
        for pipe in (nothing, out, write_out, err, write_err):
            pipe.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the command has written since the last read, to output and to error, when it has exited."""
        end = None if timeout is None else time.monotonic() + timeout
        texts = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            texts[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=job, daemon=True) for job in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    name: str, *words: str, cwd: Path | str, env: Mapping[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Run a command until it exits; one that takes longer than `timeout` seconds is killed with its ranks."""
    process = Command(name, list(words), cwd=cwd, env=env)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(words, process.wait(), out, err)


_poll, _lock = forkserver_process.poll, threading.Lock()


def _poll_with_lock(self: forkserver_process, *arguments: int) -> int | None:
    """Poll under a lock: a launcher polls in two threads, and without the lock one may read 255 as the exit code."""
    with _lock:
        return _poll(self, *arguments)


@contextmanager
def ranks_from_server() -> Iterator[None]:
    """Let launchers of this process, which has threads, start their ranks from the server."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    start_server()
    quick = partialmethod(LocalElasticAgent.__init__, start_method="forkserver")
    polls = mock.patch.object(forkserver_process, "poll", _poll_with_lock)
    with mock.patch.object(LocalElasticAgent, "__init__", quick), polls:
        yield
