"""`megatron-lite generate`: text from a checkpoint."""

from typing import Annotated

import typer


def generate(
    load: Annotated[str, typer.Option("--load", metavar="RUN_DIR", help="The run.dir of a run with a checkpoint.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the text begins with.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=0, metavar="N")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="T", help="0 takes the likeliest token each time.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="The same seed gives the same text.")
    ] = 1234,
    no_tokenizer_check: Annotated[
        bool, typer.Option("--no-tokenizer-check", help="Take the tokenizer although its files changed since training.")
    ] = False,
    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, metavar="N", help="Spread the model over N processes.")
    ] = None,
) -> None:
    """Write text after a prompt with a run's newest checkpoint, on any number of processes, however it was trained."""
    from megatron_lite.cli.launch import launched_world_size, run_ranks
    from megatron_lite.cli.nodes import nodes_from
    from megatron_lite.config.validate import validate
    from megatron_lite.training.generate import check_tokenizer_of, config_of_run

    nodes = nodes_from(nproc_per_node)
    world_size = launched_world_size(nodes)
    validate(config_of_run(load, world_size), world_size)
    if not no_tokenizer_check:
        check_tokenizer_of(load)
    arguments = (load, prompt, max_new_tokens, temperature, seed)
    raise typer.Exit(run_ranks("megatron_lite.training.generate:generate_text", arguments, nodes))
