"""Starts the ranks of this machine, over torch.distributed.launcher, and ends as they end.

What a launcher should do beyond starting: pass on a signal and then wait as long as the ranks need to save,
print the reason of a failure once and without a wall of traceback, and end with an exit code that means something.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_lite.errors import ConfigError, MegatronLiteError

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def launched_world_size(nproc_per_node: int | None) -> int:
    """Processes of the run: those of torchrun, or those that --nproc-per-node asks for."""
    given = os.environ.get("WORLD_SIZE")
    if given is not None and nproc_per_node is not None:
        raise ConfigError(
            f"--nproc-per-node {nproc_per_node} was given to a process that was launched as one of {given} already "
            "(WORLD_SIZE is set); leave it out under torchrun"
        )
    if given is not None and not (given.isdecimal() and int(given) > 0):
        raise ConfigError(
            f"the environment variable WORLD_SIZE is {given!r}; a launcher such as torchrun sets it to a number above "
            "0: unset it to start without one"
        )
    return int(given or nproc_per_node or 1)


def run_ranks(target: str, args: tuple[Any, ...], nproc_per_node: int | None) -> int:
    """Calls `module:function` with `args` on every rank: here, when this is a rank or the only one, or in new ones.

    Returns the exit code. In this process errors are raised; those of new ranks were printed, once.
    """
    if launched_world_size(nproc_per_node) == 1 or "WORLD_SIZE" in os.environ:
        resolve(target)(*args)
        return 0
    assert nproc_per_node is not None
    return launch(target, args, nproc_per_node)


def launch(target: str, args: tuple[Any, ...], num_processes: int) -> int:
    """Runs `module:function` in ranks of this machine; `args` are pickled. Returns 0, or the failed rank's exit code.

    Ranks find each other at a free port of this machine, so that several launches never meet.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_torch_logs()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // num_processes)))
    # Ranks that wait for a failed one in a collective need not be given torch's 30 seconds.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory(prefix="megatron_lite_") as reports, ThreadPoolExecutor(1) as executor:
        # In a thread, because in the main one torch answers a signal by killing ranks that take 30 seconds to save.
        signals = _SignalsToRanks()
        with signals:
            running = executor.submit(elastic_launch(config, _rank), target, args, reports)
            while not running.done():
                wait([running], timeout=0.1)
                signals.pass_on()
        try:
            running.result()
        except ChildFailedError as error:
            return _explain(Path(reports), error.failures, signals.received)
    return 0


def available_cores() -> int:
    """Cores this process may use, which a container or a batch system may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve(target: str) -> Any:
    """The function that `module:function` names."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)


def _rank(target: str, args: tuple[Any, ...], reports: str) -> None:
    """Body of a rank: the target, whose failure is reported to the launcher instead of printed."""
    try:
        resolve(target)(*args)
    except KeyboardInterrupt:  # torch would take it for a normal end, and wait for a result for ever
        sys.exit(1)
    except Exception as error:
        expected = isinstance(error, MegatronLiteError)
        rank = os.environ["RANK"]
        report = {
            "time": time.time(),
            "message": str(error) if expected else f"rank {rank} failed:\n{traceback.format_exc()}",
            "exit_code": error.exit_code if expected else 1,
        }
        (Path(reports) / f"rank_{rank}.json").write_text(json.dumps(report), encoding="utf-8")
        sys.exit(report["exit_code"])


def _explain(reports: Path, failures: dict[int, Any], received: int) -> int:
    """Prints why the ranks failed: the first report, for the others follow from it. Returns the exit code."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(reports.glob("rank_*.json"))]
    killed = {rank: -failure.exitcode for rank, failure in failures.items() if failure.exitcode < 0}
    if received:
        print(f"stopped by {signal.Signals(received).name} before a checkpoint could be saved", file=sys.stderr)
    for rank, number in killed.items():
        if number != received:
            hint = "; the machine may be out of memory" if number == signal.SIGKILL else ""
            print(f"rank {rank} was killed by {signal.Signals(number).name}{hint}", file=sys.stderr)
    if found and not killed:
        first = min(found, key=lambda report: report["time"])
        print(first["message"], file=sys.stderr)
        return first["exit_code"]
    return 1


def _quiet_torch_logs() -> None:
    """Torch's launcher logs each failure with its own traceback; `_explain` says it in the user's terms."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


class _SignalsToRanks:
    """While in force, stop signals to this process go to its ranks, to those too that start later."""

    def __init__(self) -> None:
        self.received = 0
        self._told: set[int] = set()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_SignalsToRanks":
        for number in PASSED_ON:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.received = self.received or number

    def pass_on(self) -> None:
        """Sends the signal that was received to every rank that was not sent it yet."""
        if self.received:
            for rank in multiprocessing.active_children():
                if rank.pid is not None and rank.pid not in self._told:
                    self._told.add(rank.pid)
                    os.kill(rank.pid, self.received)
