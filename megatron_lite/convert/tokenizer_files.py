"""The tokenizer that a converter finds in a folder, as one of our SPECs."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.errors import MegatronLiteError
from megatron_lite.files import is_inside
from megatron_lite.text import listed
from megatron_lite.tokenizer_files import GENERATION_FILE, files_in


def own_files_in(folder: Path) -> dict[str, Path]:
    """The tokenizer's files in somebody's folder, without links that lead out of it."""
    return {name: path for name, path in files_in(folder).items() if is_inside(path, folder)}


def has_tokenizer(files: Mapping[str, Path]) -> bool:
    """Whether the files are more than the end tokens."""
    return bool(files.keys() - {GENERATION_FILE})


def copied(files: Mapping[str, Path]) -> str:
    """A line about the files that a conversion copies."""
    folders = sorted({str(path.parent) for path in files.values()})
    return f"copied {listed(sorted(files), len(files))} of {listed(folders, len(folders))}"


def carry(files: Mapping[str, Path], folder: Path) -> None:
    """Copy the files into the folder."""
    with save_errors("copying the tokenizer", folder):
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


def spec_in(folder: Path) -> str:
    """The SPEC of the tokenizer in the folder; empty if we have none for its files."""
    have = own_files_in(folder)
    if "tokenizer.json" in have:
        return f"hf:{have['tokenizer.json']}"
    if "vocab.json" in have and "merges.txt" in have:
        if "added_tokens.json" in have:
            return f"codegeex:{folder}"
        return f"gpt2:{have['vocab.json']},{have['merges.txt']}"
    return f"sentencepiece:{have['tokenizer.model']}" if "tokenizer.model" in have else ""


def readable(spec: str, vocab_size: int) -> Tokenizer | None:
    """The tokenizer; None if we cannot read it or the model has too few rows for its tokens."""
    try:
        tokenizer = build_tokenizer(spec) if spec else None
    except MegatronLiteError:
        return None
    return tokenizer if tokenizer and tokenizer.vocab_size <= vocab_size else None
