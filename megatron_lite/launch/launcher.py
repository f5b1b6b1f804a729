"""Starts the ranks of this machine under torch's elastic agent, and exits with their exit code.

The launcher passes stop signals on and waits while ranks save. It prints the reason of a failure once.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from megatron_lite.errors import STOP_SIGNALS, ConfigError, StoppedEarly
from megatron_lite.launch.available import allow_open_files, available_cores
from megatron_lite.launch.nodes import Nodes, is_reachable, set_network_variables
from megatron_lite.launch.reports import resolve, stopped_early
from megatron_lite.text import visible

# Both count from the exit of the last rank. On a busy machine the agent needs seconds.
UNREACHABLE_SECONDS = 20.0  # then a launcher exits if the first node does not answer
STOP_SECONDS = 10.0  # then a launcher that received a stop signal exits


def launched_world_size(nodes: Nodes | None) -> int:
    """The largest number of processes of the run, from torchrun or from the command line."""
    given = os.environ.get("WORLD_SIZE")
    if given is not None and nodes is not None:
        raise ConfigError(
            f"{nodes.options} was given to a process that was launched as one of {given} already "
            "(WORLD_SIZE is set); leave it out under torchrun"
        )
    if given is not None and not (given.isdecimal() and int(given) > 0):
        raise ConfigError(
            f"the environment variable WORLD_SIZE is {given!r}; a launcher such as torchrun sets it to 1 or more. "
            "Unset it to start without a launcher"
        )
    return int(given) if given else nodes.world_sizes[0] if nodes else 1


def run_ranks(target: str, args: tuple[Any, ...], nodes: Nodes | None) -> int:
    """Call `module:function` with `args` on every rank: in this process if it is a rank, else in new processes.

    Returns the exit code. Errors in this process are raised; errors of new ranks are printed once.
    """
    if nodes is None or nodes == Nodes(1):
        resolve(target)(*args)
        return 0
    return launch(target, args, nodes)


def launch(target: str, args: tuple[Any, ...], nodes: Nodes) -> int:
    """Run `module:function` in new ranks on this machine, with pickled `args`.

    Returns 0, 75 if the ranks stopped with a checkpoint, or the exit code of the failed rank.
    """
    run_agent = _quiet_agent()
    allow_open_files()  # this process may have the store of all ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nodes.nproc_per_node)))
    # Restarted ranks need a new store: the agents' store has addresses of the previous ranks.
    # See https://github.com/pytorch/pytorch/issues/135712.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    address = set_network_variables(nodes)
    reports = Path(tempfile.mkdtemp(prefix="megatron_lite_"))
    try:
        # In the main thread, torch would handle signals and kill ranks that need more than 30 s to save.
        with ThreadPoolExecutor(1) as executor, _SignalsToRanks() as signals:
            running = executor.submit(run_agent, target, args, nodes, address, reports, lambda: signals.first)
            _watch(running, nodes, signals, reports)
            exit_code = running.result()
        message = stopped_early(reports)
        if exit_code or not message:
            return exit_code
        print(visible(message), file=sys.stderr)
        return StoppedEarly.exit_code
    finally:
        shutil.rmtree(reports, ignore_errors=True)


def _watch(running: "Future[int]", nodes: Nodes, signals: "_SignalsToRanks", reports: Path) -> None:
    """Pass signals on until the agent returns. Exit if its wait for other nodes is pointless.

    An agent that lost the first node waits for the kernel's time-out of 15 minutes. An agent without ranks also waits
    for the ranks of other nodes. On one machine the agent waits only for its own ranks.
    """
    had_ranks, without_ranks_since = False, time.monotonic()
    while not running.done():
        wait([running], timeout=0.1)
        signals.pass_on()
        if multiprocessing.active_children():
            had_ranks, without_ranks_since = True, time.monotonic()
            continue
        waited = time.monotonic() - without_ranks_since
        if signals.first and nodes.several and waited > STOP_SECONDS:
            reason = f"stopped by {signal.Signals(signals.first).name} while waiting for the other nodes"
        elif had_ranks and nodes.node_rank and waited > UNREACHABLE_SECONDS and not is_reachable(nodes, 5.0):
            reason = (
                f"node {nodes.node_rank} cannot reach the first node at {nodes.endpoint}, and its ranks have exited; "
                "run the same command again when the network works"
            )
        else:
            continue
        saved = stopped_early(reports)
        print(visible(saved or reason), file=sys.stderr, flush=True)
        shutil.rmtree(reports, ignore_errors=True)
        os._exit(StoppedEarly.exit_code if saved else 1)  # the agent's thread cannot be interrupted


def _quiet_agent() -> Callable[..., int]:
    """`run_agent`, imported without torch's log of C++ stack frames in this process; ranks keep that log."""
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "FATAL")  # torch reads it when it is imported
    from megatron_lite.launch.agent import quiet_torch_logs, run_agent

    if not is_set:
        del os.environ[name]
    quiet_torch_logs()
    return run_agent


class _SignalsToRanks:
    """Passes stop signals of this process on to its ranks, also to ranks that start later.

    On exit, earlier handlers return. After a stop signal all others are ignored, because launchers and schedulers often
    send the same signal again, which must not change the exit code.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._num_sent: dict[int, int] = {}  # by process id
        self._previous: dict[int, Any] = {}

    @property
    def first(self) -> int:
        """The first stop signal; 0: none."""
        return self._received[0] if self._received else 0

    def __enter__(self) -> "_SignalsToRanks":
        # A batch system also signals Python's resource tracker, which ignores all stop signals but SIGUSR1. It inherits
        # a blocked one.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, lambda number, frame: self._received.append(number))
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._received else handler)

    def pass_on(self) -> None:
        """Send each rank the signals that it has not received yet."""
        for rank in multiprocessing.active_children() if self._received else []:
            if rank.pid is None:
                continue
            for number in self._received[self._num_sent.get(rank.pid, 0) :]:
                with contextlib.suppress(ProcessLookupError):  # the rank has exited
                    os.kill(rank.pid, number)
            self._num_sent[rank.pid] = len(self._received)
