"""`megatron-lite preprocess`: text to `.bin/.idx`."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_lite.training.available import available_cores


def preprocess(
    input: Annotated[
        list[Path],
        typer.Option("--input", help="JSON-lines files (also .gz, .zst), source files or folders; several may follow."),
    ],
    output_prefix: Annotated[
        Path, typer.Option("--output-prefix", metavar="P", help="Writes P_text_document.bin and .idx.")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            metavar="SPEC",
            help="bytes, sentencepiece:FILE, gpt2:VOCAB,MERGES, hf:tokenizer.json or codegeex:FOLDER.",
        ),
    ],
    workers: Annotated[
        int, typer.Option("--workers", min=1, default_factory=available_cores, help="Processes that tokenize.")
    ],
    more_input: Annotated[list[Path] | None, typer.Argument(metavar="[PATH]...", help="More input.")] = None,
    json_key: Annotated[str, typer.Option("--json-key", help="The key of the text in a JSON line.")] = "text",
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End each document with the end token.")] = False,
    language_tag: Annotated[
        bool, typer.Option("--language-tag", help="Start code with a comment that names its language, as CodeGeeX.")
    ] = False,
) -> None:
    """Tokenize text into the .bin/.idx pair that training reads."""
    from megatron_lite.data.preprocess import preprocess as run

    report = run(
        [*input, *(more_input or [])],
        output_prefix,
        tokenizer,
        workers=workers,
        json_key=json_key,
        append_eod=append_eod,
        language_tag=language_tag,
    )
    typer.echo(
        f"{report.prefix}: {report.num_documents:,} documents, {report.num_tokens:,} tokens, "
        f"{report.text_bytes / max(1, report.num_tokens):.2f} bytes of text a token"
    )
    if report.num_empty or report.num_undecodable:
        typer.echo(
            f"left out: {report.num_empty:,} empty documents, {report.num_undecodable:,} files that are not UTF-8"
        )
    typer.echo(f"train on it with data.paths=[{report.prefix}] data.tokenizer={tokenizer}")
