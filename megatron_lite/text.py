"""Words and lists for messages."""

from collections.abc import Sequence

MOST_NAMES, MOST_RANKS = 4, 8  # that a message lists


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 document`, `2,000 documents`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def listed(words: Sequence[str], most: int = MOST_NAMES) -> str:
    """`a, b and c`; of more than `most` words `a, b, c and 3 more`."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2` or `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {listed([str(rank) for rank in ranks], MOST_RANKS)}"
