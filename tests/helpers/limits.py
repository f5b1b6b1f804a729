"""A limit on file sizes, which makes writes fail, and the time limit of waits in tests."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds that a test waits for an event before it fails: longer than any step takes on a busy machine.
PATIENCE = 900.0


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, writing more than `size` bytes into a file fails, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
