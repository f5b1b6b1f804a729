"""`megatron-lite inspect` for a corpus, a `.bin/.idx` pair."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from megatron_lite.data.indexed import IndexedDataset
    from megatron_lite.data.tokenizer import Tokenizer


def inspect_data(path: Path, tokenizer_spec: str) -> None:
    """Print documents, tokens, lengths and, if a tokenizer is available, text."""
    from megatron_lite.data.indexed import IndexedDataset, idx_path
    from megatron_lite.errors import DataError
    from megatron_lite.preprocess.examine import corpus_lines

    prefix = Path(str(path).removesuffix(".bin").removesuffix(".idx"))
    if not idx_path(prefix).exists():
        raise DataError(
            f"{path}: no such folder of checkpoints, and no corpus file {idx_path(prefix)}; give a run.dir, its "
            "checkpoints/, one iter_... folder or the prefix of a corpus"
        )
    data = IndexedDataset(prefix)
    typer.echo(str(prefix))
    tokenizer = _tokenizer(data, tokenizer_spec)
    for line in corpus_lines(data, tokenizer):
        typer.echo(line)


def _tokenizer(data: "IndexedDataset", given: str) -> "Tokenizer | None":
    """Print and return the given tokenizer or that of the corpus; None if the latter cannot be read."""
    from megatron_lite.data.tokenizer import build_tokenizer, tokenizer_hash
    from megatron_lite.errors import MegatronLiteError
    from megatron_lite.tokenizer_files import own_spec

    info = data.info
    spec = given or (own_spec(info.tokenizer, Path(data.prefix).parent) if info else "")
    if not spec:
        found = f"{info.tokenizer}, not in the corpus' folder" if info else "unknown (no .info.json)"
        typer.echo(f"  tokenizer   {found}; --tokenizer SPEC shows text")
        return None
    try:
        tokenizer, spec_hash = build_tokenizer(spec), tokenizer_hash(spec)
    except MegatronLiteError as error:
        if given:
            raise
        typer.echo(f"  tokenizer   {spec}: {error}; --tokenizer SPEC shows text")
        return None
    summary = f"{spec}, {tokenizer.vocab_size:,} tokens, hash {spec_hash[:12]}"
    if info and spec_hash != info.tokenizer_hash:
        summary += f"; NOT the tokenizer that wrote the corpus ({info.tokenizer}, hash {info.tokenizer_hash[:12]})"
    typer.echo(f"  tokenizer   {summary}")
    if info:
        ratio = info.source_bytes / max(1, info.tokens)
        options = ", ".join(f"{name}={value}" for name, value in info.options.items())
        typer.echo(f"  made by     megatron_lite {info.megatron_lite}: {options}; {ratio:.2f} bytes of text per token")
    return tokenizer
