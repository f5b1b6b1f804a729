"""`megatron-lite` on ranks of the pool, for tests of what a command does on several ranks and not of their launch."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_lite.cli import main
from tests.helpers.command import environment


def command_on_rank(arguments: tuple[str, ...], folder: str) -> tuple[int, str, str]:
    """The exit code, output and errors of the command on this rank, which torchrun could have started."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    rank = str(dist.get_rank())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(os.environ, environment() | variables, clear=True),
            mock.patch.object(sys, "argv", ["megatron-lite", *arguments]),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            main()
    except SystemExit as end:
        if end.code and dist.is_initialized():
            dist.destroy_process_group()  # wakes ranks that wait for this one
        return int(end.code or 0), out.getvalue(), err.getvalue()
    finally:
        os.chdir(before)
    raise AssertionError("the command raised no SystemExit")


def run_on(
    ranks: Any, size: int, *arguments: str, cwd: Path, command: Callable[..., Any] = command_on_rank
) -> subprocess.CompletedProcess[str]:
    """Run `megatron-lite ARGUMENTS` on `size` ranks of the pool `ranks`: the largest exit code, and what all wrote."""
    codes, outs, errs = zip(*ranks(size, command, arguments, str(cwd)), strict=True)
    return subprocess.CompletedProcess(arguments, max(codes), "".join(outs), "".join(errs))
