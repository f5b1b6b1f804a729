"""The files of a model's tokenizer, by Hugging Face's names and as one of our SPECs; converters copy them."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.errors import MegatronLiteError

# All names of Hugging Face; weights and configs are not copied.
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
# Not a file of a tokenizer, but with its end token.
BESIDE = ("generation_config.json",)


def files_in(folder: Path) -> dict[str, Path]:
    """The tokenizer's files in a folder of Hugging Face's layout."""
    found = {name: folder / name for name in (*NAMES, *BESIDE) if (folder / name).is_file()}
    return found if set(NAMES) & set(found) else {}


def files_of(spec: str) -> dict[str, Path]:
    """The files of one of our SPECs that exist, by name."""
    kind, _, place = spec.partition(":")
    if kind == "gpt2":
        vocab, _, merges = place.partition(",")
        found = {"vocab.json": Path(vocab), "merges.txt": Path(merges)}
    elif kind == "sentencepiece":
        found = {"tokenizer.model": Path(place)}
    elif kind in ("hf", "codegeex"):
        path = Path(place)
        found = files_in(path) if path.is_dir() else {**files_in(path.parent), "tokenizer.json": path}
    else:
        found = {}
    return {name: path for name, path in found.items() if path.is_file()}


def carry(files: Mapping[str, Path], folder: Path) -> None:
    """Copy the files into the folder."""
    with save_errors("copying the tokenizer", folder):
        folder.mkdir(exist_ok=True)
        for name, path in files.items():
            shutil.copyfile(path, folder / name)


def spec_in(folder: Path) -> str:
    """The SPEC of the tokenizer in the folder; empty if we have none for its files."""
    have = files_in(folder)
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
