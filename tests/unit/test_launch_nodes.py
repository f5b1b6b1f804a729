"""Nodes from launch options, and the address and network interface of this machine."""

import os
import re
import socket
from pathlib import Path

import pytest

from megatron_lite.engines import interfaces as interfaces_module
from megatron_lite.engines.interfaces import interface_of
from megatron_lite.errors import ConfigError
from megatron_lite.launch import nodes as nodes_module
from megatron_lite.launch.nodes import (
    Nodes,
    is_local,
    is_reachable,
    local_address,
    nodes_from,
    set_network_variables,
)

THERE = {"master_addr": "10.0.0.1"}


@pytest.fixture
def interfaces(monkeypatch):
    """The network interfaces of Gloo and NCCL in the environment."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    return lambda: [os.environ.get(name) for name in names]


@pytest.fixture
def listening():
    """A port on which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "nproc, nnodes, more, wanted",
    [
        (None, None, {}, None),
        (1, None, {}, Nodes(1)),
        (4, None, {"log_dir": Path("logs")}, Nodes(4, log_dir=Path("logs"))),
        (None, None, {"max_restarts": 3}, Nodes(1, max_restarts=3)),
        (4, "1", {}, Nodes(4)),
        (4, "1", {"node_rank": 0, "max_restarts": 3, **THERE}, Nodes(4, max_restarts=3)),
        (4, "2", {"node_rank": 1, **THERE}, Nodes(4, 2, 2, node_rank=1, master_addr="10.0.0.1", master_port=29500)),
        (
            None,
            "3",
            {"node_rank": 2, "master_addr": "node0", "master_port": 1234, "join_timeout": 5.0, "log_dir": Path("l")},
            Nodes(
                1,
                3,
                3,
                node_rank=2,
                master_addr="node0",
                master_port=1234,
                join_timeout=5.0,
                log_dir=Path("l"),
            ),
        ),
        (1, "1:1", {"max_restarts": 2}, Nodes(1, max_restarts=2)),
        (
            2,
            "2:4",
            {"node_rank": 7, "max_restarts": 9, **THERE},
            Nodes(2, 2, 4, True, node_rank=7, master_addr="10.0.0.1", master_port=29500, max_restarts=9),
        ),
    ],
)
def test_options_become_nodes(nproc, nnodes, more, wanted):
    assert nodes_from(nproc, nnodes, **more) == wanted


@pytest.mark.parametrize("address, node_rank", [("127.0.0.1", 0), ("localhost", 0), ("203.0.113.7", 1)])
def test_an_elastic_node_is_the_first_one_if_the_address_is_local(address, node_rank):
    """The first node serves the rendezvous: with two of them, or none, it fails."""
    assert nodes_from(1, "1:2", master_addr=address).node_rank == node_rank


@pytest.mark.parametrize(
    "nnodes, more, message",
    [
        (None, {"node_rank": 0}, "--node-rank needs --nnodes"),
        (
            None,
            {"node_rank": 0, "master_addr": "a", "master_port": 1},
            "--node-rank, --master-addr, --master-port needs --nnodes",
        ),
        ("1:100001", THERE, "--nnodes is 1:100001; use at most 100,000 machines"),
        ("2", {"node_rank": 0}, "--nnodes needs --master-addr, the address of the first machine"),
        ("1:2", {}, "--nnodes needs --master-addr"),
        ("2", THERE, "--nnodes 2 needs --node-rank: 0 on the machine of --master-addr, then 1, 2"),
        ("2", {"node_rank": 2, **THERE}, "--node-rank is 2; with --nnodes 2 use one of 0 to 1"),
        ("1", {"node_rank": 1}, "--node-rank is 1; with --nnodes 1 use one of 0 to 0"),
        (
            "2",
            {"node_rank": 0, "max_restarts": 1, **THERE},
            "--max-restarts needs an elastic launch: use --nnodes 2:2",
        ),
    ],
)
def test_inconsistent_options_are_a_config_error(nnodes, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        nodes_from(1, nnodes, **more)


@pytest.mark.parametrize("given", ["0", "", "-1", "two", "1.5", "2:1", "0:2", "1:", ":2", ":", "1:2:3", "1:two"])
def test_an_invalid_number_of_machines_is_a_config_error(given):
    message = f"--nnodes is {given}; give a number of machines, such as 2, or a range, such as 1:4"
    with pytest.raises(ConfigError, match=re.escape(message)):
        nodes_from(1, given, node_rank=0, **THERE)


def test_world_sizes_of_a_range_of_nodes_are_listed_from_the_largest():
    assert Nodes(8).world_sizes == [8]
    assert Nodes(2, 3, 3).world_sizes == [6]
    assert Nodes(2, 1, 4, True).world_sizes == [8, 6, 4, 2]


def test_options_are_printed_as_they_were_given():
    assert Nodes(8).options == "--nproc-per-node 8"
    assert Nodes(8, 2, 2).options == "--nnodes 2 --nproc-per-node 8"
    assert Nodes(8, 1, 4, True).options == "--nnodes 1:4 --nproc-per-node 8"


def unknown(name: str) -> str:
    raise socket.gaierror(socket.EAI_NONAME, f"no machine is called {name}")


@pytest.mark.parametrize(
    "name, reason, look_up",
    [
        ("no-such-machine", "no machine is called no-such-machine", unknown),
        ("::1", "", socket.gethostbyname),
        ("a" * 70 + ".net", "label", socket.gethostbyname),
    ],
)
def test_an_unreachable_address_is_a_config_error(name, reason, look_up, monkeypatch):
    """Once ranks start, it would be a traceback of a socket or a wait without end."""
    monkeypatch.setattr(socket, "gethostbyname", look_up)
    with pytest.raises(ConfigError) as caught:
        local_address(Nodes(1, 2, 2, master_addr=name, master_port=1))
    assert str(caught.value).startswith(
        f"--master-addr is {name}, which this machine ({socket.gethostname()}) cannot reach: "
    )
    assert reason in str(caught.value)
    assert str(caught.value).endswith("; give the first machine's name or address in your network")
    assert not is_local(name)


def test_the_local_address_is_the_source_of_packets_to_the_first_node():
    assert local_address(Nodes(1)) == "localhost"
    assert local_address(Nodes(1, 2, 2, master_addr="127.0.0.1", master_port=1)) == "127.0.0.1"
    assert local_address(Nodes(1, 2, 2, master_addr="127.8.8.8", master_port=1)) == "127.0.0.1"


def test_a_name_that_resolves_to_the_loopback_is_replaced_by_an_address_that_others_reach(monkeypatch):
    """Debian resolves a machine's name to 127.0.1.1, which Gloo of the first node would send to the others."""
    targets = []

    def source_address(address):
        targets.append(address)
        return "127.0.0.1" if address.startswith("127.") else "10.0.0.7"

    monkeypatch.setattr(nodes_module, "_source_address", source_address)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert local_address(Nodes(1, 2, 2, master_addr="node0", master_port=1)) == "10.0.0.7"
    assert targets == ["127.0.1.1", nodes_module.REMOTE]


def test_a_machine_without_a_network_uses_the_loopback(monkeypatch):
    def source_address(address):
        if not address.startswith("127."):
            raise OSError("Network is unreachable")
        return "127.0.0.1"

    monkeypatch.setattr(nodes_module, "_source_address", source_address)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert local_address(Nodes(1, 2, 2, master_addr="node0", master_port=1)) == "127.0.0.1"


@pytest.mark.parametrize("address, is_here", [("127.0.0.1", True), ("localhost", True), ("203.0.113.7", False)])
def test_an_address_is_local_if_a_socket_can_bind_it(address, is_here):
    assert is_local(address) == is_here


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""


def test_an_interface_without_an_address_is_skipped(monkeypatch):
    """For example one whose cable is unplugged."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "no_such_one"), (2, "lo")])
    assert interface_of("127.0.0.1") == "lo"


def test_gloo_gets_the_interface_of_the_network_to_the_first_node(interfaces, capsys):
    """Gloo's default is the interface of the host's name, often the loopback, where no other machine connects."""
    assert set_network_variables(Nodes(1, 2, 2, master_addr="127.0.0.1", master_port=1)) == "127.0.0.1"
    assert interfaces() == ["lo", None]
    assert capsys.readouterr().out == "GLOO_SOCKET_IFNAME=lo\n"


def test_an_interface_that_is_set_stays(interfaces, monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib1")
    assert set_network_variables(Nodes(1, 2, 2, master_addr="127.0.0.1", master_port=1)) == "127.0.0.1"
    set_network_variables(Nodes(2))
    assert (interfaces(), capsys.readouterr().out) == (["ib0", "ib1"], "")


def test_ranks_of_one_machine_use_the_loopback(interfaces, capsys):
    """On another interface, Gloo and NCCL would open ports to the network."""
    assert set_network_variables(Nodes(2)) == "localhost"
    assert (interfaces(), capsys.readouterr().out) == (["lo", "=lo"], "")


@pytest.mark.parametrize("nodes", [Nodes(2), Nodes(1, 2, 2, master_addr="127.0.0.1", master_port=1)])
def test_an_address_without_an_interface_sets_nothing(interfaces, monkeypatch, capsys, nodes):
    monkeypatch.setattr(nodes_module, "interface_of", lambda address: "")
    monkeypatch.setattr(interfaces_module, "interface_of", lambda address: "")
    set_network_variables(nodes)
    assert (interfaces(), capsys.readouterr().out) == ([None, None], "")


def test_the_first_node_is_reachable_while_it_listens(listening):
    assert is_reachable(Nodes(1, 2, 2, node_rank=1, master_addr="127.0.0.1", master_port=listening), 5.0)


def test_the_first_node_is_not_reachable_when_nothing_listens(listening):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not is_reachable(Nodes(1, 2, 2, node_rank=1, master_addr="127.0.0.1", master_port=port), 5.0)
