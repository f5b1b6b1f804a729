"""`megatron-lite pretrain`: one training run, in this process, under torchrun or in ranks that it starts."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lite.cli.options import ConfigFile, Data, ForwardStep, Model, Overrides, command_line, takes_nodes
from megatron_lite.launch.nodes import Nodes
from megatron_lite.text import visible

if TYPE_CHECKING:
    from megatron_lite.config.schema import Config
    from megatron_lite.errors import StoppedEarly
    from megatron_lite.named_functions import NamedFunction
    from megatron_lite.training.state import TrainState


@takes_nodes()
def pretrain(
    overrides: Overrides = None,
    config: ConfigFile = None,
    model: Model = "",
    forward_step: ForwardStep = "",
    data: Data = "",
    nodes: Nodes | None = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config and data, print the full config, and exit.")
    ] = False,
) -> None:
    """Train a model. A run resumes from the newest checkpoint in run.dir."""
    from megatron_lite.cli.dry_run import start_of
    from megatron_lite.config.load import load_config
    from megatron_lite.config.validate import raise_any
    from megatron_lite.errors import StoppedEarly
    from megatron_lite.launch.launcher import launched_world_size, run_ranks
    from megatron_lite.launch.streams import survive_lost_output

    settings = load_config(config, overrides or [])
    names = {"model": model, "forward_step": forward_step, "data": data}
    functions = _functions(names)
    sizes = [launched_world_size(nodes), *(nodes.world_sizes[1:] if nodes else [])]
    check(settings, sizes, has_data=bool(data), command=command_line("pretrain", config, overrides or [], **names))
    if dry_run:
        settings, missing = with_data(settings, has_data=bool(data))
        start = start_of(settings, sizes[0], model)
        typer.echo("".join(f"# {notice}\n" for notice in start.notices), nl=False)
        typer.echo(description(start.config, sizes[0], start.state), nl=False)
        raise_any(missing)
        if start.error is not None:
            raise start.error
        check_later(start.config, sizes[0], start.state, has_data=bool(data))
        return
    # On several machines, one that exits here would leave the others waiting for it.
    if "RANK" not in os.environ and not (nodes and nodes.several):
        raise_any(with_data(settings, has_data=bool(data))[1])
    survive_lost_output(Path(settings.run.dir))
    try:
        exit_code = run_ranks("megatron_lite.cli.pretrain:train", (settings, functions), nodes)
    except StoppedEarly as stop:
        if "RANK" not in os.environ:
            raise
        _write_exit_code(settings, stop)
        return
    raise typer.Exit(exit_code)


def train(config: "Config", functions: "dict[str, NamedFunction]") -> None:
    """Train on one rank, with a hint that converts other formats, which training itself cannot import."""
    from megatron_lite.launch.pretrain import pretrain

    given = {_PARAMETERS[name]: function for name, function in functions.items()}
    pretrain(config, **given, hint=_convert_hint)


def _convert_hint(config: "Config") -> str:
    from megatron_lite.convert.driver import convert_hint  # takes 0.1 s to import

    return convert_hint(config)


_PARAMETERS = {"model": "model_provider", "forward_step": "forward_step", "data": "datasets_provider"}


def _functions(names: dict[str, str]) -> "dict[str, NamedFunction]":
    """The functions of a script, by option, without those that are not given."""
    if not any(names.values()):
        return {}
    from megatron_lite.named_functions import NamedFunction  # loads torch

    return {key: NamedFunction(name, f"--{key.replace('_', '-')}") for key, name in names.items() if name}


def check(config: "Config", world_sizes: list[int], command: str, *, has_data: bool = False) -> None:
    """Raise one ConfigError with all mistakes for each possible number of processes, the largest first.

    This runs before any rank starts.
    """
    from megatron_lite.config.validate import failures, missing_corpora_paths, missing_vocabulary, raise_any
    from megatron_lite.parallel.tasks import separate_tasks

    needed = config.parallel.model_size
    missing = [*([] if has_data else missing_corpora_paths(config)), *missing_vocabulary(config)]
    if len(world_sizes) > 1 and not config.train.global_batch_size:
        missing.append(
            "train.global_batch_size is not given, so it would change with the number of machines (--nnodes); give it"
        )
    if world_sizes == [1] and needed > 1:
        start = f"this layout needs {needed} processes, or a multiple of {needed}; got 1. " + (
            separate_tasks() or f"Start {needed} with: {command} --nproc-per-node {needed}"
        )
        raise_any([start, *failures(config, needed), *missing])
    with_most = failures(config, world_sizes[0])
    with_fewer = [
        f"with {size} {'process' if size == 1 else 'processes'}: {message}"
        for size in world_sizes[1:]
        for message in failures(config, size)
        if message not in with_most
    ]
    raise_any([*with_most, *with_fewer, *missing])


def with_data(config: "Config", *, has_data: bool) -> tuple["Config", list[str]]:
    """The config with the vocabulary size of its tokenizer, and a message for each missing data file.

    Raises ConfigError for a tokenizer that lacks special tokens of the samples.
    """
    from megatron_lite.config.validate import with_vocab_size
    from megatron_lite.data.samples import sample_maker
    from megatron_lite.data.tokenizer import build_tokenizer
    from megatron_lite.errors import DataError
    from megatron_lite.plan.data_lines import missing_corpora

    missing = [] if has_data else [f"data.paths: {message}" for message in missing_corpora(config.data.paths)]
    if config.data.tokenizer:
        try:
            tokenizer = build_tokenizer(config.data.tokenizer)
            config = with_vocab_size(config, tokenizer.vocab_size)
            if not has_data:
                sample_maker(config, tokenizer)  # raises without the special tokens
        except DataError as error:
            missing.append(f"data.tokenizer: {error}")
    return config, missing


def check_later(config: "Config", world_size: int, state: "TrainState", *, has_data: bool) -> None:
    """Raise the mistakes in data and tasks that the ranks of a run from `state` would, without starting them."""
    from megatron_lite.cli.dry_run import problems_of_data
    from megatron_lite.config.validate import raise_any
    from megatron_lite.errors import ConfigError

    problems = []
    if config.data.paths and not has_data:
        problems += problems_of_data(config, state, config.parallel.data(world_size))
    if config.train.tasks and config.data.tokenizer:
        from megatron_lite.evaluation.run import check_tasks  # loads torch

        try:
            check_tasks(config)
        except ConfigError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    raise_any([str(problem) for problem in problems])


def description(config: "Config", world_size: int, state: "TrainState") -> str:
    """The resolved config as YAML, after comments with its parameters, memory, and tokens of a run from `state`."""
    from megatron_lite.config.load import dump_config, resolved
    from megatron_lite.plan.sizes import largest_rank_parameters, num_parameters, state_bytes
    from megatron_lite.text import counted
    from megatron_lite.training.state import samples_for

    config, dp = resolved(config, world_size), config.parallel.data(world_size)
    train, length = config.train, config.data.seq_length
    lines = ["the number of parameters depends on the tokenizer"]
    if config.model.vocab_size:
        size = sum(state_bytes(config, dp * config.parallel.context).values()) * largest_rank_parameters(config)
        lines = [
            f"{num_parameters(config.model):,} parameters, padding included; the training state takes "
            f"{size / 1e9:,.3g} GB on the largest of {counted(world_size, 'rank')}"
        ]
    ramp = " after the ramp" if train.ramp_up else ""
    total = samples_for(train, dp, state)
    lines.append(
        f"{train.global_batch_size * length:,} tokens per step{ramp}, "
        f"{train.iterations:,} steps, {total * length:,} tokens"
    )
    if state.iteration:
        left = max(0, train.iterations - state.iteration)
        lines.append(
            f"continues at iteration {state.iteration:,}: {counted(left, 'step')} and "
            f"{counted((total - state.consumed_samples) * length, 'token')} remain"
        )
    return "".join(f"# {line}\n" for line in lines) + dump_config(config)


def _write_exit_code(config: "Config", stop: "StoppedEarly") -> None:
    """Write the exit code of a stopped run to `run.dir/exit_code`; the rank itself exits with 0.

    torchrun reports only 0 or not 0, and may restart ranks that exit with another code than 0.
    """
    from megatron_lite.errors import TrainingError
    from megatron_lite.files import atomic_write, disk_errors

    if os.environ["RANK"] == "0":
        path = Path(config.run.exit_code_file)
        with disk_errors("writing", path, TrainingError):
            atomic_write(path, f"{stop.exit_code}\n")
        print(visible(stop), file=sys.stderr)
