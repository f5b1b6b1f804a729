"""`megatron-lite generate`: text from a checkpoint."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_lite.cli.options import Bos, Iteration, Load, Model, NoTokenizerCheck, NumProcesses
from megatron_lite.errors import ConfigError
from megatron_lite.preprocess.formats import read_text
from megatron_lite.text import parse_json

if TYPE_CHECKING:
    from megatron_lite.generate.run import Prompt

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="data.tokenizer=SPEC", help="The tokenizer of a checkpoint that does not hold its own."),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="Start of a text; - reads it from stdin. Repeat it for several."),
]
PromptFile = Annotated[
    str,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help='A prompt on each line, or with .jsonl an object with "prompt" on each; - reads lines from stdin.',
    ),
]
TopK = Annotated[int, typer.Option("--top-k", min=0, metavar="K", help="Choose among the K likeliest tokens; 0: all.")]
TopP = Annotated[
    float,
    typer.Option("--top-p", metavar="P", help="Choose among the likeliest tokens with probability P together."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", metavar="X", help="Above 1, tokens that the text has become less likely."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="The text ends before this one. Repeat it for several."),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, metavar="N", help="Number of texts that are computed together.")
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", min=0.0, metavar="T", help="Randomness; 0 always picks the likeliest token."),
]


def generate(
    load: Load,
    words: Words = None,
    prompt: Prompts = None,
    prompt_file: PromptFile = "",
    iteration: Iteration = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=0, metavar="N", help="Most tokens to add.")
    ] = 64,
    num_samples: Annotated[
        int, typer.Option("--num-samples", min=1, max=100_000, metavar="N", help="Number of texts for each prompt.")
    ] = 1,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="The same seed gives the same text.")
    ] = 1234,
    batch_size: BatchSize = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each text.")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute the full text for each token, for comparison.")
    ] = False,
    bos: Bos = None,
    no_tokenizer_check: NoTokenizerCheck = False,
    model: Model = "",
    nproc_per_node: NumProcesses = None,
) -> None:
    """Continue prompts with the model of a checkpoint, on any number of processes.

    A single text is printed as it is made, several when they are complete. A report about speed follows on stderr.
    """
    from megatron_lite.checkpoint.directory import resolve
    from megatron_lite.config.validate import validate
    from megatron_lite.generate.run import Request, check_tokenizer_of, config_of
    from megatron_lite.generate.sampling import Sampling
    from megatron_lite.launch.launcher import launched_world_size, run_ranks
    from megatron_lite.launch.nodes import nodes_from
    from megatron_lite.launch.streams import show_as_it_is

    show_as_it_is()  # a pipe gets the characters of the model
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p is {top_p:g}; use a probability above 0, such as 0.9, or 1 for all tokens")
    if not 1e-3 <= repetition_penalty <= 1e3:  # beyond them, logits overflow
        raise ConfigError(f"--repetition-penalty is {repetition_penalty:g}; use 0.001 to 1000, or 1 for none")
    if "" in (stop or []):
        raise ConfigError("--stop is empty, so every text would end at once; give a text, or leave it out")
    nodes = nodes_from(nproc_per_node)
    world_size = launched_world_size(nodes)
    folder = resolve(load, iteration)
    tokenizer = _tokenizer(words or [])
    config = config_of(folder, world_size, model, tokenizer)
    validate(config, world_size)
    if not no_tokenizer_check:
        check_tokenizer_of(folder, config.data.tokenizer)
    request = Request(
        tuple(read_prompts(prompt or [], prompt_file)),
        Sampling(temperature, top_k, top_p, repetition_penalty),
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        batch_size=batch_size,
        stop=tuple(stop or ()),
        seed=seed,
        cache=not no_cache,
        json=as_json,
        bos=bos,
        tokenizer=tokenizer,
    )
    raise typer.Exit(run_ranks("megatron_lite.generate.run:generate_texts", (folder, request, model), nodes))


def _tokenizer(words: list[str]) -> str:
    """The value of `data.tokenizer=SPEC`; empty without it."""
    from megatron_lite.config.load import load_config

    if others := [word for word in words if not word.startswith("data.tokenizer=")]:
        raise ConfigError(f"{others[0]} cannot be given; use data.tokenizer=SPEC alone, and --prompt for a text")
    return load_config(None, words).data.tokenizer


def read_prompts(given: list[str], file: str) -> "list[Prompt]":
    """All prompts, in the order of the command line. Raise ConfigError without one, and for an empty one."""
    from megatron_lite.generate.run import Prompt

    if given.count("-") + (file == "-") > 1:
        raise ConfigError("--prompt and --prompt-file read standard input more than once; give - once")
    if not (given or file):
        raise ConfigError("--prompt and --prompt-file are both missing; give a prompt, or a file of them")
    prompts = [Prompt(sys.stdin.read() if text == "-" else text) for text in given]
    if file:
        lines = _lines_of(file)
        parse = _prompt_of_object if file.lower().endswith(".jsonl") else lambda line, _: line
        prompts += [Prompt(parse(line, f"{file}:{at}"), f"{file}:{at}") for at, line in enumerate(lines, start=1)]
    for prompt in prompts:
        if not prompt.text:
            raise ConfigError(f"{prompt.origin}: the prompt is empty; give at least one character")
    if not prompts:
        raise ConfigError(f"{file}: the file is empty; write a prompt on each line")
    return [Prompt(_as_text(prompt.text), prompt.origin) for prompt in prompts]


def _as_text(given: str) -> str:
    """From a shell, an argument can have any bytes; JSON can have half a surrogate pair."""
    halves = re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", given)
    return halves.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _lines_of(file: str) -> list[str]:
    text = sys.stdin.read() if file == "-" else read_text(Path(file), "a text file")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _prompt_of_object(line: str, where: str) -> str:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise ConfigError(f'{where}: not JSON ({error}); write {{"prompt": "..."}} on each line') from None
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise ConfigError(f'{where}: no text "prompt" in this line; write {{"prompt": "..."}} on each line')
    return found["prompt"]
