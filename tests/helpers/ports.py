"""Addresses on which a process listens, from the kernel's tables.

The listening sockets of /proc/net/tcp and tcp6 are those whose inodes are among the process's descriptors.
"""

import os
import re
from pathlib import Path


def listening(pid: int) -> set[str]:
    """The addresses, in the kernel's hexadecimal notation, on which process `pid` listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(descriptor)))
        except FileNotFoundError:
            continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
