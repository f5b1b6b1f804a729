"""Lines for a person: of at most `width()` columns, above the progress bar, with colours on a terminal that has them.

A longer text continues on indented lines; only a longer word, such as a path, stays whole.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from megatron_lite.config.schema import LogConfig
from megatron_lite.text import visible

WIDTH, LONG = 100, 20
BAR: Any = {"bar_format": "{n_fmt}/{total_fmt} |{bar}| {percentage:.0f}%{postfix}", "leave": False}
COLOURS = {  # by the text that has it
    r"^[A-Z]{3,}\b.*": "1;31",  # bad news
    r"\b(loss|grad norm) (nan|-?inf)|\b\d+ (skipped|not finite)|\bloss scale .*?(?=  )": "1;31",
    r"^(validation|test|task) .*": "32",
    r"^saved .*": "34",
    r"(?<=  )loss \S+": "1",
}


def say(text: str, log: LogConfig) -> None:
    """Print a text on standard output. With `log.megatron_line` its lines stay as they are, for parsers."""
    text = visible(text)
    if not log.megatron_line:
        wrap = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
        text = "\n".join(textwrap.fill(line, width(), **wrap) for line in text.split("\n"))
        # https://no-color.org
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb":
            for words, colour in COLOURS.items():
                text = re.sub(words, f"\x1b[{colour}m\\g<0>\x1b[0m", text, flags=re.DOTALL)
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def width() -> int:
    """The columns of a line: `WIDTH`, or those of a narrower terminal."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns) if sys.stdout.isatty() else WIDTH


def one_line(fields: Mapping[str, int]) -> str:
    """The fields on one line. Where they do not fit, long names are shortened, and `...` stands for the fields that
    still do not fit, after those of smaller numbers and the first ones."""
    columns, line = width(), "  ".join(fields)
    if len(line) <= columns:
        return line
    named = [text.rpartition(" ") for text in fields]
    texts = [f"{name if len(name) <= LONG else name[: LONG - 3] + '...'} {value}" for name, _, value in named]
    shown, line = [""] * len(texts), ""
    for _, place in sorted((number, place) for place, number in enumerate(fields.values())):
        more = "  ".join(filter(None, [*shown[:place], texts[place], *shown[place + 1 :], "..."]))
        if len(more) <= columns or not line:
            shown[place], line = texts[place], more
    return line


def brief(value: float) -> str:
    """Four digits of a value; `nan` or `inf`."""
    return f"{value:#.4g}".rstrip(".")
