"""Lines for a person: of at most `WIDTH` columns, above the progress bar, with colours on a terminal that has them.

A longer text continues on indented lines; only a longer word, such as a path, stays whole.
"""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from megatron_lite.config.schema import LogConfig

WIDTH = 100
BAR: Any = {"bar_format": "{n_fmt}/{total_fmt} |{bar}| {percentage:.0f}%, {remaining} left{postfix}", "leave": False}
COLOURS = {  # by the text that has it
    r"^[A-Z]{3,}\b.*": "1;31",  # bad news
    r"\b(loss|grad norm) (nan|-?inf)|\b\d+ (skipped|not finite)|\bloss scale .*?(?=  )": "1;31",
    r"^(validation|test|task) .*": "32",
    r"^saved .*": "34",
    r"(?<=  )loss \S+": "1",
}


def say(text: str, log: LogConfig) -> None:
    """Print a text on standard output. With `log.megatron_line` it stays as it is, for parsers."""
    if not log.megatron_line:
        wrap = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
        text = "\n".join(textwrap.fill(line, WIDTH, **wrap) for line in text.split("\n"))
        # https://no-color.org
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb":
            for words, colour in COLOURS.items():
                text = re.sub(words, f"\x1b[{colour}m\\g<0>\x1b[0m", text, flags=re.DOTALL)
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def one_line(fields: Sequence[str]) -> str:
    """The fields on one line; `...` stands for the last ones where they do not fit."""
    *shorter, line = accumulate(fields, "{}  {}".format)
    fitting = [f"{text}  ..." for text in shorter if len(text) + 5 <= WIDTH]
    return line if len(line) <= WIDTH or not fitting else fitting[-1]


def brief(value: float) -> str:
    """Four digits of a value; `nan` or `inf`."""
    return f"{value:#.4g}".rstrip(".")
