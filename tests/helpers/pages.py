"""Code blocks of a Markdown page, and an environment in which their commands run on given sources."""

import os
import re
import stat
import sys
from pathlib import Path

from tests.helpers.command import environment


def blocks(text: str, language: str) -> list[str]:
    """The content of the fenced blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def commands_from(sources: Path, folder: Path) -> dict[str, str]:
    """An environment in which `python` and `megatron-lite` use the package in `sources`; writes into `folder`."""
    folder.mkdir()
    for name, words in {"python": "", "megatron-lite": "-m megatron_lite"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    return environment() | {"PYTHONPATH": str(sources), "PATH": f"{folder}:{os.environ['PATH']}"}
