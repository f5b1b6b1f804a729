"""`doctor` on two ranks that report different host names; a fault can be injected into either."""

import io
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from megatron_lite.config.load import load_config
from megatron_lite.doctor import network as doctor_network
from megatron_lite.doctor import storage as doctor_storage
from megatron_lite.doctor.checks import examine
from megatron_lite.errors import TrainingError

A, B = "rank 0 on host-a", "rank 1 on host-b"
Fault = Callable[[], AbstractContextManager[None]]


@contextmanager
def patched(*patches: tuple[object, str, object]) -> Iterator[None]:
    """Inside, the given attributes of modules are replaced."""
    with ExitStack() as stack:
        for where, name, new in patches:
            stack.enter_context(mock.patch.object(where, name, new))
        yield


def examine_rank(
    folder_of: Sequence[Path],
    config: Path | None,
    overrides: Sequence[str],
    fault: Fault | None,
    faulty_ranks: Sequence[int],
) -> tuple[list[str], str]:
    """Run `doctor` on this rank in its folder; return the lines that it prints and the message of its error."""
    rank, out, before = dist.get_rank(), io.StringIO(), os.getcwd()
    os.chdir(folder_of[rank])
    with ExitStack() as stack:
        stack.callback(os.chdir, before)
        # DeepSpeed in an earlier test of this process has chosen the loopback.
        chosen = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        variables = {name: value for name, value in os.environ.items() if name not in chosen}
        stack.enter_context(mock.patch.dict(os.environ, variables | {"LOCAL_RANK": "0"}, clear=True))
        stack.enter_context(mock.patch.object(socket, "gethostname", lambda: f"host-{'ab'[rank]}"))
        stack.enter_context(mock.patch.dict(doctor_network.LARGE, {"cpu": 4096}))
        stack.enter_context(mock.patch.object(doctor_storage, "SHOWN_SECONDS", 0.2))
        if fault is not None and rank in faulty_ranks:
            stack.enter_context(fault())
        stack.enter_context(redirect_stdout(out))
        try:
            examine(load_config(config, overrides))
        except TrainingError as error:
            return out.getvalue().splitlines(), str(error)
    return out.getvalue().splitlines(), ""


class Doctor:
    """Runs `doctor` on two ranks of the pool."""

    def __init__(self, ranks, folder: Path, config: Path | None):
        self.ranks, self.folder, self.config = ranks, folder, config

    def __call__(
        self,
        *overrides: str,
        fault: Fault | None = None,
        faulty_ranks: Sequence[int] = (1,),
        folders: Sequence[Path] | None = None,
    ) -> list[str]:
        """The lines that rank 0 prints and its error. Rank 1 must print nothing and raise the same error."""
        folders = folders or (self.folder, self.folder)
        first, second = self.ranks(2, examine_rank, folders, self.config, overrides, fault, faulty_ranks)
        assert second == ([], first[1])
        return [*first[0], *filter(None, [first[1]])]

    def not_ok(self, *overrides: str, **options) -> list[str]:
        """The lines of `__call__` that do not report ok."""
        return [line for line in self(*overrides, **options) if not line.startswith(" ok ")]


def failed(failures: int, checks: int) -> str:
    """The last line of a `doctor` that found failures."""
    return (
        f"{failures} of {checks} checks failed, so training would fail; the FAIL lines in the output of rank 0 name "
        "the causes and the remedies"
    )
