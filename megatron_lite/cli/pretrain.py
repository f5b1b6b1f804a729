"""`megatron-lite pretrain`: a whole training run, in this process, under torchrun or in ranks of its own."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lite.cli.options import (
    ConfigFile,
    JoinTimeout,
    LogDir,
    MasterAddr,
    MasterPort,
    MaxRestarts,
    Model,
    Nnodes,
    NodeRank,
    NprocPerNode,
    Overrides,
)

if TYPE_CHECKING:
    from megatron_lite.config.schema import Config
    from megatron_lite.errors import StoppedEarly
    from megatron_lite.training.provider import NamedProvider


def pretrain(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: Model = "",
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    join_timeout: JoinTimeout = 900.0,
    max_restarts: MaxRestarts = 0,
    log_dir: LogDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config and data, print what would be trained, and stop.")
    ] = False,
) -> None:
    """Train a model; goes on from the newest checkpoint in run.dir."""
    from megatron_lite.config.load import load_config
    from megatron_lite.config.validate import raise_any
    from megatron_lite.errors import StoppedEarly
    from megatron_lite.launch.launcher import launched_world_size, run_ranks
    from megatron_lite.launch.nodes import nodes_from
    from megatron_lite.training.streams import survive_lost_output

    settings = load_config(config, overrides or [])
    providers = _providers(model)
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
    sizes = [launched_world_size(nodes), *(nodes.world_sizes[1:] if nodes else [])]
    check(settings, sizes, command=_command(config, model, overrides or []))
    if dry_run:
        settings, missing = with_data(settings)
        typer.echo(description(settings, sizes[0]), nl=False)
        raise_any(missing)
        return
    # Of several machines, one that ends here would leave the others waiting for it.
    if "RANK" not in os.environ and not (nodes and nodes.several):
        raise_any(with_data(settings)[1])
    survive_lost_output(Path(settings.run.dir))
    try:
        exit_code = run_ranks("megatron_lite.cli.pretrain:train", (settings, *providers), nodes)
    except StoppedEarly as stop:
        if "RANK" not in os.environ:
            raise
        _leave_exit_code(settings, stop)
        return
    raise typer.Exit(exit_code)


def train(config: "Config", *providers: "NamedProvider") -> None:
    """The work of one rank: training, with what only the command line knows passed to it."""
    from megatron_lite.training.pretrain import pretrain

    pretrain(config, *providers, hint=_convert_hint)


def _convert_hint(config: "Config") -> str:
    from megatron_lite.convert.driver import convert_hint  # a tenth of a second, which other runs need not wait

    return convert_hint(config)


def _providers(model: str) -> "tuple[NamedProvider, ...]":
    """What builds the model, where it is not the built-in one."""
    if not model:
        return ()
    from megatron_lite.training.provider import NamedProvider  # which loads torch

    return (NamedProvider(model),)


def check(config: "Config", world_sizes: list[int], command: str) -> None:
    """Raises one ConfigError with all that is wrong, before any rank starts: for each number of processes that the run
    may have, of which the first is the largest."""
    from megatron_lite.config.validate import failures, missing_corpora_paths, missing_vocabulary, raise_any

    needed = config.parallel.model_size
    missing = [*missing_corpora_paths(config), *missing_vocabulary(config)]
    if len(world_sizes) > 1 and not config.train.global_batch_size:
        missing.append(
            "train.global_batch_size is not given, so it would change with the number of machines (--nnodes), and with "
            "it the training; give it"
        )
    if world_sizes == [1] and needed > 1:
        start = (
            f"this layout needs {needed} processes, or a multiple of {needed}, and 1 was started; start {needed} with: "
            f"{command} --nproc-per-node {needed}"
        )
        raise_any([start, *failures(config, needed), *missing])
    whatever = failures(config, world_sizes[0])
    with_fewer = [
        f"with {size} process{'es' * (size > 1)}: {message}"
        for size in world_sizes[1:]
        for message in failures(config, size)
        if message not in whatever
    ]
    raise_any([*whatever, *with_fewer, *missing])


def with_data(config: "Config") -> tuple["Config", list[str]]:
    """The config with the vocabulary of its tokenizer, and a message for all that this machine misses of its data."""
    from megatron_lite.config.validate import with_vocab_size
    from megatron_lite.data.blended import missing_corpora
    from megatron_lite.data.tokenizer import build_tokenizer
    from megatron_lite.errors import DataError

    missing = [f"data.paths: {message}" for message in missing_corpora(config.data.paths)]
    if config.data.tokenizer:
        try:
            config = with_vocab_size(config, build_tokenizer(config.data.tokenizer).vocab_size)
        except DataError as error:
            missing.append(f"data.tokenizer: {error}")
    return config, missing


def description(config: "Config", world_size: int) -> str:
    """The config as YAML that trains the same, with all values that follow from others, below what they amount to."""
    from megatron_lite.config.load import dump_config, resolved
    from megatron_lite.config.sizes import largest_rank_parameters, num_parameters, state_bytes
    from megatron_lite.training.state import samples_for

    config, dp = resolved(config, world_size), config.parallel.data(world_size)
    train, length = config.train, config.data.seq_length
    lines = ["the number of parameters is not known without the tokenizer"]
    if config.model.vocab_size:
        state = sum(state_bytes(config, dp).values()) * largest_rank_parameters(config)
        lines = [
            f"{num_parameters(config.model):,} parameters, padding included; the training state takes "
            f"{state / 1e9:,.3g} GB on the largest of {world_size:,} rank{'s' * (world_size > 1)}"
        ]
    lines.append(
        f"{train.global_batch_size * length:,} tokens per step{' after the ramp' * bool(train.ramp_up)}, "
        f"{train.iterations:,} steps, {samples_for(train, dp) * length:,} tokens"
    )
    return "".join(f"# {line}\n" for line in lines) + dump_config(config)


def _leave_exit_code(config: "Config", stop: "StoppedEarly") -> None:
    """Under torchrun a rank can only tell 0 from not 0, and what is not 0 may be started again: a run that was stopped
    ends with 0, and `run.dir/exit_code` holds what our own launcher would have ended with."""
    if os.environ["RANK"] == "0":
        Path(config.run.exit_code_file).write_text(f"{stop.exit_code}\n", encoding="utf-8")
        print(stop, file=sys.stderr)


def _command(config: Path | None, model: str, overrides: list[str]) -> str:
    """The command as it was given, to show in a message."""
    options = {"--config": config, "--model": model}
    given = [word for option, value in options.items() if value for word in (option, str(value))]
    words = ["megatron-lite", "pretrain", *given, *overrides]
    return shlex.join(words)
