"""The network interfaces of this machine, for the ports of Gloo and NCCL. Does not import torch."""

import fcntl
import os
import socket
import struct

LOOPBACK = "127.0.0.1"
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
