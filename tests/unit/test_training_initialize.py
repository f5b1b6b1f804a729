"""What a run sets in its process before it makes a model."""

import subprocess
import sys

import pytest

# Bytes of page faults in 12 steps of 4 blocks of 24 MiB, and the growth of memory by a freed block of 64 MiB.
PROGRAM = """
import os, resource, torch
from pathlib import Path
from megatron_lite.training.initialize import keep_freed_memory
{call}
def write(count, mib):
    [torch.empty(mib * 2**20, dtype=torch.uint8).fill_(1) for _ in range(count)]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
write(4, 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(12):
    write(4, 24)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * os.sysconf("SC_PAGE_SIZE"))
before = resident()
write(1, 64)
print(resident() - before)
"""


def measured(call):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(call=call)], capture_output=True, text=True, check=True)
    return [int(line) / 2**20 for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_blocks_of_less_than_32_mib_are_reused_and_larger_ones_go_back():
    """Without the call, steps map new pages, up to 1,152 MiB here. The system zeroes them, which takes time."""
    faults, _ = measured("")
    assert faults > 100
    faults, growth = measured("keep_freed_memory()")  # a small object between blocks costs a new block at most twice
    assert faults < 80 and growth < 12
