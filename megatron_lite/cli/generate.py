"""`megatron-lite generate`: text from a checkpoint."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.cli.options import Model


def generate(
    load: Annotated[
        Path,
        typer.Option("--load", metavar="FOLDER", help="A run.dir, its checkpoints/ folder or one iter_... folder."),
    ],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Start of the text; - reads it from stdin.")],
    iteration: Annotated[
        int | None,
        typer.Option("--iteration", min=0, metavar="N", help="Iteration of the checkpoint; default: the newest."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=0, metavar="N", help="Most tokens to add.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, metavar="T", help="Randomness; 0 always picks the likeliest token."),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="The same seed gives the same text.")
    ] = 1234,
    no_tokenizer_check: Annotated[
        bool, typer.Option("--no-tokenizer-check", help="Accept a tokenizer whose files changed since training.")
    ] = False,
    model: Model = "",
    nproc_per_node: Annotated[
        int | None,
        typer.Option("--nproc-per-node", min=1, metavar="N", help="Number of processes that share the model."),
    ] = None,
) -> None:
    """Continue a prompt with the model of a checkpoint, on any number of processes.

    This is for a look at a model, not for serving it: each token takes a forward pass over the full text.
    """
    from megatron_lite.checkpoint.directory import resolve
    from megatron_lite.config.validate import validate
    from megatron_lite.generate import check_tokenizer_of, config_of
    from megatron_lite.launch.launcher import launched_world_size, run_ranks
    from megatron_lite.launch.nodes import nodes_from

    nodes = nodes_from(nproc_per_node)
    world_size = launched_world_size(nodes)
    folder = resolve(load, iteration)
    validate(config_of(folder, world_size, model), world_size)
    if not no_tokenizer_check:
        check_tokenizer_of(folder)
    text = sys.stdin.read() if prompt == "-" else prompt
    arguments = (folder, text, max_new_tokens, temperature, seed, model)
    raise typer.Exit(run_ranks("megatron_lite.generate:generate_text", arguments, nodes))
