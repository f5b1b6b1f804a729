"""Texts in the making: their tokens, what of them can be printed, and why they end."""

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.text import visible


@dataclass
class Text:
    """A prompt and its continuation.

    A tokenizer may drop a space at the start of what it decodes, and a character may have several tokens. So new tokens
    are decoded together with those before them, once their last character is complete.
    """

    tokenizer: Tokenizer
    prompt: str
    ids: list[int]
    generator: torch.Generator
    max_new_tokens: int
    limit: int  # positions of the model
    stop: Sequence[str] = ()
    place: dict[str, int] = field(default_factory=dict)  # numbers of its prompt and sample
    ends: Collection[int] = ()  # tokens that end it, besides that of documents
    new: str = ""  # decoded so far
    finish: str = ""  # eod, stop, length or context, once it has ended

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self._decoded = len(self.ids)
        self._first = max(0, self._decoded - 8)  # decoding starts here
        self._printed, self.end = 0, list[int]()  # the token that ended it, which is not in `ids`
        self.finish = "" if self.max_new_tokens else "length"

    @property
    def num_new_tokens(self) -> int:
        return len(self.ids) - self.num_prompt_tokens

    def add(self, token: int) -> None:
        """Append the next token; it can end the text."""
        if token == self.tokenizer.eod or token in self.ends:
            self.finish, self.end = "eod", [token]
        else:
            self.ids.append(token)
            if self.num_new_tokens == self.max_new_tokens:
                self.finish = "length"
            elif len(self.ids) > self.limit:  # this token follows `limit` others
                self.finish = "context"
        self._decode()

    def _decode(self) -> None:
        before = self.tokenizer.decode(self.ids[self._first : self._decoded])
        after = self.tokenizer.decode(self.ids[self._first :])
        if after.endswith("\ufffd") and not self.finish:
            return  # the bytes of a character that is not complete
        self.new += after[len(before) :]
        self._first, self._decoded = self._decoded, len(self.ids)
        found = [at for at in (self.new.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.new, self.finish = self.new[: min(found)], "stop"

    def unprinted(self) -> str:
        """The new text since the last call, without an end that a stop text could begin with."""
        end = len(self.new)
        if not self.finish:
            kept = [n for stop in self.stop for n in range(1, len(stop)) if self.new.endswith(stop[:n])]
            end -= max(kept, default=0)
        start, self._printed = self._printed, max(self._printed, end)
        return self.new[start : self._printed]

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            **self.place,
            "text": self.new,
            "tokens": self.num_new_tokens,
            "finish": self.finish,
        }


def write(text: str) -> None:
    """Print to stdout without a new line. Once its reader has gone, as with `| head`, texts go nowhere.

    A terminal shows the control characters of a text as escapes; a file or a pipe gets each character of the model.
    """
    try:
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
