"""`megatron-lite inspect` for a corpus: what is in a `.bin/.idx` pair."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from megatron_lite.data.indexed import IndexedDataset
    from megatron_lite.data.tokenizer import Tokenizer


def inspect_data(path: Path, tokenizer_spec: str) -> None:
    """Prints documents, tokens, lengths, and, with the tokenizer of the corpus or the one given, text."""
    from megatron_lite.data.indexed import IndexedDataset, idx_path
    from megatron_lite.errors import DataError
    from megatron_lite.preprocess.examine import corpus_lines

    prefix = Path(str(path).removesuffix(".bin").removesuffix(".idx"))
    if not idx_path(prefix).exists():
        raise DataError(
            f"{path}: looked for a folder (a run, its checkpoints/ or one iter_... in it) and for {idx_path(prefix)} "
            "(a corpus), and found neither; give the path of one of them"
        )
    data = IndexedDataset(prefix)
    typer.echo(str(prefix))
    tokenizer = _tokenizer(data, tokenizer_spec)
    for line in corpus_lines(data, tokenizer):
        typer.echo(line)


def _tokenizer(data: "IndexedDataset", given: str) -> "Tokenizer | None":
    """The tokenizer given or of the record, None where it cannot be read; prints which it is."""
    from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
    from megatron_lite.errors import MegatronLiteError

    info = data.info
    spec = given or (info.tokenizer if info else "")
    if not spec:
        typer.echo("  tokenizer   unknown (no .info.json); --tokenizer SPEC shows text")
        return None
    try:
        tokenizer, found = build_tokenizer(spec), tokenizer_hash(spec)
    except MegatronLiteError as error:
        if given:
            raise
        typer.echo(f"  tokenizer   {spec}, which cannot be read ({error}); --tokenizer SPEC shows text")
        return None
    size = f"{spec}, {tokenizer.vocab_size:,} tokens, hash {found[:12]}"
    if info and found != info.tokenizer_hash:
        size += f"; NOT the one that wrote the corpus ({info.tokenizer}, hash {info.tokenizer_hash[:12]})"
    typer.echo(f"  tokenizer   {size}")
    if info:
        ratio = info.source_bytes / max(1, info.tokens)
        options = ", ".join(f"{name}={value}" for name, value in info.options.items())
        typer.echo(f"  made by     megatron_lite {info.megatron_lite}: {options}; {ratio:.2f} bytes of text per token")
    return tokenizer
