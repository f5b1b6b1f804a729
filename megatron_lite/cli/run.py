"""`megatron-lite run`: a Python script in the ranks of the launcher that `pretrain` uses."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.cli.options import (
    JoinTimeout,
    LogDir,
    MasterAddr,
    MasterPort,
    MaxRestarts,
    Nnodes,
    NodeRank,
    NprocPerNode,
)


def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file; its arguments follow.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Of the script.")] = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    join_timeout: JoinTimeout = 900.0,
    max_restarts: MaxRestarts = 0,
    log_dir: LogDir = None,
) -> None:
    """Run a Python script on every rank; options of the launch come before SCRIPT."""
    from megatron_lite.errors import ConfigError
    from megatron_lite.launch.launcher import launched_world_size, run_ranks
    from megatron_lite.launch.nodes import nodes_from

    if not script.is_file():
        raise ConfigError(f"{script}: no such file; run wants the path of a Python script")
    nodes = nodes_from(
        nproc_per_node,
        nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        join_timeout=join_timeout,
        max_restarts=max_restarts,
        log_dir=log_dir,
    )
    launched_world_size(nodes)
    raise typer.Exit(run_ranks("megatron_lite.cli.run:run_script", (str(script), arguments or []), nodes))


def run_script(script: str, arguments: list[str]) -> None:
    """Runs a script as `python SCRIPT ARGUMENTS` does.

    An exit with 0 is a return. The exit codes that a run's errors have become those errors, so that a launcher treats
    them alike.
    """
    from megatron_lite.errors import ConfigError, MegatronLiteError, StoppedEarly

    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            raise MegatronLiteError(end.code) from None
        for kind in (ConfigError, StoppedEarly):
            if end.code == kind.exit_code:
                raise kind(f"{script} ended with exit code {end.code}") from None
        if end.code:
            raise
