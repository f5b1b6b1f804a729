"""torch's elastic agent, which starts this machine's ranks and starts them again, and tells why.

In place of `torch.distributed.launcher`, which keeps to itself why ranks were started again.
"""

import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megatron_lite.cli.nodes import Nodes
from megatron_lite.cli.reports import Failure, explain, forget_reports, report_end
from megatron_lite.errors import TrainingError

# Ranks whose neighbour has failed wait for it in a collective, where they can save nothing.
FAILED_GRACE_SECONDS = 10
# Ranks that end because a node has joined save first.
JOINED_GRACE_SECONDS = 600


class Agent(LocalElasticAgent):
    """Prints the reason of each failure when it happens, and starts ranks again only where that may help."""

    def __init__(self, spec: WorkerSpec, reports: Path, received: Callable[[], int]):
        super().__init__(spec, logs_specs=DefaultLogsSpecs())
        self.exit_code = 0
        self._last_failure: Failure | None = None
        self._reports = reports
        self._received = received

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        processes = self._pcontext._pc.processes  # type: ignore[attr-defined]
        ended = {worker_group.workers[n].global_rank: process.exitcode or 0 for n, process in enumerate(processes)}
        if any(ended.values()):
            # Before torch sees it, which would give the others half a minute, and be killed ranks of its own.
            self._pcontext.close(signal.SIGTERM, FAILED_GRACE_SECONDS)
            self._explain({rank: -code for rank, code in ended.items() if code < 0})
        return super()._monitor_workers(worker_group)  # type: ignore[call-arg]

    def _explain(self, killed: dict[int, int]) -> None:
        """Prints why ranks ended, and decides whether they are started again: not for what they would fail by again."""
        failure = explain(self._reports, killed, self._received())
        forget_reports(self._reports)
        lines, total = [failure.message] if failure.message else [], self._worker_group.spec.max_restarts
        if not failure.restart_may_help:
            self._remaining_restarts = 0
        elif self._remaining_restarts and not killed and failure.message and failure == self._last_failure:
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
    or what a failed one gave. Raises TrainingError when the nodes cannot meet."""
    is_static = nodes.several and not nodes.is_elastic
    settings = {"rank": nodes.node_rank} if is_static else {"is_host": nodes.node_rank == 0}
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="static" if is_static else "c10d",
            endpoint=nodes.where,
            run_id="megatron_lite",
            min_nodes=nodes.min_nodes,
            max_nodes=nodes.max_nodes,
            local_addr=own_address,
            timeout=int(nodes.join_timeout),
            join_timeout=nodes.join_timeout,
            **settings,
        )
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=nodes.nproc_per_node,
        entrypoint=report_end,
        args=(target, args, str(reports), nodes.log_dir),
        rdzv_handler=handler,
        max_restarts=nodes.max_restarts,
        master_addr=nodes.master_addr if is_static else None,
        master_port=nodes.master_port if is_static else None,
        local_addr=own_address,
    )
    agent = Agent(spec, reports, received)
    try:
        result = agent.run()
    except (DistError, RendezvousError) as error:
        raise TrainingError(
            f"node {nodes.node_rank} could not meet the others at {nodes.where}: {str(error).splitlines()[0]}; start "
            "the same command on every machine, with its own --node-rank, within --join-timeout "
            f"({nodes.join_timeout:g} s), and see that nothing between them closes the port"
        ) from error
    finally:
        handler.shutdown()
    if result is None:
        raise TrainingError("the other nodes have ended this run; look at their output for the reason")
    return agent.exit_code if result.is_failed() else 0  # type: ignore[attr-defined]


def quiet_torch_logs() -> None:
    """Torch's agent logs each failure with its own traceback; `explain` says it in the user's terms."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
