"""`megatron-lite train-tokenizer`: a sentencepiece vocabulary from text."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.cli.options import JsonKey, MoreInput, TextInput


def train_tokenizer(
    input: TextInput,
    output_prefix: Annotated[Path, typer.Option("--output-prefix", metavar="P", help="Prefix of the file P.model.")],
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab-size", min=1, max=1 << 24, metavar="N", help="Number of tokens; 256 of them are single bytes."
        ),
    ],
    more_input: MoreInput = None,
    json_key: JsonKey = "text",
) -> None:
    """Train a sentencepiece BPE tokenizer that encodes any text or code without loss."""
    from megatron_lite.preprocess.train_tokenizer import train_sentencepiece

    model = train_sentencepiece([*input, *(more_input or [])], output_prefix, vocab_size, json_key=json_key)
    typer.echo(f"{model}: {vocab_size:,} tokens; use it as the tokenizer sentencepiece:{model}")
