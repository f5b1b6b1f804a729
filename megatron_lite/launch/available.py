"""Cores, memory and open files of this process, within the limits of a batch system or a container."""

import os
import resource
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """The number of CPU cores, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max": no limit
    return cores


def available_memory() -> float:
    """Bytes of memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        memory = min(memory, int((CGROUP / "memory.max").read_text()))
    return memory


def allow_open_files() -> int:
    """Raise this process's limit of open files to the largest that it may have; returns it. Processes inherit it.

    Login shells give 1024, and the store of a large run has a connection to each rank.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS calls its limit infinite, and allows less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit = hard
    return limit
