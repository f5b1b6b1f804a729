"""The machines of a launch: their number, the ranks of each, and the endpoint of their rendezvous."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.engines.interfaces import interface_of, use_loopback
from megatron_lite.errors import ConfigError
from megatron_lite.text import visible

DEFAULT_PORT = 29500
MOST_NODES = 100_000  # their numbers of ranks are listed
REMOTE = "192.0.2.1"  # reserved by RFC 5737: no machine has it


@dataclass(frozen=True)
class Nodes:
    """This machine's part of a launch.

    A fixed number of nodes has one rendezvous, at the first node. An elastic run has any number of nodes from
    `min_nodes` to `max_nodes`, and a new rendezvous whenever a node joins or leaves.
    """

    nproc_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    is_elastic: bool = False
    node_rank: int = 0  # 0 is the node of the rendezvous
    master_addr: str = "localhost"
    master_port: int = 0  # 0: any free port
    join_timeout: float = 900.0  # seconds to wait for the other nodes
    max_restarts: int = 0
    log_dir: Path | None = None  # for the output of all ranks but the first; None: the terminal

    @property
    def options(self) -> str:
        """The options of the command line, for messages."""
        count = f"{self.min_nodes}:{self.max_nodes}" if self.is_elastic else f"{self.max_nodes}"
        nodes = f"--nnodes {count} " if self.several else ""
        return f"{nodes}--nproc-per-node {self.nproc_per_node}"

    @property
    def world_sizes(self) -> list[int]:
        """All possible numbers of ranks, the largest first."""
        return [nodes * self.nproc_per_node for nodes in range(self.max_nodes, self.min_nodes - 1, -1)]

    @property
    def endpoint(self) -> str:
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
    """The nodes that the options of the command line describe; None without options. Raises ConfigError."""
    if nnodes is None:
        given = {"--node-rank": node_rank, "--master-addr": master_addr, "--master-port": master_port}
        extra = [option for option, value in given.items() if value is not None]
        if extra:
            raise ConfigError(f"{', '.join(extra)} needs --nnodes, the number of machines")
        if nproc_per_node is None and not max_restarts:
            return None
        return Nodes(nproc_per_node or 1, max_restarts=max_restarts, log_dir=log_dir)
    low, colon, high = nnodes.partition(":")
    if len(nnodes) > 20 or not (
        low.isdecimal() and int(low) > 0 and (not colon or (high.isdecimal() and int(high) >= int(low)))
    ):
        raise ConfigError(f"--nnodes is {nnodes}; give a number of machines, such as 2, or a range, such as 1:4")
    smallest, largest = int(low), int(high or low)
    if largest > MOST_NODES:
        raise ConfigError(f"--nnodes is {nnodes}; use at most {MOST_NODES:,} machines")
    if largest > 1 and not master_addr:
        raise ConfigError("--nnodes needs --master-addr, the address of the first machine")
    if not colon and largest > 1 and node_rank is None:
        raise ConfigError(f"--nnodes {nnodes} needs --node-rank: 0 on the machine of --master-addr, then 1, 2, ...")
    if not colon and node_rank is not None and node_rank >= largest:
        raise ConfigError(f"--node-rank is {node_rank}; with --nnodes {nnodes} use one of 0 to {largest - 1}")
    if not colon and largest > 1 and max_restarts:
        raise ConfigError(
            f"--max-restarts needs an elastic launch: use --nnodes {nnodes}:{nnodes}, or have your batch system "
            "restart this command on every machine"
        )
    if largest == 1:
        return Nodes(nproc_per_node or 1, max_restarts=max_restarts, log_dir=log_dir)
    return Nodes(
        nproc_per_node or 1,
        smallest,
        largest,
        is_elastic=bool(colon),
        node_rank=node_rank if node_rank is not None else int(not is_local(master_addr or "localhost")),
        master_addr=master_addr or "localhost",
        master_port=master_port or DEFAULT_PORT,
        join_timeout=join_timeout,
        max_restarts=max_restarts,
        log_dir=log_dir,
    )


def local_address(nodes: Nodes) -> str:
    """This machine's IPv4 address in the network of the first node. Raises ConfigError if there is no route.

    The first node's name may resolve to its loopback (Debian gives it 127.0.1.1 in /etc/hosts), which other machines
    cannot reach. Then this is the address of the default route, if there is one. No packet is sent.
    """
    if nodes.master_addr == "localhost":
        return "localhost"
    try:
        address = _source_address(socket.gethostbyname(nodes.master_addr))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--master-addr is {nodes.master_addr}, which this machine ({socket.gethostname()}) cannot reach: "
            f"{getattr(error, 'strerror', error)}; give the first machine's name or address in your network"
        ) from error
    if address.startswith("127.") and not nodes.master_addr.startswith("127."):
        with contextlib.suppress(OSError):
            return _source_address(REMOTE)
    return address


def _source_address(target: str) -> str:
    """The address from which this machine sends packets to `target`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, DEFAULT_PORT))
        return probe.getsockname()[0]


def is_local(address: str) -> bool:
    """True if the address belongs to this machine."""
    try:
        target = socket.gethostbyname(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((target, 0))
        return True
    except (OSError, UnicodeError):
        return False


def set_network_variables(nodes: Nodes) -> str:
    """Set the network interface of Gloo, and on one machine of NCCL; return this machine's address in that network.

    On several machines Gloo would take the interface of the host's name, often the loopback. On one machine the
    loopback is right, because other machines cannot reach it. Variables that are already set stay.
    """
    address = local_address(nodes)
    if not nodes.several:
        use_loopback()
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        print(visible(f"GLOO_SOCKET_IFNAME={interface}"), flush=True)
    return address


def is_reachable(nodes: Nodes, timeout_seconds: float) -> bool:
    """True if the first node accepts a connection at the rendezvous port."""
    try:
        socket.create_connection((nodes.master_addr, nodes.master_port), timeout=timeout_seconds).close()
        return True
    except OSError:
        return False
