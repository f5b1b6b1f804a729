"""The network interfaces of this machine, for the ports that Gloo and NCCL open. Loads no torch."""

import fcntl
import os
import socket
import struct

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # of linux/sockios.h: the IPv4 address of an interface


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; empty where none has, or the system cannot tell."""
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
    """Sets the variables by which Gloo and NCCL listen on the loopback, out of reach of other machines.

    Without them Gloo takes the interface of the host's name, and NCCL any. Values of the user stay.
    """
    if loopback := interface_of(LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # without = NCCL takes it for a prefix
