"""The files of a model's tokenizer, by Hugging Face's names and as one of our SPECs; converters copy them."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_lite.checkpoint.tensor_file import save_errors
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.errors import MegatronLiteError

# All names of Hugging Face; weights, configs and programs are not copied.
VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "vocab.bpe", "encoder.json", "dict.txt", "bpe.codes"),
    *("tokenizer.model", "tokenizer.model.v3", "spiece.model", "spm.model", "sentencepiece.bpe.model", "bpe.model"),
    *("tekken.json", "tiktoken.model", "qwen.tiktoken"),
)
SETTINGS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
# Not a file of a tokenizer, but with its end tokens.
GENERATION_FILE = "generation_config.json"
FOLDER = "tokenizer"  # of a run that was converted


def files_in(folder: Path) -> dict[str, Path]:
    """The tokenizer's files in a folder of Hugging Face's layout, and the file of end tokens."""
    names = (*VOCABULARIES, *SETTINGS, GENERATION_FILE)
    found = (path for name in names for path in sorted(folder.glob(name)) if path.is_file())
    return {str(path.relative_to(folder)): path for path in found}


def has_tokenizer(files: Mapping[str, Path]) -> bool:
    """Whether the files are more than the end tokens."""
    return bool(files.keys() - {GENERATION_FILE})


def files_of(spec: str) -> dict[str, Path]:
    """The files of one of our SPECs that exist, by name, and the settings beside those with the usual names."""
    kind, _, place = spec.partition(":")
    if not place:
        return {}
    paths = [Path(part) for part in (place.split(",", 1) if kind == "gpt2" else [place])]
    if paths[0].is_dir():
        return files_in(paths[0])
    names = {"gpt2": ("vocab.json", "merges.txt"), "sentencepiece": ("tokenizer.model",), "hf": ("tokenizer.json",)}
    named = dict(zip(names.get(kind, ()), paths, strict=False))
    found = files_in(paths[0].parent) if kind == "hf" or all(path.name == name for name, path in named.items()) else {}
    others = () if kind == "hf" else VOCABULARIES
    found = {name: path for name, path in found.items() if name not in others} | named
    return {name: path for name, path in found.items() if path.is_file()}


def files_of_run(folder: Path, spec: str) -> dict[str, Path]:
    """The files of a run's tokenizer; without one, those that its conversion copied although we cannot read them.

    The config of somebody else's checkpoint may name any file of this machine. Only a tokenizer is taken from it.
    """
    copied, named = files_in(folder / FOLDER), files_of(spec)
    if not named or (folder / FOLDER).resolve() in {path.parent.resolve() for path in named.values()}:
        return copied
    return named if readable(spec, sys.maxsize) else {}


def carry(files: Mapping[str, Path], folder: Path) -> None:
    """Copy the files into the folder."""
    with save_errors("copying the tokenizer", folder):
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
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
