"""`megatron-lite evaluate`: losses of corpora and results of tasks for a checkpoint."""

from typing import Annotated

import typer

from megatron_lite.cli.options import Bos, ForwardStep, Iteration, Load, Model, NoTokenizerCheck, NumProcesses
from megatron_lite.errors import ConfigError

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.FIELD=VALUE",
        help="Config fields that replace those of the run, such as parallel.tensor=2; and more prefixes of --data.",
    ),
]
Corpora = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="PREFIX...", help="Corpora, of which every token is predicted once."),
]
Samples = Annotated[
    int, typer.Option("--samples", min=0, metavar="N", help="Sequences of each corpus of --data; 0: all.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--tasks", metavar="FILE.jsonl", help="Questions: multiple choice, cloze or exact match."),
]
LmEval = Annotated[
    str, typer.Option("--lm-eval", metavar="TASK,...", help="Tasks of the package lm-eval, which must be installed.")
]
LmEvalInclude = Annotated[
    str, typer.Option("--lm-eval-include", metavar="FOLDER", help="A folder with more tasks for --lm-eval.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Texts of tasks in one forward.")]


def evaluate(
    load: Load,
    words: Words = None,
    iteration: Iteration = None,
    data: Corpora = None,
    samples: Samples = 0,
    tasks: Tasks = None,
    lm_eval: LmEval = "",
    lm_eval_include: LmEvalInclude = "",
    batch_size: BatchSize = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    bos: Bos = None,
    no_tokenizer_check: NoTokenizerCheck = False,
    model: Model = "",
    forward_step: ForwardStep = "",
    nproc_per_node: NumProcesses = None,
) -> None:
    """Evaluate a checkpoint: losses, perplexities and tasks.

    Without --data, --tasks and --lm-eval it computes the validation and test loss of the run, over the samples that the
    run itself reads. The layout is that of training if the number of processes allows it, else tensor parallelism.
    """
    from megatron_lite.checkpoint.directory import resolve
    from megatron_lite.config.validate import validate
    from megatron_lite.evaluation.lm_eval import check_installed
    from megatron_lite.evaluation.run import Request, check_files, config_of, trained_batch
    from megatron_lite.generate.run import check_tokenizer_of
    from megatron_lite.launch.launcher import launched_world_size, run_ranks
    from megatron_lite.launch.nodes import nodes_from

    overrides = tuple(word for word in words or () if "=" in word)
    more = [word for word in words or () if "=" not in word]
    if more and not data:
        raise ConfigError(f"{more[0]} is neither SECTION.FIELD=VALUE nor a prefix after --data")
    if lm_eval:
        check_installed()
    nodes = nodes_from(nproc_per_node)
    world_size = launched_world_size(nodes)
    folder = resolve(load, iteration)
    config = config_of(folder, world_size, overrides, model)
    validate(config, world_size)
    if not no_tokenizer_check:
        check_tokenizer_of(folder, config.data.tokenizer)
    request = Request(
        corpora=(*(data or ()), *more),
        tasks=tuple(tasks or ()),
        lm_eval=tuple(filter(None, lm_eval.split(","))),
        lm_eval_include=lm_eval_include,
        samples=samples,
        batch_size=batch_size,
        json=as_json,
        bos=bos,
        model=model,
        forward_step=forward_step,
        trained_batch=trained_batch(folder),
    )
    check_files(request)
    raise typer.Exit(run_ranks("megatron_lite.evaluation.run:evaluate_checkpoint", (folder, request, overrides), nodes))
