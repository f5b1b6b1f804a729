"""A tokenizer in GGUF, for llama.cpp's own implementations of two kinds.

    gpt2     byte-level BPE by merges; words are split by a rule that llama.cpp knows by name
    llama    sentencepiece's BPE by scores, with bytes for unknown characters, without a normalizer

Its third kind, sentencepiece's unigram, takes another one of equally likely segmentations, such as f ff for fff.
llama.cpp has a default for each key that is missing, such as token 2 as the end of a text. So all special tokens and
flags are written, and a tokenizer that would give other ids there is an error.
Source: llama.cpp, src/llama-vocab.cpp; sentencepiece, src/sentencepiece_model.proto.
"""

import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from megatron_lite.convert import tokenizer_files
from megatron_lite.convert.recipe import Checkpoint
from megatron_lite.data.tokenizer import END_OF_TEXT, END_TOKENS
from megatron_lite.errors import CheckpointError
from megatron_lite.text import listed

# Kinds of tokens. llama.cpp looks in a text for user-defined tokens, and for control tokens where a caller wants them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
# llama.cpp ends a text at these tokens, if the vocabulary has them, without a key.
ALWAYS_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("<|end_of_text|>", "<eos>"),
}
ELSEWHERE = "use --to huggingface"


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


@dataclass
class Vocabulary:
    """A tokenizer in llama.cpp's terms."""

    model: str
    pre: str
    tokens: dict[int, tuple[bytes, float, int]]  # id -> text, score and kind
    merges: Sequence[str] = ()
    special: dict[str, int] = field(default_factory=dict)  # bos, eos, unk, pad, ... -> id
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool = False
    chat_template: Any = None


def add_tokenizer(gguf: Any, writer: Any, checkpoint: Checkpoint) -> None:
    """Write the tokenizer; without one llama.cpp reads and writes ids only."""
    files = checkpoint.tokenizer or tokenizer_files.files_of(checkpoint.tokenizer_spec)
    if {"tokenizer.model", "tokenizer.json", "vocab.json"} & files.keys():
        vocabulary = _of_files(gguf, files)
    elif checkpoint.tokenizer_spec == "bytes":
        vocabulary = _of_bytes()
    else:
        writer.add_tokenizer_model("no_vocab")
        return
    _write(writer, vocabulary, checkpoint.model.vocab_size)


def _of_files(gguf: Any, files: Mapping[str, Path]) -> Vocabulary:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer_files.carry(files, folder)
        try:
            settings = _object(folder / "special_tokens_map.json") | _object(folder / "tokenizer_config.json")
            read = _sentencepiece if "tokenizer.model" in files else _byte_level_bpe
            vocabulary = read(folder, settings)
            _add_ends(vocabulary, _object(folder / "generation_config.json").get("eos_token_id"))
            vocabulary.chat_template = gguf.SpecialVocab(folder, special_token_types=()).chat_template
        except CheckpointError:
            raise
        except Exception as error:  # the packages raise many classes for a damaged file
            reason = str(error)[:200]
            raise CheckpointError(f"the tokenizer cannot be read ({reason}); fetch {', '.join(files)} again") from error
    return vocabulary


def _write(writer: Any, vocabulary: Vocabulary, size: int) -> None:
    """Write all keys that llama.cpp reads of a tokenizer of this kind."""
    if (largest := max(vocabulary.tokens)) >= size:
        raise CheckpointError(f"the tokenizer has the token {largest}, but model.vocab_size is {size}; {ELSEWHERE}")
    names = {text for text, _, _ in vocabulary.tokens.values()}
    if len(names) < len(vocabulary.tokens):
        raise CheckpointError(f"two tokens have the same text, which llama.cpp cannot read; {ELSEWHERE}")
    for number in range(size):
        if number not in vocabulary.tokens:
            name = f"[PAD{number}]".encode()
            vocabulary.tokens[number] = (name if name not in names else name + b"*", -1e4, UNUSED)
    texts, scores, kinds = zip(*(vocabulary.tokens[number] for number in range(size)), strict=True)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(texts))
    writer.add_token_types(list(kinds))
    if vocabulary.model == "gpt2":
        # The key must be there. This merge never applies, because no word has its parts.
        writer.add_token_merges(list(vocabulary.merges) or ["[PAD] [PAD]"])
    else:
        writer.add_token_scores(list(scores))
    for name, number in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _of_bytes() -> Vocabulary:
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


def _object(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _text_of(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _add_ends(vocabulary: Vocabulary, given: Any) -> None:
    """Add the other tokens that end a text, of generation_config.json."""
    ids = given if isinstance(given, list) else [given] if isinstance(given, int) else []
    vocabulary.special.setdefault("eos", ids[0] if ids else -1)
    if vocabulary.special["eos"] < 0:
        raise CheckpointError(f"the tokenizer has none of {', '.join(END_TOKENS)} to end a text with; {ELSEWHERE}")
    known = {vocabulary.special["eos"]}
    known |= {number for number, (text, _, _) in vocabulary.tokens.items() if text.decode() in ALWAYS_ENDS}
    others = [number for number in ids if number not in known]
    if len(others) > 2:
        raise CheckpointError(
            f"generation_config.json has the further end tokens {listed(list(map(str, others)))}; llama.cpp has keys "
            f"for two, and knows others by their names only; {ELSEWHERE}"
        )
    vocabulary.special |= dict(zip(("eot", "eom"), others, strict=False))
    # Without a BOS token, llama.cpp would take token 1 or 11 for it.
    vocabulary.special.setdefault("bos", vocabulary.special["eos"])
    for number in vocabulary.special.values():
        text, score, kind = vocabulary.tokens[number]
        vocabulary.tokens[number] = (text, score, CONTROL if kind in (NORMAL, USER_DEFINED) else kind)


def _add_named(vocabulary: Vocabulary, settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer | None) -> None:
    """Add the special tokens that tokenizer_config.json names, and those that are added to a text."""
    ids = {text.decode(): number for number, (text, _, _) in vocabulary.tokens.items()}
    for name in ("bos", "eos", "unk", "pad", "sep", "mask"):
        if (number := ids.get(_text_of(settings.get(f"{name}_token")))) is not None:
            vocabulary.special[name] = number
    if tokenizer is not None:  # transformers does not read the flags then
        _add_frame(vocabulary, tokenizer)
        return
    vocabulary.adds_bos = settings.get("add_bos_token") is True and "bos" in vocabulary.special
    vocabulary.adds_eos = settings.get("add_eos_token") is True and "eos" in vocabulary.special


def _added(settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer | None) -> dict[int, tuple[bytes, float, int]]:
    """The tokens that are added to a vocabulary; raises CheckpointError where llama.cpp finds others in a text."""
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
    texts = [token["content"] for token in found.values()]
    heads = {text[:end]: text for text in texts for end in range(1, len(text)) if len(set(text)) > 1}
    for text in texts:
        for start in range(1, len(text)):
            other = heads.get(text[start:])
            if other is not None and len(set(text)) > 1:
                raise CheckpointError(
                    f"the added tokens {text!r} and {other!r} can overlap in a text: llama.cpp takes the longer one, "
                    f"not the first; {ELSEWHERE}"
                )
    return {
        number: (token["content"].encode(), -1000.0, CONTROL if token.get("special") else USER_DEFINED)
        for number, token in found.items()
    }


def _byte_level_bpe(folder: Path, settings: Mapping[str, Any]) -> Vocabulary:
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
    vocabulary = Vocabulary("gpt2", pre, tokens | _added(settings, tokenizer))
    vocabulary.merges = [" ".join(merge) for merge in content["model"]["merges"]]
    _add_named(vocabulary, settings, tokenizer)
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


def _sentencepiece(folder: Path, settings: Mapping[str, Any]) -> Vocabulary:
    """A sentencepiece model, with the tokens that other files add to it."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    content = _message(model.serialized_model_proto())
    tokens: dict[int, tuple[bytes, float, int]] = {}
    for number, data in enumerate(content[1]):
        piece = _message(data)
        tokens[number] = (piece[1][0], model.get_score(number), piece.get(3, [NORMAL])[0])
    trainer, normalizer = (_message(content.get(number, [b""])[0]) for number in (2, 3))
    vocabulary = Vocabulary("llama", "default", tokens, adds_space=bool(normalizer.get(3, [1])[0]))
    _check_pieces(vocabulary, trainer, normalizer)
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(model, f"{name}_id")()) >= 0:
            vocabulary.special[name] = number
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file)) if file.exists() else None
    outside = {
        number: (text.encode(), -1000.0, USER_DEFINED) for text, number in _object(folder / "added_tokens.json").items()
    }
    vocabulary.tokens = tokens | outside | _added(settings, tokenizer)
    _add_named(vocabulary, settings, tokenizer)
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
