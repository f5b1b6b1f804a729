"""Words and lists for messages, and text of others: JSON that is read, names that are shown."""

import json
import re
from collections.abc import Sequence
from typing import Any

MOST_NAMES, MOST_RANKS = 4, 8  # that a message lists
# Control characters, line separators, directions of writing, and halves of surrogate pairs.
_HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object) -> str:
    """The text with escapes such as `\\x1b` for characters that rewrite a terminal. Its lines and tabs stay."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], str(text))


def one_line(name: object) -> str:
    """`visible` for a name within a message or a table, which must not look like a line of its own."""
    return visible(name).replace("\n", "\\n").replace("\t", "\\t")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text of others. Every text that has none raises ValueError."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def parse_strictly(content: bytes, **options: Any) -> Any:
    """`parse_json` for a file in UTF-8 with finite numbers and full characters."""
    value = parse_json(content.decode("utf-8-sig"), **{"parse_constant": int, **options})  # int("NaN") raises
    if rb"\ud" in content.lower():
        json.dumps(value, ensure_ascii=False).encode()  # raises it for half a surrogate pair
    return value


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 document`, `2,000 documents`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def listed(words: Sequence[str], most: int = MOST_NAMES) -> str:
    """`a, b and c`; of more than `most` words `a, b, c and 3 more`."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    words = [one_line(word) for word in words] or ["none"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2` or `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {listed([str(rank) for rank in ranks], MOST_RANKS)}"
