"""`megatron-lite doctor`: what would make a long run fail, found before it starts."""

import errno
import os
import shlex
import socket

import typer

from megatron_lite.cli.options import (
    ConfigFile,
    JoinTimeout,
    MasterAddr,
    MasterPort,
    Nnodes,
    NodeRank,
    NprocPerNode,
    Overrides,
)
from megatron_lite.launch.nodes import Nodes


def doctor(
    overrides: Overrides = None,
    config: ConfigFile = None,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    join_timeout: JoinTimeout = 900.0,
) -> None:
    """Check machines, network, disks and data as a run would use them; without --config the machines alone."""
    # Of a connection that fails torch prints a page; its first line is in our messages.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from megatron_lite.cli.pretrain import check
    from megatron_lite.config.load import load_config
    from megatron_lite.config.validate import validate
    from megatron_lite.launch.launcher import launched_world_size, run_ranks
    from megatron_lite.launch.nodes import nodes_from

    settings = load_config(config, overrides or [])
    nodes = nodes_from(
        nproc_per_node,
        nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        join_timeout=join_timeout,
    )
    sizes = [launched_world_size(nodes), *(nodes.world_sizes[1:] if nodes else [])]
    if config is not None or settings.data.paths:
        words = ["megatron-lite", "doctor", *(["--config", str(config)] if config else []), *(overrides or [])]
        check(settings, sizes, command=shlex.join(words))
    else:
        validate(settings, sizes[0])
    if nodes is not None and nodes.several and nodes.node_rank == 0:
        check_port(nodes)
    raise typer.Exit(run_ranks("megatron_lite.doctor.checks:examine", (settings,), nodes))


def check_port(nodes: Nodes) -> None:
    """Prints whether the nodes can meet at this machine's port; ends with 1 where something else listens there."""
    host, port = socket.gethostname(), nodes.master_port
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
            probe.bind(("", port))
    except OSError as error:
        found, other = f"{port} of {host}", "give another --master-port on every machine"
        if error.errno == errno.EADDRINUSE:
            text = f"{found} is taken; end what listens there (`ss -ltnp 'sport = :{port}'` names it), or {other}"
        else:
            text = f"{found} cannot be listened at: {error.strerror}; {other}"
        typer.echo(f" FAIL  port: {text}")
        raise typer.Exit(1) from None
    typer.echo(f" ok    port: {port} of {host} is free")
