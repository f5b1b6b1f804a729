"""What the tokenizers of GGUF share: the vocabulary in llama.cpp's terms, and the tokens that files add to it."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from megatron_lite.data.tokenizer import read_object as _read_object
from megatron_lite.errors import CheckpointError

# Kinds of tokens. llama.cpp looks in a text for user-defined tokens, and for control tokens where a caller wants them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ELSEWHERE = "use --to huggingface"
Tokens = dict[int, tuple[bytes, float, int]]
"""Id -> text, score and kind of a token."""


@dataclass
class Vocabulary:
    """A tokenizer in llama.cpp's terms."""

    model: str
    pre: str
    tokens: Tokens
    merges: Sequence[str] = ()
    special: dict[str, int] = field(default_factory=dict)  # bos, eos, unk, pad, ... -> id
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool = False
    chat_template: Any = None


def read_object(path: Path) -> dict[str, Any]:
    return _read_object(path) if path.exists() else {}


def _text_of(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def add_named(vocabulary: Vocabulary, settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer | None) -> None:
    """Add the special tokens that tokenizer_config.json names, and those that are added to a text."""
    ids = {text.decode(): number for number, (text, _, _) in vocabulary.tokens.items()}
    for name in ("bos", "eos", "unk", "pad", "sep", "mask"):
        text = _text_of(settings.get(f"{name}_token"))
        if text in ids:
            vocabulary.special[name] = ids[text]
        elif text and name == "eos":
            raise CheckpointError(
                f"tokenizer_config.json has the eos_token {text!r}, which is not in the vocabulary; correct it"
            )
    if tokenizer is not None:  # transformers does not read the flags then
        _add_frame(vocabulary, tokenizer)
        return
    vocabulary.adds_bos = settings.get("add_bos_token") is True and "bos" in vocabulary.special
    vocabulary.adds_eos = settings.get("add_eos_token") is True and "eos" in vocabulary.special


def added_tokens(settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer | None) -> Tokens:
    """The tokens that are added to a vocabulary; raises CheckpointError where llama.cpp reads them in another way."""
    found = {int(number): dict(token) for number, token in (settings.get("added_tokens_decoder") or {}).items()}
    if tokenizer is not None:
        names = ("content", "special", "lstrip", "rstrip", "single_word")
        for number, token in tokenizer.get_added_tokens_decoder().items():
            found[number] = {name: getattr(token, name) for name in names}
    for token in found.values():
        if flags := [name for name in ("lstrip", "rstrip", "single_word") if token.get(name)]:
            raise CheckpointError(
                f"the token {token['content']!r} has {flags[0]}, which llama.cpp does not do; {ELSEWHERE}"
            )
    texts = [token["content"] for token in found.values() if len(set(token["content"])) > 1]  # not runs of spaces
    heads = {text[:end]: text for text in texts for end in range(1, len(text))}
    pairs = [(text, heads[text[at:]]) for text in texts for at in range(1, len(text)) if text[at:] in heads]
    if pairs:
        warnings.warn(
            f"gguf: where the tokens {' and '.join(map(repr, pairs[0]))} overlap, llama.cpp takes the longer one first",
            stacklevel=2,
        )
    return {
        number: (token["content"].encode(), -1000.0, CONTROL if token.get("special") else USER_DEFINED)
        for number, token in found.items()
    }


def _add_frame(vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer) -> None:
    """Set the special tokens that a tokenizer.json adds to a text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bare, framed = (tokenizer.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            break
    else:
        raise CheckpointError(f"tokenizer.json changes a text with special tokens, not only its ends; {ELSEWHERE}")
    before, after = framed[:start], framed[start + len(bare) :]
    eos = vocabulary.special.get("eos", (after or [-1])[0])
    if len(before) > 1 or after not in ([], [eos]):
        raise CheckpointError(
            f"tokenizer.json adds the tokens {before} and {after} to a text; llama.cpp adds BOS and EOS; {ELSEWHERE}"
        )
    if before:
        vocabulary.special["bos"], vocabulary.adds_bos = before[0], True
    if after:
        vocabulary.special["eos"], vocabulary.adds_eos = eos, True
