"""The network interfaces of this machine, for the ports of Gloo and NCCL, and its tasks. Does not import torch."""

import fcntl
import os
import socket
import struct

LOOPBACK = "127.0.0.1"
# The number of tasks that one command has started, by the variable that it sets.
STARTERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
SIOCGIFADDR = 0x8915  # of linux/sockios.h: the IPv4 address of an interface


def interface_of(address: str) -> str:
    """The network interface with this IPv4 address; empty if there is none."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no IPv4 address
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return ""


def use_loopback() -> None:
    """Make Gloo and NCCL listen on the loopback, out of reach of other machines, unless the user chose an interface.

    The default of Gloo is the interface of the host's name, that of NCCL any.
    """
    if loopback := interface_of(LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # without "=" it would be a prefix


def separate_tasks() -> str:
    """A notice where this run has no ranks of the other tasks that one command has started with this one, else empty.

    A batch job without srun has one process, and its variables do not count.
    """
    is_alone = os.environ.get("GROUP_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")) == "1"
    name = next((name for name in STARTERS if is_alone and os.environ.get(name, "1") != "1"), "")
    reason = "" if "RANK" in os.environ else ", because RANK is not set"
    return name and (
        f"Each of the {os.environ[name]} tasks of {STARTERS[name]} ({name}) is a run of its own{reason}. For one run "
        "of all tasks start `python -m megatron_lite.launch` once on each machine (srun --ntasks-per-node=1), or set "
        "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each task"
    )
