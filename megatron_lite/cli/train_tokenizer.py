"""`megatron-lite train-tokenizer`: a sentencepiece vocabulary from text."""

from pathlib import Path
from typing import Annotated

import typer


def train_tokenizer(
    input: Annotated[
        list[Path],
        typer.Option("--input", help="JSON-lines files (also .gz, .zst), source files or folders; several may follow."),
    ],
    output_prefix: Annotated[Path, typer.Option("--output-prefix", metavar="P", help="Writes P.model.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", min=1, help="Pieces, with 256 for single bytes.")],
    more_input: Annotated[list[Path] | None, typer.Argument(metavar="[PATH]...", help="More input.")] = None,
    json_key: Annotated[str, typer.Option("--json-key", help="The key of the text in a JSON line.")] = "text",
) -> None:
    """Train a sentencepiece BPE tokenizer that keeps every text, code included, exactly."""
    from megatron_lite.data.train_tokenizer import train_sentencepiece

    model = train_sentencepiece([*input, *(more_input or [])], output_prefix, vocab_size, json_key=json_key)
    typer.echo(f"{model}: {vocab_size:,} pieces; use it as the tokenizer sentencepiece:{model}")
