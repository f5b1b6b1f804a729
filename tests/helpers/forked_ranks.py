"""Launchers in tests fork their ranks from a server that has already loaded torch; loading takes seconds per rank."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from multiprocessing import get_context
from multiprocessing.popen_forkserver import Popen
from unittest import mock

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

_poll, _lock = Popen.poll, threading.Lock()


def _poll_with_lock(self: Popen, *arguments: int) -> int | None:
    """Poll under a lock: a launcher polls in two threads, and without the lock one may read 255 as the exit code."""
    with _lock:
        return _poll(self, *arguments)


@contextmanager
def forked_ranks(*modules: str) -> Iterator[None]:
    """Make launchers of this process fork their ranks from a server that has imported `modules`."""
    get_context("forkserver").set_forkserver_preload([*modules, "torch._dynamo"])
    quick = partialmethod(LocalElasticAgent.__init__, start_method="forkserver")
    with mock.patch.object(LocalElasticAgent, "__init__", quick), mock.patch.object(Popen, "poll", _poll_with_lock):
        yield
