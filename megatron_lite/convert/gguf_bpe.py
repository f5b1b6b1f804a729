"""Byte-level BPE in GGUF. llama.cpp knows the rules that split a text into words by name."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from megatron_lite.convert.gguf_vocabulary import CONTROL, ELSEWHERE, NORMAL, Vocabulary, add_named, added_tokens
from megatron_lite.data.tokenizer import END_OF_TEXT, END_TOKENS
from megatron_lite.errors import CheckpointError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _split_by(pattern: str) -> dict[str, Any]:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [rule, _byte_level(use_regex=False)]}


_DIGITS = {"type": "Digits", "individual_digits": True}
# llama.cpp's name -> the rule by which tokenizer.json splits a text into words, and its ignore_merges.
SPLITTING: dict[str, tuple[dict[str, Any], bool]] = {
    "gpt-2": (_byte_level(use_regex=True), False),
    "starcoder": ({"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(use_regex=True)]}, False),
    "llama-bpe": (_split_by(LLAMA3), True),
    "dbrx": (_split_by(LLAMA3), False),
    "qwen2": (_split_by(QWEN2), False),
}


def byte_level_bpe(folder: Path, settings: Mapping[str, Any]) -> Vocabulary:
    """Byte-level BPE of tokenizer.json, or of vocab.json and merges.txt."""
    if (folder / "tokenizer.json").exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif (folder / "added_tokens.json").exists():
        raise CheckpointError(
            "the tokenizer has added_tokens.json, but no tokenizer.json, which says how they are found in a text; save "
            f"it with transformers, or {ELSEWHERE}"
        )
    else:
        model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    content = json.loads(tokenizer.to_str())
    pre = _splitting(content, settings)
    tokens = {number: (text.encode(), 0.0, NORMAL) for text, number in tokenizer.get_vocab().items()}
    vocabulary = Vocabulary("gpt2", pre, tokens | added_tokens(settings, tokenizer))
    vocabulary.merges = [" ".join(merge) for merge in content["model"]["merges"]]
    add_named(vocabulary, settings, tokenizer)
    if ends := [number for number in map(tokenizer.token_to_id, END_TOKENS) if number is not None]:
        vocabulary.special.setdefault("eos", ends[0])
    return vocabulary


def _splitting(content: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rule by which a tokenizer.json splits a text. Another rule would give other tokens."""
    model, normalizer = content["model"], content.get("normalizer")
    if model["type"] != "BPE":
        raise CheckpointError(f"tokenizer.json has a model of type {model['type']}, not BPE; {ELSEWHERE}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise CheckpointError(
                f"tokenizer.json has {name} {model[name]!r}, which llama.cpp does not do; {ELSEWHERE}"
            )
    if normalizer == {"type": "NFC"}:
        warnings.warn(
            "gguf: tokenizer.json normalizes texts to NFC, and llama.cpp does not; other forms get other tokens",
            stacklevel=2,
        )
    elif normalizer:
        raise CheckpointError(
            f"tokenizer.json has the normalizer {normalizer.get('type')}, which llama.cpp does not apply; {ELSEWHERE}"
        )
    if model.get("unk_token") and (missing := [name for name in _names_of_bytes() if name not in model["vocab"]]):
        raise CheckpointError(
            f"tokenizer.json has no tokens for {len(missing)} of 256 bytes, and unk_token {model['unk_token']!r}, "
            f"which llama.cpp leaves out; {ELSEWHERE}"
        )
    rule = _plain(content.get("pre_tokenizer") or {})
    if settings.get("add_prefix_space"):
        rule |= {"add_prefix_space": True}
    for name, found in SPLITTING.items():
        if found == (rule, bool(model.get("ignore_merges"))):
            return name
    raise CheckpointError(
        "llama.cpp's name for the way in which tokenizer.json splits a text is not known here (pre_tokenizer "
        f"{json.dumps(rule)[:200]}, ignore_merges {bool(model.get('ignore_merges'))}); {ELSEWHERE}, then llama.cpp's "
        "convert_hf_to_gguf.py"
    )


def _plain(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A pre_tokenizer without what does not change tokens."""
    plain = {name: value for name, value in rule.items() if name != "trim_offsets"}
    if plain.get("type") == "Sequence":
        rules = [_plain(each) for each in plain["pretokenizers"]]
        return rules[0] if len(rules) == 1 else {**plain, "pretokenizers": rules}
    return plain


def of_bytes() -> Vocabulary:
    """The bytes as a byte-level BPE without merges."""
    names = _names_of_bytes()
    tokens = {byte: (name.encode(), 0.0, NORMAL) for byte, name in enumerate(names)}
    tokens[256] = (END_OF_TEXT.encode(), 0.0, CONTROL)
    return Vocabulary("gpt2", "gpt-2", tokens, special={"eos": 256, "bos": 256})


def _names_of_bytes() -> list[str]:
    """The character of each byte in byte-level BPE: itself if it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
