"""The lines that a run prints, as its messages were before the console wrapped them."""

import re


def unwrapped(text: str) -> str:
    """The text with each message on one line; a continuation starts with at least four blanks."""
    return re.sub(r"\n {4,}", " ", text)
