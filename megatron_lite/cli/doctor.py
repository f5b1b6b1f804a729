"""`megatron-lite doctor`: checks that find the causes of a failed run before it starts."""

import errno
import os
import socket

import typer

from megatron_lite.cli.options import ConfigFile, Overrides, command_line, takes_nodes
from megatron_lite.launch.nodes import Nodes


@takes_nodes(without=("max_restarts", "log_dir"))
def doctor(
    overrides: Overrides = None,
    config: ConfigFile = None,
    nodes: Nodes | None = None,
) -> None:
    """Check the machines, network, disks and data of a run. Without --config, check only the machines and network."""
    # torch prints a page for a failed connection; our messages have its first line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from megatron_lite.cli.pretrain import check
    from megatron_lite.config.load import load_config
    from megatron_lite.config.validate import validate
    from megatron_lite.launch.launcher import launched_world_size, run_ranks

    settings = load_config(config, overrides or [])
    sizes = [launched_world_size(nodes), *(nodes.world_sizes[1:] if nodes else [])]
    if config is not None or settings.data.paths:
        check(settings, sizes, command=command_line("doctor", config, overrides or []))
    else:
        validate(settings, sizes[0])
    if nodes is not None and nodes.several and nodes.node_rank == 0:
        check_port(nodes)
    raise typer.Exit(run_ranks("megatron_lite.doctor.checks:examine", (settings,), nodes))


def check_port(nodes: Nodes) -> None:
    """Print whether the rendezvous port of this machine is free; exit with 1 if it is not."""
    host, port = socket.gethostname(), nodes.master_port
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
            probe.bind(("", port))
    except OSError as error:
        remedy = "give another --master-port on every machine"
        reason = f"cannot be opened: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            reason, remedy = "is taken", f"stop its process (`ss -ltnp 'sport = :{port}'` shows it), or {remedy}"
        typer.echo(f" FAIL  port: {port} of {host} {reason}; {remedy}")
        raise typer.Exit(1) from None
    typer.echo(f" ok    port: {port} of {host} is free")
