"""torch's elastic agent, which starts this machine's ranks and starts them again, and tells why.

In place of `torch.distributed.launcher`, which keeps to itself why ranks were started again. Of torch's agent we keep
how nodes meet, not how it waits for ranks: it would keep one that has finished until it has read the function's result,
and wait for ever for the result of one that has ended without.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megatron_lite.cli.nodes import Nodes
from megatron_lite.cli.reports import GOOD_ENDS, Failure, explain, forget_reports, report_end
from megatron_lite.errors import ConfigError, TrainingError

# Ranks whose neighbour has failed wait for it in a collective, where they can save nothing.
FAILED_GRACE_SECONDS = 10
# Ranks that end because a node has joined save first.
JOINED_GRACE_SECONDS = 600

ENDED_BY_OTHERS = "the other nodes have ended this run; look at their output for the reason"


class Agent(LocalElasticAgent):
    """Prints the reason of each failure when it happens, and starts ranks again only where that may help."""

    def __init__(self, spec: WorkerSpec, reports: Path, received: Callable[[], int]):
        super().__init__(spec, logs_specs=DefaultLogsSpecs(os.devnull))
        self.exit_code = 0
        self.had_ranks = False
        self._last_failure: Failure | None = None
        self._reports = reports
        self._received = received

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
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
        handler = _handler(nodes, own_address)
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
        agent = Agent(spec, reports, received)
        try:
            result = agent.run()
        finally:
            handler.shutdown()
    except (DistError, RendezvousError) as error:
        raise TrainingError(_why_apart(error, nodes, agent is not None and agent.had_ranks)) from error
    if result is None:
        raise TrainingError(ENDED_BY_OTHERS)
    return agent.exit_code if result.is_failed() else 0  # type: ignore[attr-defined]


class FixedNodes(StaticTCPRendezvous):
    """A meeting of a fixed number of nodes, each with a rank of its own."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises ConfigError, on every node, where several have one rank: torch would wait for the one that is missing
        until time is up."""
        info = super().next_rendezvous()
        place = info.store.add("nodes", 1)
        info.store.set(f"node {place}", f"{self.rank} {socket.gethostname()}")
        hosts: dict[int, list[str]] = {}
        for number in range(1, self.world_size + 1):
            rank, host = info.store.get(f"node {number}").decode().split(" ", 1)
            hosts.setdefault(int(rank), []).append(host)
        for rank, of_rank in sorted(hosts.items()):
            if len(of_rank) > 1:
                raise ConfigError(
                    f"--node-rank {rank} was given on {len(of_rank)} machines ({', '.join(sorted(of_rank))}); give "
                    f"each its own, 0 to {self.world_size - 1}"
                )
        return info


def _handler(nodes: Nodes, own_address: str) -> RendezvousHandler:
    """Where this node will meet the others; an elastic one connects to the first node here."""
    seconds, run_id = int(nodes.join_timeout), "megatron_lite"
    if nodes.several and not nodes.is_elastic:
        return FixedNodes(nodes.master_addr, nodes.master_port, nodes.node_rank, nodes.max_nodes, run_id, seconds)
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=nodes.where,
            run_id=run_id,
            min_nodes=nodes.min_nodes,
            max_nodes=nodes.max_nodes,
            local_addr=own_address,
            timeout=seconds,
            join_timeout=seconds,
            is_host=nodes.node_rank == 0,
            read_timeout=seconds,
        )
    )


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
        reason = f"fewer than {nodes.min_nodes} machines have come"
    elif had_ranks:
        return (
            f"node {nodes.node_rank} has lost the first node, at {nodes.where} ({reason}); look at the output there "
            "for the reason"
        )
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
