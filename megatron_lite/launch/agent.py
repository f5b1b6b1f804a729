"""Torch's elastic agent, changed in two ways: it prints why ranks failed, and restarts them only if that may help.

It also does not wait for results of ranks. Torch's agent waits forever for a rank that exited without a result.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from megatron_lite.errors import TrainingError
from megatron_lite.launch.nodes import Nodes
from megatron_lite.launch.rendezvous import build_handler
from megatron_lite.launch.reports import GOOD_EXIT_CODES, Failure, delete_reports, explain, rank_main
from megatron_lite.text import visible

FAILED_GRACE_SECONDS = 10  # ranks that wait in a collective for a failed rank cannot save
JOINED_GRACE_SECONDS = 600  # ranks that stop because a node has joined save first
ENDED_BY_OTHERS = "the other nodes ended this run; their output has the reason"


class Agent(LocalElasticAgent):
    """The agent of one machine.

    endpoint     address and port of the rendezvous, for messages
    reports      folder for the reports of this machine's ranks
    stop_signal  returns the number of the stop signal that the launcher received, or 0
    """

    def __init__(self, spec: WorkerSpec, endpoint: str, reports: Path, stop_signal: Callable[[], int]):
        super().__init__(spec, logs_specs=DefaultLogsSpecs(os.devnull))
        self.exit_code = 0
        self.had_ranks = False
        self._last_failure: Failure | None = None
        self._endpoint = endpoint
        self._reports = reports
        self._stop_signal = stop_signal

    # Torch's decorator `prof` hides the types of the methods below, so a type checker sees no override.
    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]
        try:
            super()._rendezvous(worker_group)  # type: ignore[call-arg]
        except (ValueError, KeyError, TypeError) as error:  # raised for text that no launcher writes
            raise TrainingError(
                f"the store of this run at {self._endpoint} has unreadable data ({type(error).__name__}: {error}); "
                "give another --master-port on every machine, and let no other program reach it"
            ) from error

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # type: ignore[override]
        try:
            os.getcwd()
        except FileNotFoundError:
            raise TrainingError(
                "the current folder was deleted, so no rank can start; run the command in a folder that exists"
            ) from None
        self.had_ranks = True
        return super()._start_workers(worker_group)  # type: ignore[call-arg]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # type: ignore[override]
        assert self._pcontext is not None
        processes = self._pcontext._pc.processes  # type: ignore[attr-defined]
        ranks = [worker.global_rank for worker in worker_group.workers]
        codes = dict(zip(ranks, (process.exitcode for process in processes), strict=True))
        if all(code in GOOD_EXIT_CODES for code in codes.values()):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        failed = {rank: code for rank, code in codes.items() if code is not None and code not in GOOD_EXIT_CODES}
        if failed:
            start = time.monotonic()
            self._pcontext.close(signal.SIGTERM, FAILED_GRACE_SECONDS)
            if time.monotonic() - start < FAILED_GRACE_SECONDS / 2:  # `close` sends SIGKILL after all of them
                # A killed rank loses its connections before it has an exit code. Another rank may fail in between.
                # A crash can also be a consequence, and would hide the reason of the other rank.
                ended = zip(ranks, (process.exitcode for process in processes), strict=True)
                failed |= {rank: code for rank, code in ended if code == -signal.SIGKILL}
            self._report_failure(failed)
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.HEALTHY)

    def _report_failure(self, exit_codes: dict[int, int]) -> None:
        """Print why ranks failed, and rule out a restart that would fail in the same way."""
        failure = explain(self._reports, exit_codes, self._stop_signal())
        delete_reports(self._reports)
        lines, total = [failure.message], self._worker_group.spec.max_restarts
        if not failure.restart_may_help:
            self._remaining_restarts = 0
        elif self._remaining_restarts and failure.has_reason and failure == self._last_failure:
            self._remaining_restarts = 0
            lines.append("the same failure as before the restart; another restart would not help")
        elif self._remaining_restarts:
            lines.append(f"restarting from the newest checkpoint ({total - self._remaining_restarts + 1} of {total})")
        print(visible("\n".join(lines)), file=sys.stderr, flush=True)
        self.exit_code, self._last_failure = failure.exit_code, failure

    # Some versions of torch pass `is_restart`.
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # type: ignore[override]
        if self._pcontext is not None and worker_group.state == WorkerState.HEALTHY:
            print("nodes joined or left: restarting with the present ones", file=sys.stderr, flush=True)
            self._pcontext.close(signal.SIGTERM, JOINED_GRACE_SECONDS)
            delete_reports(self._reports)


def run_agent(
    target: str, args: tuple[Any, ...], nodes: Nodes, own_address: str, reports: Path, stop_signal: Callable[[], int]
) -> int:
    """Run this machine's ranks until they exit, through restarts. `reports` and `stop_signal` are those of `Agent`.

    Returns 0 if all ranks finished or stopped with a checkpoint, else the exit code of the failed rank. Raises
    TrainingError if the rendezvous fails or the connection to the other nodes is lost.
    """
    agent = None
    try:
        handler = build_handler(nodes, own_address)
        is_static = nodes.several and not nodes.is_elastic
        spec = WorkerSpec(
            role="trainer",
            local_world_size=nodes.nproc_per_node,
            entrypoint=rank_main,
            args=(target, args, str(reports), nodes.log_dir, time.time()),
            rdzv_handler=handler,
            max_restarts=nodes.max_restarts,
            master_addr=nodes.master_addr if is_static else None,
            master_port=nodes.master_port if is_static else None,
            local_addr=own_address,
        )
        agent = Agent(spec, nodes.endpoint, reports, stop_signal)
        try:
            result = agent.run()
        finally:
            handler.shutdown()
    except (DistError, RendezvousError) as error:
        raise TrainingError(_rendezvous_error(error, nodes, agent is not None and agent.had_ranks)) from error
    if result is None:
        raise TrainingError(ENDED_BY_OTHERS)
    return agent.exit_code if result.is_failed() else 0  # type: ignore[attr-defined]


def _rendezvous_error(error: Exception, nodes: Nodes, had_ranks: bool) -> str:
    """The message for an error of torch's rendezvous."""
    if isinstance(error, RendezvousClosedError):
        return ENDED_BY_OTHERS
    reason = str(error.__cause__ or error).partition("\n")[0]
    if "EADDRINUSE" in reason:
        return (
            f"port {nodes.master_port} is in use on this machine; give another --master-port, the same on every machine"
        )
    if isinstance(error, RendezvousTimeoutError):
        reason = f"fewer than {nodes.min_nodes} machines have started"
    elif had_ranks:
        return f"node {nodes.node_rank} lost the first node at {nodes.endpoint} ({reason}); its output has the reason"
    elif nodes.node_rank:
        reason = f"the first node does not answer ({reason})"
    else:
        reason = f"fewer than {nodes.min_nodes} machines have started ({reason})"
    return (
        f"node {nodes.node_rank} could not join the other nodes at {nodes.endpoint}: {reason}; start the same command "
        f"on every machine, each with its own --node-rank, within --join-timeout ({nodes.join_timeout:g} s), and let "
        "them reach that port"
    )


def quiet_torch_logs() -> None:
    """Silence torch's agent, which logs a traceback for each failure."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
