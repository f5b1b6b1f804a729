"""Limits: of the system, which make real failures, and of a test's patience, which make none."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds until a test gives up on what must come: longer than anything takes on a machine that is busy with other work.
PATIENCE = 900.0


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, writing more than so many bytes into a file fails, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
