"""Launchers in tests start their ranks as forks of a server that has loaded torch, which takes each of them seconds."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from multiprocessing import get_context
from multiprocessing.popen_forkserver import Popen
from unittest import mock

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

_poll, _lock = Popen.poll, threading.Lock()


def _poll_alone(self: Popen, *arguments: int) -> int | None:
    """A launcher polls its ranks in two threads; of two that do so at once, one takes 255 for the exit code."""
    with _lock:
        return _poll(self, *arguments)


@contextmanager
def forked_ranks(*modules: str) -> Iterator[None]:
    """For launchers of this process; the server imports these modules."""
    get_context("forkserver").set_forkserver_preload([*modules, "torch._dynamo"])
    quick = partialmethod(LocalElasticAgent.__init__, start_method="forkserver")
    with mock.patch.object(LocalElasticAgent, "__init__", quick), mock.patch.object(Popen, "poll", _poll_alone):
        yield
