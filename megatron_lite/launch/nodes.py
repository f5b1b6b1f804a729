"""Which machines run a job, how many ranks each starts, and where they meet."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.errors import ConfigError
from megatron_lite.parallel.interfaces import interface_of, use_loopback

DEFAULT_PORT = 29500
ELSEWHERE = "192.0.2.1"  # of no machine, RFC 5737


@dataclass(frozen=True)
class Nodes:
    """This machine's part of a launch.

    A fixed number of nodes meets once, at the first one (static). An elastic one may run with any number from
    `min_nodes` to `max_nodes`, and meets again whenever one comes or goes (c10d).
    """

    nproc_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    is_elastic: bool = False
    node_rank: int = 0  # 0 is the node at whose address all meet
    master_addr: str = "localhost"
    master_port: int = 0  # 0: any that is free
    join_timeout: float = 900.0  # seconds to wait for the other nodes
    max_restarts: int = 0
    log_dir: Path | None = None  # for the output of all ranks but the first; None: they print it

    @property
    def words(self) -> str:
        """The options that made it, to show in a message."""
        count = f"{self.min_nodes}:{self.max_nodes}" if self.is_elastic else f"{self.max_nodes}"
        nodes = f"--nnodes {count} " if self.several else ""
        return f"{nodes}--nproc-per-node {self.nproc_per_node}"

    @property
    def world_sizes(self) -> list[int]:
        """Every number of ranks that the run may have, the largest first."""
        return [nodes * self.nproc_per_node for nodes in range(self.max_nodes, self.min_nodes - 1, -1)]

    @property
    def where(self) -> str:
        return f"{self.master_addr}:{self.master_port}"

    @property
    def several(self) -> bool:
        return self.max_nodes > 1


def nodes_from(
    nproc_per_node: int | None,
    nnodes: str | None = None,
    *,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    join_timeout: float = 900.0,
    max_restarts: int = 0,
    log_dir: Path | None = None,
) -> Nodes | None:
    """What the options of the command line ask for; None without any. Raises ConfigError for what cannot be."""
    if nnodes is None:
        given = {"--node-rank": node_rank, "--master-addr": master_addr, "--master-port": master_port}
        if extra := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(extra)} is for several machines; give --nnodes too")
        if nproc_per_node is None and not max_restarts:
            return None
        return Nodes(nproc_per_node or 1, max_restarts=max_restarts, log_dir=log_dir)
    low, colon, high = nnodes.partition(":")
    if not (low.isdecimal() and int(low) > 0 and (not colon or (high.isdecimal() and int(high) >= int(low)))):
        raise ConfigError(f"--nnodes is {nnodes}; it wants a number of machines, such as 2, or a range, such as 1:4")
    smallest, largest = int(low), int(high or low)
    if largest > 1 and not master_addr:
        raise ConfigError("--nnodes needs --master-addr: the first machine's address, by which the others reach it")
    if not colon and largest > 1 and node_rank is None:
        raise ConfigError(f"--nnodes {nnodes} needs --node-rank: 0 on the machine of --master-addr, then 1 and so on")
    if not colon and node_rank is not None and node_rank >= largest:
        raise ConfigError(f"--node-rank is {node_rank}; with --nnodes {nnodes} it is one of 0 to {largest - 1}")
    if not colon and largest > 1 and max_restarts:
        raise ConfigError(
            f"--max-restarts needs machines that can meet again; use --nnodes {nnodes}:{nnodes}, or let what starts "
            "this command (a batch system, say) start it again on all of them"
        )
    if largest == 1:
        return Nodes(nproc_per_node or 1, max_restarts=max_restarts, log_dir=log_dir)
    return Nodes(
        nproc_per_node or 1,
        smallest,
        largest,
        is_elastic=bool(colon),
        node_rank=node_rank if node_rank is not None else int(not is_here(master_addr or "localhost")),
        master_addr=master_addr or "localhost",
        master_port=master_port or DEFAULT_PORT,
        join_timeout=join_timeout,
        max_restarts=max_restarts,
        log_dir=log_dir,
    )


def own_address(nodes: Nodes) -> str:
    """The IPv4 address of this machine from which packets to the first node leave; raises ConfigError for a name that
    leads nowhere. Nothing is sent.

    On the first node its own name may lead to the loopback, where the others cannot reach it (Debian gives the name
    127.0.1.1 in /etc/hosts): then it is the address from which packets to anywhere leave, if there is one.
    """
    if nodes.master_addr == "localhost":
        return "localhost"
    try:
        address = _address_towards(socket.gethostbyname(nodes.master_addr))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--master-addr is {nodes.master_addr}, which this machine ({socket.gethostname()}) has no way to: "
            f"{getattr(error, 'strerror', error)}; give the first machine's name or address in the network that joins "
            "them"
        ) from error
    if address.startswith("127.") and not nodes.master_addr.startswith("127."):
        with contextlib.suppress(OSError):
            return _address_towards(ELSEWHERE)
    return address


def _address_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, DEFAULT_PORT))
        return probe.getsockname()[0]


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's own."""
    try:
        target = socket.gethostbyname(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((target, 0))
        return True
    except (OSError, UnicodeError):
        return False


def set_network_variables(nodes: Nodes) -> str:
    """Sets the network interface of Gloo, and on one machine of NCCL; returns our address in that network.

    On several machines Gloo would take the interface of the host's name, which often is the loopback. On one machine
    the loopback is right, because other machines cannot reach it. Values of the user stay.
    """
    address = own_address(nodes)
    if not nodes.several:
        use_loopback()
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        print(f"GLOO_SOCKET_IFNAME={interface}", flush=True)
    return address


def is_reachable(nodes: Nodes, timeout_seconds: float) -> bool:
    """Whether the first node answers at the port where nodes meet."""
    try:
        socket.create_connection((nodes.master_addr, nodes.master_port), timeout=timeout_seconds).close()
        return True
    except OSError:
        return False
