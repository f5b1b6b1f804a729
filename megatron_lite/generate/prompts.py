"""How prompts become tokens, and which tokens end a text: the conventions of tokenizers and of corpora.

A tokenizer of Hugging Face can start each text with a token such as `<s>`, and a model that was trained so needs it.
The tokenizer's files decide where the weights are from Hugging Face. In a run that started here the corpora decide: a
prompt starts with the token with which their documents start. Prompts match special tokens, as in transformers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from megatron_lite.checkpoint.match import MODEL_TYPE, STARTS_TEXTS, TOKEN_IDS
from megatron_lite.data.tokenizer import (
    BPETokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    files_of,
    library_errors,
    read_object,
)
from megatron_lite.errors import ConfigError
from megatron_lite.tokenizer_files import end_tokens


@dataclass(frozen=True)
class Prompts:
    """A tokenizer for prompts."""

    tokenizer: Tokenizer
    before: tuple[int, ...]  # tokens that start each prompt
    after: tuple[int, ...]  # tokens that end each prompt
    ends: frozenset[int]  # tokens that end a generated text, with that of documents
    special: Mapping[int, str]  # tokens that are not text, and how a prompt spells them

    @property
    def prefix(self) -> int:
        """The token before a text that has no context."""
        return self.tokenizer.eod if self.tokenizer.bos is None else self.tokenizer.bos

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt."""
        return [*self.before, *self.bare(text), *self.after]

    def encode_once(self, text: str) -> list[int]:
        """The same, but a text that spells the first token itself gets no second one, as in lm-evaluation-harness."""
        spelled = self.special.get(self.prefix)
        return self.bare(text) if spelled and text.startswith(spelled) else self.encode(text)

    def bare(self, text: str) -> list[int]:
        """The ids of a text alone."""
        return self.tokenizer.encode_prompt(text)

    def of_run(self, origin: Mapping[str, Any], bos: bool | None = None) -> "Prompts":
        """The prompts of a model, from the origin that its checkpoints record; `bos` decides without it.

        Raises ConfigError if `bos` asks for a token that the tokenizer does not have.
        """
        start = self.before[0] if self.before else self.tokenizer.bos
        ends = self.ends.union(end_tokens(origin.get(TOKEN_IDS, {}), "the checkpoint"))
        if bos is None and MODEL_TYPE in origin:
            return replace(self, ends=ends)
        if not (STARTS_TEXTS in origin and start is not None if bos is None else bos):
            return replace(self, before=(), after=(), ends=ends)
        if start is None:
            spec = self.tokenizer.spec
            raise ConfigError(f"--bos: the tokenizer {spec} has no token that starts texts; leave --bos out")
        return replace(self, before=self.before or (start,), ends=ends)


def prompts_of(tokenizer: Tokenizer | Prompts) -> Prompts:
    """The conventions of a tokenizer's files."""
    if isinstance(tokenizer, Prompts):
        return tokenizer
    if tokenizer.spec.startswith("hf:") and isinstance(tokenizer, BPETokenizer):
        before, after = _around(tokenizer)
    else:
        before, after = _around_by_config(tokenizer)
    file = "generation_config.json"
    ends = (tokenizer.eod, *end_tokens(_beside(tokenizer.spec, file), f"{file} beside {tokenizer.spec}"))
    return Prompts(tokenizer, before, after, frozenset(ends), _special(tokenizer))


def _special(tokenizer: Tokenizer) -> Mapping[int, str]:
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.special
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {tokenizer.model.unk_id(): ""} | {token: text for text, token in tokenizer.control.items()}
    return {tokenizer.eod: ""}


def _around(tokenizer: BPETokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the post-processor of a tokenizer.json adds before and after a text."""
    with library_errors(f"{tokenizer.spec}: cannot encode a prompt"):
        found = tokenizer.model.encode("a b", add_special_tokens=True)
    added = list(zip(found.ids, found.special_tokens_mask, strict=True))

    def leading(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(token for token, _ in takewhile(lambda pair: pair[1], pairs))

    return leading(added), leading(reversed(added))[::-1]


def _around_by_config(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and after a text that the tokenizer_config.json beside another kind of file asks for."""
    config = _beside(tokenizer.spec, "tokenizer_config.json")
    start = tokenizer.eod if tokenizer.bos is None and isinstance(tokenizer, BPETokenizer) else tokenizer.bos
    before = (start,) if config.get("add_bos_token") is True and start is not None else ()
    return before, (tokenizer.eod,) if config.get("add_eos_token") is True else ()


def _beside(spec: str, name: str) -> dict[str, Any]:
    """The content of a JSON file beside a tokenizer's files; empty if there is none."""
    places = [file.with_name(name) for file in files_of(spec)[:1]]
    return next((read_object(place) for place in places if place.is_file()), {})
