"""Conversion between text and token ids, by the tokenizer of a one-line SPEC.

    bytes                     256 byte values and an end-of-document id
    sentencepiece:FILE        a sentencepiece model, such as `train_sentencepiece` writes
    gpt2:VOCAB,MERGES         GPT-2's byte-level BPE from its vocab.json and merges.txt
    hf:FILE                   a tokenizer.json of Hugging Face, or its folder
    codegeex:FOLDER           GPT-2's BPE, with runs of spaces as single tokens

Document text is only text: characters that spell a special token are encoded as characters, and nothing is added to
them or cut off, whatever a tokenizer.json asks for. In a prompt they are the token (`generate/prompts.py`).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.files import MOST_BYTES, read_file
from megatron_lite.text import parse_strictly

END_OF_TEXT = "<|endoftext|>"
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")  # in the order they are tried
LARGEST_VOCABULARY = 1 << 24  # a model has a row for each id; the largest of published models have 2**18
NAMED_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class Tokenizer(Protocol):
    """`vocab_size` is one more than the largest id; `eod` ends a document and appears in no text."""

    spec: str
    vocab_size: int
    eod: int
    bos: int | None  # starts texts; not every tokenizer has one, and not every model wants it

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]: ...  # with a special token where the text spells one

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None:
        """The id of a special token; None if there is none of this name."""
        ...


def build_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of `spec`."""
    kind, _, place = spec.partition(":")
    builders: dict[str, Callable[[str, str], Tokenizer]] = {
        "sentencepiece": SentencePieceTokenizer,
        "gpt2": _gpt2,
        "hf": _huggingface,
        "codegeex": _codegeex,
    }
    if spec == "bytes":
        return BytesTokenizer()
    if kind not in builders or not place:
        raise ConfigError(
            f"unknown tokenizer {spec!r}; use bytes, sentencepiece:FILE, gpt2:VOCAB,MERGES, hf:FILE or codegeex:FOLDER"
        )
    return builders[kind](spec, place)


def tokenizer_hash(spec: str) -> str:
    """SHA-256 of the tokenizer's kind, the content of its files and its end token; independent of their paths."""
    kind, _, place = spec.partition(":")
    digest = hashlib.sha256(kind.encode())
    for file in files_of(spec):
        _require_file(file)
        content = read_file(file)
        if file.suffix == ".json":  # independent of white space
            content = json.dumps(read_object(file), sort_keys=True).encode()
        digest.update(hashlib.sha256(content).digest())
    if kind == "hf":
        digest.update(_named_tokens(_hf_file(place)).get("eos_token", "").encode())
    return digest.hexdigest()


def files_of(spec: str) -> list[Path]:
    """The files that a tokenizer is read from."""
    kind, _, place = spec.partition(":")
    if kind == "bytes":
        return []
    if kind == "hf":
        return [_hf_file(place)]
    if kind == "codegeex":
        added = Path(place) / "added_tokens.json"
        return [Path(place) / "vocab.json", Path(place) / "merges.txt", *([added] if added.is_file() else [])]
    return [Path(part) for part in (place.split(",", 1) if kind == "gpt2" else [place])]


class BytesTokenizer:
    """UTF-8 bytes as ids 0..255, end of document 256."""

    spec = "bytes"
    vocab_size = 257
    eod = 256
    bos: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_prompt = encode

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return None


class SentencePieceTokenizer:
    """A sentencepiece model; its end-of-document id is the model's `</s>`.

    sentencepiece represents a space as U+2581. A true U+2581 in the text would decode to a space, so models that keep
    all other text exactly get it as three bytes.
    """

    MARK = "\u2581"

    def __init__(self, spec: str, file: str) -> None:
        import sentencepiece

        _require_file(file)
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=file)
        except (RuntimeError, OSError, UnicodeError) as error:
            raise DataError(f"{file}: not a sentencepiece model ({error})") from error
        self.spec = spec
        self.vocab_size: int = self.model.vocab_size()
        self.eod: int = self.model.eos_id()
        self.bos: int | None = self.model.bos_id() if self.model.bos_id() >= 0 else None
        if self.eod < 0:
            raise DataError(f"{file}: the model has no </s> to end documents with; train it with an eos_id")
        self.control = {self.model.id_to_piece(n): n for n in range(self.vocab_size) if self.model.is_control(n)}
        mark_bytes = [self.model.piece_to_id(f"<0x{byte:02X}>") for byte in self.MARK.encode()]
        adds_a_space = self.model.encode_as_pieces("a")[0] != "a"
        escapes_mark = all(map(self.model.is_byte, mark_bytes)) and not adds_a_space
        self._mark_ids = mark_bytes if escapes_mark else None

    def encode(self, text: str) -> list[int]:
        if self._mark_ids is None or self.MARK not in text:
            return self.model.encode(text)
        first, *others = map(self.model.encode, text.split(self.MARK))
        return sum(([*self._mark_ids, *part] for part in others), first)

    def encode_prompt(self, text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, self.control))})", text)
        return [n for part in parts for n in ([self.control[part]] if part in self.control else self.encode(part))]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids))

    def token_id(self, token: str) -> int | None:
        found = self.model.piece_to_id(token)
        return None if found == self.model.unk_id() else found


class BPETokenizer:
    """A model of the `tokenizers` library with an end-of-document id."""

    def __init__(self, spec: str, model: Any, end: str, named: Mapping[str, str]) -> None:
        """`end` is the end-of-document token; `named` are other special tokens, some of which the model may lack."""
        self.spec, self.model = spec, model
        model.no_truncation()
        model.no_padding()
        present = {name: token for name, token in named.items() if model.token_to_id(token) is not None}
        special = {token.content for token in model.get_added_tokens_decoder().values() if token.special}
        model.add_special_tokens([token for token in (end, *present.values()) if token not in special])
        added = model.get_added_tokens_decoder()
        self.special: dict[int, str] = {n: token.content for n, token in added.items() if token.special}
        self.eod: int = model.token_to_id(end)
        self.bos: int | None = model.token_to_id(present["bos_token"]) if "bos_token" in present else None
        self.vocab_size: int = max(model.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > LARGEST_VOCABULARY:
            raise DataError(f"{spec}: has the id {self.vocab_size - 1:,}; ids are at most {LARGEST_VOCABULARY - 1:,}")

    def encode(self, text: str) -> list[int]:
        self.model.encode_special_tokens = True  # as characters
        with library_errors(f"{self.spec}: cannot encode a text of {len(text):,} characters"):
            found = self.model.encode(text, add_special_tokens=False)
        if self.special.keys().isdisjoint(found.ids):
            return found.ids
        # A model without merges may have the spelling in its vocabulary, but not two halves of it.
        normalized = self.model.normalizer.normalize_str if self.model.normalizer else str  # may be what spells it
        spans = ((self.special.get(token), *span) for token, span in zip(found.ids, found.offsets, strict=True))
        matched = [
            end
            for name, start, end in spans
            if name
            and end - start > 1
            and name in (text[start:end].strip(), normalized(text[start:end]).strip(" \u2581"))
        ]
        parts = [text[start:end] for start, end in pairwise([0, *(end - 1 for end in matched), len(text)])]
        return [token for part in parts for token in self.encode(part)] if matched else found.ids

    def encode_prompt(self, text: str) -> list[int]:
        self.model.encode_special_tokens = False
        with library_errors(f"{self.spec}: cannot encode a prompt of {len(text):,} characters"):
            return self.model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors(f"{self.spec}: cannot decode {len(ids):,} tokens"):
            return self.model.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.model.token_to_id(token)


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raise an error of the tokenizers library, a plain Exception or a panic in Rust, as a DataError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{message} ({error})") from error


def _require_file(file: str | os.PathLike[str]) -> None:
    size = Path(file).stat().st_size if Path(file).is_file() else -1
    if not 0 <= size <= MOST_BYTES:  # of a larger one the libraries end the process
        raise DataError(f"{file}: {'no such tokenizer file' if size < 0 else f'{size:,} bytes are no tokenizer'}")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = parse_strictly(read_file(file))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: contains a {type(content).__name__}, expected a JSON object")
    return content


def _byte_level(where: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    with library_errors(f"{where}: the merges do not match the vocabulary"):
        model = Model(models.BPE(vocab=vocab, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return model


def _read_bpe_files(vocab_file: str, merges_file: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers import models

    _require_file(vocab_file)
    _require_file(merges_file)
    with library_errors(f"{vocab_file}, {merges_file}: not a BPE vocabulary and its merges"):
        vocab, merges = models.BPE.read_file(vocab_file, merges_file)
    if END_OF_TEXT not in vocab:
        raise DataError(f"{vocab_file}: has no {END_OF_TEXT} to end documents with; use the vocab.json of GPT-2")
    return vocab, merges


def _gpt2(spec: str, place: str) -> Tokenizer:
    vocab_file, _, merges_file = place.partition(",")
    if not merges_file:
        raise ConfigError(f"tokenizer {spec!r} names one file; write gpt2:VOCAB,MERGES")
    vocab, merges = _read_bpe_files(vocab_file, merges_file)
    return BPETokenizer(spec, _byte_level(place, vocab, merges), END_OF_TEXT, {})


def _codegeex(spec: str, place: str) -> Tokenizer:
    """GPT-2's BPE plus 143 extra tokens; 10 to 18 are 2 to 10 spaces.

    Spaces are tokenized from the left, the longest token first; a single space stays with the next word. CodeGeeX
    replaces the spaces before it tokenizes. Here the spaces are the added tokens: the ids are the same, and a text that
    contains `<|extratoken_10|>` decodes to itself.
    Source: CodeGeeX, codegeex/tokenizer/tokenizer.py, with the added tokens of GPT-J.
    """
    from tokenizers import AddedToken

    folder = Path(place)
    vocab, merges = _read_bpe_files(str(folder / "vocab.json"), str(folder / "merges.txt"))
    extra = {f"<|extratoken_{k}|>": len(vocab) + k - 1 for k in range(1, 144)}
    added_file = folder / "added_tokens.json"
    if added_file.is_file():
        extra = read_object(added_file)
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in extra.values()):
            raise DataError(f"{added_file}: each added token needs an id from 0 to 2**31 - 1")
    names = {" " * spaces: f"<|extratoken_{8 + spaces}|>" for spaces in range(2, 11)}
    if missing := [name for name in names.values() if name not in extra]:
        raise DataError(f"{added_file}: has no {missing[0]}, a token of spaces; use the file of GPT-J")
    spaces_ids = {spaces: extra.pop(name) for spaces, name in names.items()}
    model = _byte_level(place, {**vocab, **extra, **spaces_ids}, merges)
    model.add_tokens([AddedToken(text, normalized=False) for text in spaces_ids])
    return BPETokenizer(spec, model, END_OF_TEXT, {})


def _huggingface(spec: str, place: str) -> Tokenizer:
    from tokenizers import Tokenizer as Model

    place = str(_hf_file(place))
    _require_file(place)
    with library_errors(f"{place}: not a tokenizer.json"):
        model = Model.from_file(place)
    named = _named_tokens(Path(place))
    candidates = [*filter(None, [named.get("eos_token")]), *END_TOKENS]
    found = [token for token in candidates if model.token_to_id(token) is not None]
    if not found:
        raise DataError(f"{place}: has none of {', '.join(candidates)} to end documents with")
    return BPETokenizer(spec, model, found[0], named)


def _hf_file(place: str) -> Path:
    return Path(place) / "tokenizer.json" if Path(place).is_dir() else Path(place)


def _named_tokens(tokenizer_file: Path) -> dict[str, str]:
    """The tokens that the JSON files beside a file name, by key, such as `eos_token`. The later file counts."""
    found = {}
    for file in (tokenizer_file.with_name(name) for name in ("tokenizer_config.json", "special_tokens_map.json")):
        content = read_object(file) if file.is_file() else {}
        for key, value in ((key, content.get(key)) for key in NAMED_TOKENS):
            token = value.get("content") if isinstance(value, dict) else value
            if not isinstance(token, str | None):
                raise DataError(f"{file}: {key} is {token!r}, expected the text of a token")
            found |= {key: token} if token else {}
    return found
