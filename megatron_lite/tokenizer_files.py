"""The files of a tokenizer and the settings beside them: which they are, their copies in a run, and whose they may be.

A checkpoint may come from somebody else, and its config may name any file of this machine. So a save copies the
tokenizer into the run's folder and names the copy, and a path in a checkpoint counts only inside of that folder.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.errors import CheckpointError, DataError, MegatronLiteError
from megatron_lite.files import atomic_write, disk_errors, is_inside, read_file
from megatron_lite.text import listed

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
FOLDER = "tokenizer"  # of a run that was converted; that of a save has a checksum of its content after a hyphen
NAMES = {"gpt2": ("vocab.json", "merges.txt"), "sentencepiece": ("tokenizer.model",), "hf": ("tokenizer.json",)}


def files_in(folder: Path) -> dict[str, Path]:
    """The tokenizer's files in a folder of Hugging Face's layout, and the file of end tokens."""
    names = (*VOCABULARIES, *SETTINGS, GENERATION_FILE)
    found = (path for name in names for path in sorted(folder.glob(name)) if path.is_file())
    return {str(path.relative_to(folder)): path for path in found}


def files_of(spec: str) -> dict[str, Path]:
    """The files of a SPEC that exist, by name, and the settings beside those with the usual names."""
    kind, _, place = spec.partition(":")
    if not place:
        return {}
    paths = [Path(part) for part in (place.split(",", 1) if kind == "gpt2" else [place])]
    if paths[0].is_dir():
        return files_in(paths[0])
    named = dict(zip(NAMES.get(kind, ()), paths, strict=False))
    found = files_in(paths[0].parent) if kind == "hf" or all(path.name == name for name, path in named.items()) else {}
    others = () if kind == "hf" else VOCABULARIES
    found = {name: path for name, path in found.items() if name not in others} | named
    return {name: path for name, path in found.items() if path.is_file()}


def own_spec(spec: str, folder: Path) -> str:
    """The SPEC with absolute paths; empty unless its files and the settings beside them lie in the folder.

    Its paths are relative to the folder, or to the working directory.
    """
    kind, _, place = spec.partition(":")
    if not place:
        return spec
    for base in (folder, Path()):
        found = f"{kind}:{','.join(os.path.abspath(base / part) for part in place.split(',', kind == 'gpt2'))}"
        if (files := files_of(found)) and all(is_inside(path, folder) for path in files.values()):
            return found
    return ""


def spec_of_copies(spec: str, folder: str) -> str:
    """The SPEC of the files that `files_of(spec)` finds, after they were copied into a folder."""
    kind = spec.partition(":")[0]
    return f"{kind}:{','.join(f'{folder}/{name}' for name in NAMES.get(kind, ())) or folder}"


def keep(spec: str, run_dir: str) -> str:
    """Copy the tokenizer into the run's folder, and return the SPEC of the copies, relative to that folder.

    The name of their folder has a checksum of their content, so another tokenizer never replaces that of a checkpoint.
    DataError: it is a link, or has other content: a file of the user.
    """
    files = files_of(spec)
    if not files:
        return spec
    with disk_errors("copying the tokenizer", Path(run_dir), DataError):
        contents = {name: read_file(path) for name, path in sorted(files.items())}
        checksums = [f"{name} {hashlib.sha256(content).hexdigest()}" for name, content in contents.items()]
        folder = f"{FOLDER}-{hashlib.sha256(' '.join(checksums).encode()).hexdigest()[:12]}"
        for name, content in contents.items():
            path, place = Path(run_dir) / folder / name, Path(run_dir) / folder
            is_link = any(each.is_symlink() for each in (place, path.parent, path))
            if is_link or (path.exists() and read_file(path) != content):
                raise DataError(f"{path}: was not written by megatron-lite, and the run needs this name; rename it")
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, content)
    return spec_of_copies(spec, folder)


def end_tokens(fields: Mapping[str, Any], place: str | Path) -> list[int]:
    """The tokens that end a text, by `eos_token_id` of a config of Hugging Face in `place`."""
    found = fields.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):
        raise DataError(f"{place}: eos_token_id is {found!r}, expected the id of a token or a list of ids")
    return ids


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
    with disk_errors("copying the tokenizer", folder, CheckpointError):
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
