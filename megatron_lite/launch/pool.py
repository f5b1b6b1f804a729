"""A pool of rank processes that serves all distributed tests of a session.

Starting Python and torch in a rank takes seconds, a new process group milliseconds. So the processes stay, and each
call gets a new group on a FileStore, which needs no port.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0  # for the other ranks after a failure: they usually wait in a collective for the failed rank


class RanksFailed(AssertionError):
    """Ranks failed or hung; the message has their tracebacks."""


def _serve(pipe: connection.Connection, stack_file: Path) -> None:
    """The loop of a rank: receive a job, run it in a new process group, send its result or traceback."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    num_modules = 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pipes
    with contextlib.suppress(EOFError), stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        while True:
            if len(sys.modules) > num_modules:  # keeps imported objects out of every later garbage collection
                num_modules = len(sys.modules)
                gc.collect()
                gc.freeze()
            rank, size, store, seconds, job = pickle.loads(pipe.recv_bytes())
            try:
                torch.manual_seed(0)
                timeout, backend = timedelta(seconds=seconds), "gloo"
                os.environ.pop("LOCAL_RANK", None)
                if size <= torch.cuda.device_count():
                    os.environ["LOCAL_RANK"], backend = str(rank), "cpu:gloo,cuda:nccl"
                dist.init_process_group(
                    backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
                )
                # A barrier on the CPU. Without it, a rank that fails at once closes its sockets while others connect.
                dist.all_reduce(torch.zeros(1))
                function, args, kwargs = pickle.loads(job)
                answer = pickle.dumps((True, function(*args, **kwargs)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
                # Closed sockets wake peers that wait for this rank.
                if dist.is_initialized():
                    dist.destroy_process_group()
            pipe.send_bytes(answer)
            # Sockets stay open until all ranks have answered: a slower one may still be connecting.
            pipe.recv_bytes()
            if dist.is_initialized():
                dist.destroy_process_group()


@dataclass
class _Rank:
    process: BaseProcess
    pipe: connection.Connection
    stack_file: Path

    def stack(self) -> str:
        """The current Python stack of the rank."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        return self.stack_file.read_text()


class Ranks:
    """`ranks(size, function, *args, **kwargs)` calls the function in each rank and returns the results by rank.

    The function must be defined at the top of a module. torch.distributed uses Gloo, and NCCL for GPUs if each rank has
    one. torch has one thread and the same seed in each rank. Results are pickled, so tensors are copies.
    """

    def __init__(self, timeout_seconds: float = 120.0):
        self.timeout_seconds = timeout_seconds
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._ranks: list[_Rank] = []
        self._calls = 0

    def within(self, timeout_seconds: float) -> "Callable[..., list[Any]]":
        """A callable like this pool, with another time-out."""
        return lambda size, function, *args, **kwargs: self._run(timeout_seconds, size, function, args, kwargs)

    def __call__(self, size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self._run(self.timeout_seconds, size, function, args, kwargs)

    def _run(self, timeout_seconds: float, size: int, function: Callable[..., Any], args, kwargs) -> list[Any]:
        self._start(size)
        self._calls += 1
        store = self._folder / f"store-{self._calls}"
        job = pickle.dumps((function, args, kwargs))
        for rank, member in enumerate(self._ranks[:size]):
            member.pipe.send_bytes(pickle.dumps((rank, size, str(store), timeout_seconds, job)))
        try:
            answers = self._collect(size, timeout_seconds)
        finally:
            store.unlink(missing_ok=True)
        failed = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        if failed:
            raise RanksFailed(f"{function.__name__} failed on {len(failed)} of {size} ranks\n" + "\n".join(failed))
        return [answers[rank][1] for rank in range(size)]

    def _collect(self, size: int, timeout_seconds: float) -> dict[int, tuple[bool, Any]]:
        """The answer of every rank; if a rank hangs or dies, all processes are replaced at the next call."""
        answers: dict[int, tuple[bool, Any]] = {}
        pending = {member.pipe: rank for rank, member in enumerate(self._ranks[:size])}
        deadline = time.monotonic() + timeout_seconds
        broken = False
        while pending:
            ready = connection.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in pending.values():
                    stack = self._ranks[rank].stack()
                    answers[rank] = (
                        False,
                        f"hung, killed after {timeout_seconds:g} s or a failure elsewhere, in\n{stack}",
                    )
                broken = True
                break
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = pending.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._ranks[rank].process
                    process.join()
                    answers[rank] = (False, f"the process died, exit code {process.exitcode}")
                    broken = True
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if broken:
            self._kill()
        else:
            for member in self._ranks[:size]:
                member.pipe.send_bytes(b"all have answered")
        return answers

    def _start(self, size: int) -> None:
        """Add ranks until the pool has `size`."""
        # A fork server imports torch and this package once; each rank is a fork of it, made before it has threads.
        ctx = get_context("forkserver")
        ctx.set_forkserver_preload(
            ["megatron_lite.training.pretrain", "torch._dynamo"]
        )  # every optimizer imports _dynamo
        while len(self._ranks) < size:
            pipe, rank_pipe = ctx.Pipe()
            stack_file = self._folder / f"stack-{len(self._ranks)}-{self._calls}"
            process = ctx.Process(target=_serve, args=(rank_pipe, stack_file), daemon=True)
            process.start()
            rank_pipe.close()
            self._ranks.append(_Rank(process, pipe, stack_file))

    def _kill(self) -> None:
        for member in self._ranks:
            member.pipe.close()
            member.process.kill()
            member.process.join()
        self._ranks.clear()

    def close(self) -> None:
        self._kill()
        shutil.rmtree(self._folder)
