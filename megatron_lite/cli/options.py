"""Options that several commands share."""

import inspect
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_lite.launch.nodes import nodes_from

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.FIELD=VALUE", help="Config fields that replace those of the file: optim.lr=3e-4"),
]
TextInput = Annotated[
    list[Path],
    typer.Option(
        "--input",
        metavar="PATH...",
        help="One or more JSON-lines files (also .gz, .zst), text files, source files or folders.",
    ),
]
MoreInput = Annotated[list[Path] | None, typer.Argument(metavar="PATH", hidden=True)]  # of --input
JsonKey = Annotated[str, typer.Option("--json-key", metavar="KEY", help="Key of the text in a JSON line.")]
TokenizerSpec = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        metavar="SPEC",
        help="bytes, sentencepiece:FILE, gpt2:VOCAB,MERGES, hf:tokenizer.json or codegeex:FOLDER.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="FILE.py:NAME", help="A function that builds a custom model; same call as get_model."
    ),
]
ForwardStep = Annotated[
    str,
    typer.Option(
        "--forward-step", metavar="FILE.py:NAME", help="A function (batch, model) that returns the loss and scalars."
    ),
]
Data = Annotated[
    str, typer.Option("--data", metavar="FILE.py:NAME", help="A function of the run that returns its datasets, Splits.")
]
Load = Annotated[
    Path,
    typer.Option("--load", metavar="FOLDER", help="A run.dir, its checkpoints/ folder or one iter_... folder."),
]
Iteration = Annotated[
    int | None,
    typer.Option("--iteration", min=0, metavar="N", help="Iteration of the checkpoint; default: the newest."),
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        show_default="as the model was trained",
        help="Start each prompt with the token of the tokenizer for that, or leave it out.",
    ),
]
NoTokenizerCheck = Annotated[
    bool, typer.Option("--no-tokenizer-check", help="Accept a tokenizer whose files changed since training.")
]
NumProcesses = Annotated[
    int | None,
    typer.Option("--nproc-per-node", min=1, metavar="N", help="Number of processes that share the model."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file: configs/gpt.yaml")]


def _launch_options(
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, metavar="N", help="Number of ranks to start on this node.")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option("--nnodes", metavar="N|MIN:MAX", help="Number of nodes, or MIN:MAX for elastic training."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", min=0, metavar="N", help="Index of this node; 0 is the node at --master-addr."),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="Name or address of the first node.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option("--master-port", min=1, max=65535, metavar="N", help="Rendezvous port; default 29500."),
    ] = None,
    join_timeout: Annotated[
        float,
        typer.Option("--join-timeout", min=1, metavar="SECONDS", help="Longest wait for the other nodes."),
    ] = 900.0,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, metavar="N", help="Number of times to restart failed ranks.")
    ] = 0,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="FOLDER", help="Folder for one output file per rank, except the first."),
    ] = None,
) -> None:
    """The launch options with their defaults, as Typer reads them from a signature."""


def takes_nodes(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the launch options, except those in `without`, in place of its parameter `nodes`."""
    options = [option for name, option in inspect.signature(_launch_options).parameters.items() if name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        """The command with the options."""

        @wraps(command)
        def command_with_options(**given: Any) -> None:
            launch = {option.name: given.pop(option.name) for option in options}
            command(**given, nodes=nodes_from(**launch))

        parameters = list(inspect.signature(command).parameters.values())
        place = [parameter.name for parameter in parameters].index("nodes")
        parameters[place : place + 1] = options
        # Typer reads both.
        vars(command_with_options)["__signature__"] = inspect.Signature(parameters)
        command_with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command_with_options

    return decorate


def command_line(command: str, config: Path | None, overrides: list[str], **functions: str) -> str:
    """The command with its config, the functions of a script and overrides, for messages."""
    words = ["--config", str(config)] if config else []
    return shlex.join(["megatron-lite", command, *words, *function_words(**functions), *overrides])


def function_words(**functions: str) -> list[str]:
    """The options that name functions of a script, without those that are not given."""
    return [word for name, value in functions.items() if value for word in (f"--{name.replace('_', '-')}", value)]
