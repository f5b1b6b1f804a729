"""A task for the worker processes of `map_in_order`, and the list of workers that are alive."""

import multiprocessing
import os
import signal
import time
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess

from megatron_lite.errors import DataError


def workers_alive() -> list[BaseProcess]:
    """The live worker processes of this process. Workers are spawned; the ranks of distributed tests are not."""
    return [child for child in multiprocessing.active_children() if isinstance(child, SpawnProcess)]


class Doubler:
    """Returns twice the item and the process id; even items take longer. Fails or dies at a given item."""

    def __init__(self, fails_at: int | None = None, dies_at: int | None = None):
        self.fails_at, self.dies_at, self.pid = fails_at, dies_at, os.getpid()

    def __call__(self, item: int) -> tuple[int, int]:
        if item == self.fails_at:
            raise DataError(f"item {item} is bad")
        if item == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002 * (item % 2 == 0))
        return 2 * item, self.pid
