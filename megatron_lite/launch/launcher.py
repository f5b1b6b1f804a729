"""Starts the ranks of this machine under torch's elastic agent, and ends as they end.

What a launcher should do beyond starting: pass on a signal and then wait as long as the ranks need to save, print the
reason of a failure once and without a wall of traceback, start the ranks again only where that may help, and end with
an exit code that means something.
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
from megatron_lite.launch.available import available_cores
from megatron_lite.launch.nodes import Nodes, is_reachable, set_network_variables
from megatron_lite.launch.reports import resolve, stopped_early

# How long a node whose ranks have ended waits for the first node to answer, and one that got a signal for its agent to
# end. On a busy machine the agent needs seconds.
CUT_OFF_SECONDS, STOP_SECONDS = 20.0, 10.0


def launched_world_size(nodes: Nodes | None) -> int:
    """Processes of the run, at most: those of torchrun, or those that the command line asks for."""
    given = os.environ.get("WORLD_SIZE")
    if given is not None and nodes is not None:
        raise ConfigError(
            f"{nodes.words} was given to a process that was launched as one of {given} already "
            "(WORLD_SIZE is set); leave it out under torchrun"
        )
    if given is not None and not (given.isdecimal() and int(given) > 0):
        raise ConfigError(
            f"the environment variable WORLD_SIZE is {given!r}; a launcher such as torchrun sets it to a number above "
            "0: unset it to start without one"
        )
    return int(given) if given else nodes.world_sizes[0] if nodes else 1


def run_ranks(target: str, args: tuple[Any, ...], nodes: Nodes | None) -> int:
    """Calls `module:function` with `args` on every rank: here, when this is a rank or the only one, or in new ones.

    Returns the exit code. In this process errors are raised; those of new ranks were printed, once.
    """
    if nodes is None or nodes == Nodes(1):
        resolve(target)(*args)
        return 0
    return launch(target, args, nodes)


def launch(target: str, args: tuple[Any, ...], nodes: Nodes) -> int:
    """Runs `module:function` in this machine's ranks; `args` are pickled. Returns 0, 75 when they were stopped, or the
    failed rank's exit code.

    Ranks of one machine find each other at a free port of it, so that several launches never meet.
    """
    run_agent = _quiet_agent()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nodes.nproc_per_node)))
    # Ranks that are started again must not find what those before them left in the store of the agents: they get one
    # of their own, at another port each time. See https://github.com/pytorch/pytorch/issues/135712.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    address = set_network_variables(nodes)
    reports = Path(tempfile.mkdtemp(prefix="megatron_lite_"))
    try:
        # In a thread, because in the main one torch answers a signal by killing ranks that take 30 seconds to save.
        with ThreadPoolExecutor(1) as executor, _SignalsToRanks() as signals:
            running = executor.submit(run_agent, target, args, nodes, address, reports, lambda: signals.received)
            _watch(running, nodes, signals, reports)
            exit_code = running.result()
        if exit_code == 0 and (message := stopped_early(reports)):
            print(message, file=sys.stderr)
            return StoppedEarly.exit_code
        return exit_code
    finally:
        shutil.rmtree(reports, ignore_errors=True)


def _watch(running: "Future[int]", nodes: Nodes, signals: "_SignalsToRanks", reports: Path) -> None:
    """Passes signals on until the agent has ended; ends the process where it waits for what will not come.

    An agent whose connection to the first node is cut waits for the kernel to give that up, a quarter of an hour, and
    one whose ranks have ended waits for those of the other nodes. On one machine the agent waits for its ranks only.
    """
    had_ranks, without_ranks_since = False, time.monotonic()
    while not running.done():
        wait([running], timeout=0.1)
        signals.pass_on()
        if multiprocessing.active_children():
            had_ranks, without_ranks_since = True, time.monotonic()
            continue
        waited = time.monotonic() - without_ranks_since
        if signals.received and nodes.several and waited > STOP_SECONDS:
            reason = f"stopped by {signal.Signals(signals.received).name} while waiting for the other nodes"
        elif had_ranks and nodes.node_rank and waited > CUT_OFF_SECONDS and not is_reachable(nodes, 5.0):
            reason = (
                f"node {nodes.node_rank} cannot reach the first node at {nodes.where}, and its own ranks have ended; "
                "it ends too. Run the same command again when the network is back"
            )
        else:
            continue
        saved = stopped_early(reports)
        print(saved or reason, file=sys.stderr, flush=True)
        shutil.rmtree(reports, ignore_errors=True)
        os._exit(StoppedEarly.exit_code if saved else 1)  # the agent's thread cannot be interrupted


def _quiet_agent() -> Callable[..., int]:
    """`run_agent`, without torch's own words on what it will say; ranks may still hear them."""
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "FATAL")  # read when torch is loaded; its errors come with walls of stack frames
    from megatron_lite.launch.agent import quiet_torch_logs, run_agent

    if not is_set:
        del os.environ[name]
    quiet_torch_logs()
    return run_agent


class _SignalsToRanks:
    """While in force, stop signals to this process go to its ranks, to those too that start later. Afterwards, if there
    was one, they are ignored: the same signal often comes twice, and this process has only its exit code left to give.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._told: dict[int, int] = {}  # by process, how many of them
        self._previous: dict[int, Any] = {}

    @property
    def received(self) -> int:
        """The first one; 0 when there was none."""
        return self._received[0] if self._received else 0

    def __enter__(self) -> "_SignalsToRanks":
        # A batch system signals all processes, Python's tracker of semaphores too, which survives but this one.
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
        """Sends every rank the signals that it was not sent yet."""
        if self._received:
            for rank in multiprocessing.active_children():
                if rank.pid is not None:
                    for number in self._received[self._told.get(rank.pid, 0) :]:
                        with contextlib.suppress(ProcessLookupError):  # it has just ended
                            os.kill(rank.pid, number)
                    self._told[rank.pid] = len(self._received)
