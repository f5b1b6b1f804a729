"""`megatron-lite run`: a Python script on ranks started by the launcher of `pretrain`."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.cli.options import takes_nodes
from megatron_lite.launch.nodes import Nodes


@takes_nodes()
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Python file, followed by its arguments.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of the script.")] = None,
    nodes: Nodes | None = None,
) -> None:
    """Run a Python script on every rank. Launch options come before SCRIPT."""
    from megatron_lite.errors import ConfigError
    from megatron_lite.launch.launcher import launched_world_size, run_ranks

    if not script.is_file():
        raise ConfigError(f"{script}: no such file; give the path of a Python script")
    launched_world_size(nodes)
    raise typer.Exit(run_ranks("megatron_lite.cli.run:run_script", (str(script), arguments or []), nodes))


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does.

    Exit codes of a run become the matching errors, so that the launcher treats scripts and runs alike.
    """
    from megatron_lite.errors import ConfigError, MegatronLiteError, StoppedEarly
    from megatron_lite.launch.streams import show_as_it_is

    show_as_it_is()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            raise MegatronLiteError(stop.code) from None
        for kind in (ConfigError, StoppedEarly):
            if stop.code == kind.exit_code:
                raise kind(f"{script} ended with exit code {stop.code}") from None
        if stop.code:
            raise
