"""A model of sentencepiece in GGUF: BPE by scores."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from megatron_lite.convert.gguf_vocabulary import (
    CONTROL,
    ELSEWHERE,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Tokens,
    Vocabulary,
    add_named,
    added_tokens,
    read_object,
)
from megatron_lite.errors import CheckpointError


def of_sentencepiece(folder: Path, settings: Mapping[str, Any]) -> Vocabulary:
    """A sentencepiece model, with the tokens that other files add to it."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    content = _message(model.serialized_model_proto())
    tokens: Tokens = {}
    for number, data in enumerate(content[1]):
        piece = _message(data)
        tokens[number] = (piece[1][0], model.get_score(number), piece.get(3, [NORMAL])[0])
    trainer, normalizer = (_message(content.get(number, [b""])[0]) for number in (2, 3))
    vocabulary = Vocabulary("llama", "default", tokens, adds_space=bool(normalizer.get(3, [1])[0]))
    _check_pieces(vocabulary, trainer, normalizer)
    _warn_of_control_tokens(vocabulary)
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(model, f"{name}_id")()) >= 0:
            vocabulary.special[name] = number
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file)) if file.exists() else None
    outside = {
        number: (text.encode(), -1000.0, USER_DEFINED)
        for text, number in read_object(folder / "added_tokens.json").items()
    }
    others = outside | added_tokens(settings, tokenizer)
    own = {number for number in others.keys() & tokens.keys() if tokens[number][2] not in (NORMAL, USER_DEFINED)}
    vocabulary.tokens = tokens | {number: token for number, token in others.items() if number not in own}
    add_named(vocabulary, settings, tokenizer)
    if tokenizer is not None:
        _check_equal(vocabulary, model, tokenizer)
    return vocabulary


def _check_pieces(vocabulary: Vocabulary, trainer: "Message", normalizer: "Message") -> None:
    """Raise CheckpointError for a sentencepiece model of which llama.cpp would give other ids."""
    kinds = {kind for _, _, kind in vocabulary.tokens.values()}
    problems = {
        "a model that is not BPE": trainer.get(3, [1])[0] != 2,
        "no byte_fallback, without which llama.cpp fails at an unknown character": not trainer.get(35, [0])[0],
        "a normalizer, which llama.cpp does not apply": bool(normalizer.get(2, [b""])[0]),
        "remove_extra_whitespaces, which llama.cpp does not do": bool(normalizer.get(4, [1])[0]),
        "treat_whitespace_as_suffix, which llama.cpp does not do": bool(trainer.get(24, [0])[0]),
        "escape_whitespaces off, but llama.cpp escapes them": not normalizer.get(5, [1])[0],
        "unused pieces, which llama.cpp would use": UNUSED in kinds,
        "user-defined symbols and add_dummy_prefix, but llama.cpp adds a space after each of them": (
            USER_DEFINED in kinds and vocabulary.adds_space
        ),
    }
    if found := [reason for reason, applies in problems.items() if applies]:
        raise CheckpointError(
            f"llama.cpp would get other tokens: the sentencepiece model has {'; '.join(found)}; train one with "
            f"`megatron-lite train-tokenizer`, or {ELSEWHERE}"
        )


def _warn_of_control_tokens(vocabulary: Vocabulary) -> None:
    """Warn of control tokens that llama.cpp makes from two pieces of a text."""
    texts = {text.decode() for text, _, kind in vocabulary.tokens.values() if kind == NORMAL}
    for text in [text.decode() for text, _, kind in vocabulary.tokens.values() if kind == CONTROL]:
        for pair in [(text[:end], text[end:]) for end in range(1, len(text))]:
            if all(len(half) == 1 or half in texts for half in pair):
                warnings.warn(
                    f"gguf: llama.cpp reads the pieces {pair[0]!r} and {pair[1]!r} in a text as the token {text!r}",
                    stacklevel=2,
                )


def _check_equal(vocabulary: Vocabulary, model: Any, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise CheckpointError unless tokenizer.json gives the ids that llama.cpp gets from tokenizer.model."""
    added = [
        (number, text.decode())
        for number, (text, _, kind) in vocabulary.tokens.items()
        if kind in (CONTROL, USER_DEFINED)
    ]
    probes = [
        ("a", model.encode("a")),
        ("Hello  World 12\n\u00e9\u4e2d", model.encode("Hello  World 12\n\u00e9\u4e2d")),
    ]
    probes += [(f"a{text}b", [*model.encode("a"), number, *model.encode("b")]) for number, text in added]
    for text, want in probes:
        if (found := tokenizer.encode(text, add_special_tokens=False).ids) != want:
            raise CheckpointError(
                f"tokenizer.json reads {text!r} as {found}, llama.cpp as {want}, from tokenizer.model; {ELSEWHERE}"
            )


Message = dict[int, list[Any]]
"""The fields of a message of protobuf by number: integers, or bytes."""


def _message(data: bytes) -> Message:
    found: Message = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            value: Any = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            value = data[position : position + size]
            position += size
        found.setdefault(number, []).append(value)
    return found
