"""torch's elastic agent, which starts this machine's ranks and starts them again, and tells why.

In place of `torch.distributed.launcher`, which keeps to itself why ranks were started again. Of torch's agent we keep
how nodes meet, not how it waits for ranks: it would keep one that has finished until it has read the function's result,
and wait for ever for the result of one that has ended without.
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
from megatron_lite.launch.reports import GOOD_ENDS, Failure, explain, forget_reports, report_end

# Ranks whose neighbour has failed wait for it in a collective, where they can save nothing.
FAILED_GRACE_SECONDS = 10
# Ranks that end because a node has joined save first.
JOINED_GRACE_SECONDS = 600

ENDED_BY_OTHERS = "the other nodes have ended this run; look at their output for the reason"


class Agent(LocalElasticAgent):
    """Prints the reason of each failure when it happens, and starts ranks again only where that may help."""

    def __init__(self, spec: WorkerSpec, where: str, reports: Path, received: Callable[[], int]):
        super().__init__(spec, logs_specs=DefaultLogsSpecs(os.devnull))
        self.exit_code = 0
        self.had_ranks = False
        self._last_failure: Failure | None = None
        self._where = where
        self._reports = reports
        self._received = received

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)  # type: ignore[call-arg]
        except (ValueError, KeyError, TypeError) as error:  # of text that no launcher of this run has written
            raise TrainingError(
                f"the store of this run at {self._where} has unreadable data ({type(error).__name__}: {error}), "
                "perhaps of another run; give another --master-port on every machine, and let only them reach it"
            ) from error

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise TrainingError(
                "the folder in which this command was started is deleted, and no rank can start there; run the same "
                "command in a folder that exists"
            ) from None
        self.had_ranks = True
        return super()._start_workers(worker_group)  # type: ignore[call-arg]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        processes = self._pcontext._pc.processes  # type: ignore[attr-defined]
        ranks = [worker.global_rank for worker in worker_group.workers]
        codes = dict(zip(ranks, (process.exitcode for process in processes), strict=True))
        if all(code in GOOD_ENDS for code in codes.values()):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        if ended := {rank: code for rank, code in codes.items() if code is not None and code not in GOOD_ENDS}:
            self._pcontext.close(signal.SIGTERM, FAILED_GRACE_SECONDS)
            self._explain(ended)
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.HEALTHY)

    def _explain(self, ended: dict[int, int]) -> None:
        """Prints why ranks ended, and decides whether they are started again: not for what they would fail by again."""
        failure = explain(self._reports, ended, self._received())
        forget_reports(self._reports)
        lines, total = [failure.message], self._worker_group.spec.max_restarts
        if not failure.restart_may_help:
            self._remaining_restarts = 0
        elif self._remaining_restarts and failure.has_reason and failure == self._last_failure:
            self._remaining_restarts = 0
            lines.append("the same failure as before the restart: another one would not help")
        elif self._remaining_restarts:
            lines.append(f"restarting from the newest checkpoint ({total - self._remaining_restarts + 1} of {total})")
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        self.exit_code, self._last_failure = failure.exit_code, failure

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._pcontext is not None and worker_group.state == WorkerState.HEALTHY:
            print("nodes have come or gone: starting again with those that are there", file=sys.stderr, flush=True)
            self._pcontext.close(signal.SIGTERM, JOINED_GRACE_SECONDS)
            forget_reports(self._reports)


def run_agent(
    target: str, args: tuple[Any, ...], nodes: Nodes, own_address: str, reports: Path, received: Callable[[], int]
) -> int:
    """Runs this machine's ranks to their end, through restarts. Returns 0, also when they were stopped and have saved,
    or what a failed one gave. Raises TrainingError when the nodes cannot meet, or not any more."""
    agent = None
    try:
        handler = build_handler(nodes, own_address)
        is_static = nodes.several and not nodes.is_elastic
        spec = WorkerSpec(
            role="trainer",
            local_world_size=nodes.nproc_per_node,
            entrypoint=report_end,
            args=(target, args, str(reports), nodes.log_dir, time.time()),
            rdzv_handler=handler,
            max_restarts=nodes.max_restarts,
            master_addr=nodes.master_addr if is_static else None,
            master_port=nodes.master_port if is_static else None,
            local_addr=own_address,
        )
        agent = Agent(spec, nodes.where, reports, received)
        try:
            result = agent.run()
        finally:
            handler.shutdown()
    except (DistError, RendezvousError) as error:
        raise TrainingError(_why_apart(error, nodes, agent is not None and agent.had_ranks)) from error
    if result is None:
        raise TrainingError(ENDED_BY_OTHERS)
    return agent.exit_code if result.is_failed() else 0  # type: ignore[attr-defined]


def _why_apart(error: Exception, nodes: Nodes, had_ranks: bool) -> str:
    """What keeps this node from the others, or has parted it from them."""
    if isinstance(error, RendezvousClosedError):
        return ENDED_BY_OTHERS
    reason = f"{error.__cause__ or error}".partition("\n")[0]
    if "EADDRINUSE" in reason:
        return (
            f"port {nodes.master_port} is in use on this machine, perhaps by another run: give another --master-port, "
            "the same on every machine"
        )
    if isinstance(error, RendezvousTimeoutError):
        reason = f"fewer than {nodes.min_nodes} machines have started"
    elif had_ranks:
        return (
            f"node {nodes.node_rank} has lost the first node, at {nodes.where} ({reason}); look at the output there "
            "for the reason"
        )
    elif nodes.node_rank:
        reason = f"the first node does not answer ({reason})"
    else:
        reason = f"fewer than {nodes.min_nodes} machines have started ({reason})"
    return (
        f"node {nodes.node_rank} could not meet the others at {nodes.where}: {reason}; start the same command on every "
        f"machine, with its own --node-rank, within --join-timeout ({nodes.join_timeout:g} s), and see that nothing "
        "between them closes the port"
    )


def quiet_torch_logs() -> None:
    """Torch's agent logs each failure with its own traceback; `explain` says it in the user's terms."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
