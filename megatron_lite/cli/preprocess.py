"""`megatron-lite preprocess`: text to a `.bin/.idx` pair."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_lite.cli.options import JsonKey, MoreInput, TextInput, TokenizerSpec
from megatron_lite.launch.available import available_cores

if TYPE_CHECKING:
    from megatron_lite.preprocess.corpus import PreprocessReport


def preprocess(
    input: TextInput,
    output_prefix: Annotated[
        Path,
        typer.Option(
            "--output-prefix", metavar="P", help="Prefix of the files P_text_document.bin, .idx and .info.json."
        ),
    ],
    tokenizer: TokenizerSpec,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=4096,
            metavar="N",
            default_factory=available_cores,
            show_default="one per core",
            help="Number of processes.",
        ),
    ],
    more_input: MoreInput = None,
    json_key: JsonKey = "text",
    split_on: Annotated[
        Literal["file", "blank-line", "line"],
        typer.Option("--split-on", metavar="file|blank-line|line", help="Separator of documents in plain text."),
    ] = "file",
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="Add the end-of-document token to each document.")
    ] = False,
    prepend_bos: Annotated[
        bool, typer.Option("--prepend-bos", help="Start each document with the tokenizer's token for that.")
    ] = False,
    language_tag: Annotated[
        bool,
        typer.Option("--language-tag", help="Start code with a comment that names its language, as CodeGeeX does."),
    ] = False,
) -> None:
    """Tokenize text into the .bin/.idx pair that training reads.

    Each JSON line is one document. Each plain text file is one document, unless --split-on divides it.
    """
    from megatron_lite.preprocess.corpus import preprocess as run
    from megatron_lite.text import counted

    report = run(
        [*input, *(more_input or [])],
        output_prefix,
        tokenizer,
        workers=workers,
        json_key=json_key,
        append_eod=append_eod,
        prepend_bos=prepend_bos,
        language_tag=language_tag,
        split_on=split_on,
    )
    typer.echo(
        f"{report.prefix}: {counted(report.num_documents, 'document')}, {counted(report.num_tokens, 'token')}, "
        f"{report.text_bytes / max(1, report.num_tokens):.2f} bytes of text per token"
    )
    for line in skipped(report):
        typer.echo(f"skipped: {line}")
    typer.echo(f"train on it with data.paths=[{report.prefix}] data.tokenizer={tokenizer}")


def skipped(report: "PreprocessReport") -> Iterator[str]:
    """Lines that count the inputs left out of the corpus, one for each reason."""
    from megatron_lite.text import counted

    if unknown := report.found.unknown:
        suffixes = ", ".join(f"{suffix} {count:,}" for suffix, count in unknown.most_common())
        yield f"{counted(unknown.total(), 'file')} with an unknown suffix ({suffixes})"
    if links := report.found.num_links:
        yield f"{counted(links, 'link')} to files outside of the input folder; give such files themselves"
    for folder in report.found.empty_folders:
        yield f"{folder}, a folder without a file of a known suffix"
    if report.num_undecodable:
        yield f"{counted(report.num_undecodable, 'document')} not in UTF-8"
    if report.num_empty:
        yield counted(report.num_empty, "empty document")
