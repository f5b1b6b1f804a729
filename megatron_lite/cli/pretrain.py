"""`megatron-lite pretrain`: a whole training run, in this process, under torchrun or in ranks of its own."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_lite.config.schema import Config


def pretrain(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.FIELD=VALUE", help="Win over the file: optim.lr=3e-4")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A YAML file, such as configs/gpt.yaml.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, metavar="N", help="Start N ranks on this machine.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config, print it with every default, and stop.")
    ] = False,
) -> None:
    """Train a model; goes on from the newest checkpoint in run.dir."""
    from megatron_lite.cli.launch import launched_world_size, run_ranks
    from megatron_lite.config.load import dump_config, load_config

    settings = load_config(config, overrides or [])
    world_size = launched_world_size(nproc_per_node)
    check(settings, world_size, command=_command(config, overrides or []))
    if dry_run:
        typer.echo(dump_config(settings), nl=False)
        return
    exit_code = run_ranks("megatron_lite.cli.pretrain:train", (settings,), nproc_per_node)
    raise typer.Exit(exit_code or _read_exit_code(settings))


def check(config: "Config", world_size: int, command: str) -> None:
    """Raises one ConfigError with all that is wrong, before any rank starts."""
    from megatron_lite.config.validate import failures, raise_any

    needed = config.parallel.model_size
    missing = []
    if not config.data.paths:
        missing.append(
            "data.paths is empty; give the prefix of a .bin/.idx pair that `megatron-lite preprocess` writes"
        )
    if not config.data.tokenizer and not config.model.vocab_size:
        missing.append("there is neither data.tokenizer nor model.vocab_size; give one of them")
    if world_size == 1 and needed > 1:
        start = (
            f"this layout needs {needed} processes (or a multiple) and there is 1; start them with: "
            f"{command} --nproc-per-node {needed}"
        )
        raise_any([start, *failures(config, needed), *missing])
    raise_any([*failures(config, world_size), *missing])


def train(config: "Config") -> None:
    """What each rank does. A run that was asked to stop counts as a success of its ranks, so that nothing restarts
    or reports them; rank 0 leaves the command's exit code in `run.dir/exit_code`."""
    from megatron_lite.errors import StoppedEarly
    from megatron_lite.training.pretrain import pretrain

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        pretrain(config)
    except StoppedEarly as stop:
        if is_first:
            Path(config.run.exit_code_file).write_text(f"{stop.exit_code}\n", encoding="utf-8")
            print(stop, file=sys.stderr)


def _read_exit_code(config: "Config") -> int:
    """How the run ended, for the process that the user started; under torchrun a rank only tells 0 from not 0."""
    file = Path(config.run.exit_code_file)
    return int(file.read_text()) if "RANK" not in os.environ and file.exists() else 0


def _command(config: Path | None, overrides: list[str]) -> str:
    """The command as it was given, to show in a message."""
    words = ["megatron-lite", "pretrain", *(["--config", str(config)] if config else []), *overrides]
    return shlex.join(words)
