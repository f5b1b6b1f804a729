"""The rendezvous of a run's launchers, and the store of its ranks.

Any program that reaches the port of a store can write into it, so values from a store are never unpickled. The store
of a single machine listens only on the loopback interface.
"""

import pickle
import socket
import sys
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megatron_lite.engines.interfaces import LOOPBACK
from megatron_lite.errors import ConfigError
from megatron_lite.launch.nodes import Nodes
from megatron_lite.text import visible

RUN_ID = "megatron_lite"


def build_handler(nodes: Nodes, address: str) -> RendezvousHandler:
    """The rendezvous for these nodes. An elastic node connects to the first node here.

    address  of this machine
    """
    if not nodes.several:
        return OneMachine()
    seconds = int(nodes.join_timeout)
    if not nodes.is_elastic:
        return FixedNodes(nodes.master_addr, nodes.master_port, nodes.node_rank, nodes.max_nodes, RUN_ID, seconds)
    parameters = RendezvousParameters(
        backend="json",
        endpoint=nodes.endpoint,
        run_id=RUN_ID,
        min_nodes=nodes.min_nodes,
        max_nodes=nodes.max_nodes,
        local_addr=address,
        join_timeout=seconds,
    )
    store = TCPStore(
        nodes.master_addr,
        nodes.master_port,
        is_master=nodes.node_rank == 0,
        multi_tenant=True,
        timeout=timedelta(seconds=seconds),
    )
    return create_handler(store, JsonBackend(store, nodes.endpoint), parameters)


class OneMachine(RendezvousHandler):
    """The rendezvous of a single launcher.

    Each start of its ranks gets a new store, because the old one has addresses of the previous ranks. This process
    serves the store, so that torch's `init_process_group` opens no port in the first rank.
    """

    def __init__(self) -> None:
        self._store_of_ranks: Store | None = None  # serves while this reference exists

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "one-machine"

    def get_run_id(self) -> str:
        return RUN_ID

    def next_rendezvous(self) -> RendezvousInfo:
        # With an address alone torch would listen on all interfaces.
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            self._store_of_ranks = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        self._store_of_ranks = None
        return True


class FixedNodes(StaticTCPRendezvous):
    """The rendezvous of a fixed number of nodes, each with a different rank."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Raise ConfigError on every node if two have the same rank; torch would wait for the missing rank."""
        info = super().next_rendezvous()
        place = info.store.add("nodes", 1)
        info.store.set(f"node {place}", f"{self.rank} {socket.gethostname()}")
        hosts: dict[int, list[str]] = {}
        for number in range(1, self.world_size + 1):
            rank, host = info.store.get(f"node {number}").decode().split(" ", 1)
            hosts.setdefault(int(rank), []).append(host)
        for rank, of_rank in sorted(hosts.items()):
            if len(of_rank) > 1:
                raise ConfigError(
                    f"--node-rank {rank} was given on {len(of_rank)} machines ({', '.join(sorted(of_rank))}); give "
                    f"each a different one, 0 to {self.world_size - 1}"
                )
        return info


_Time = Annotated[
    AwareDatetime,
    BeforeValidator(lambda given: datetime.fromisoformat(str(given))),
    PlainSerializer(datetime.isoformat),
]


class _State(BaseModel):
    """The fields of torch's `_RendezvousState`, with lists in place of its dictionaries and sets."""

    model_config = ConfigDict(strict=True, extra="forbid")

    round: int
    complete: bool
    deadline: _Time | None
    closed: bool
    participants: list[tuple[_NodeDesc, int]]
    wait_list: list[_NodeDesc]
    redundancy_list: list[_NodeDesc]
    last_heartbeats: list[tuple[_NodeDesc, _Time]]


def encode_state(state: _RendezvousState) -> bytes:
    """The state of torch's rendezvous as JSON."""
    fields = {
        name: list(value.items()) if isinstance(value, dict) else sorted(value) if isinstance(value, set) else value
        for name, value in vars(state).items()
    }
    return _State.model_validate(fields).model_dump_json().encode()


def decode_state(text: bytes) -> _RendezvousState:
    """The state in a JSON text. Raises ValidationError, a ValueError, for any other text."""
    state = _RendezvousState()
    for name, value in _State.model_validate_json(text):
        kind = type(getattr(state, name))
        setattr(state, name, kind(value) if kind in (dict, set) else value)
    return state


class JsonBackend(C10dRendezvousBackend):
    """Keeps the state of an elastic rendezvous as JSON; torch's backend would unpickle any value of the store.

    Torch's interface takes and returns pickled states, which never leave this process. Text in the store that is not a
    state is overwritten with the last state that this node has read.
    """

    def __init__(self, store: Store, endpoint: str):
        super().__init__(store, RUN_ID)
        self._endpoint = endpoint
        self._last: bytes | None = None
        self._has_reported = False

    @property
    def name(self) -> str:
        return "json"

    def get_state(self) -> tuple[bytes, Any] | None:
        while True:
            restored = self._last or self._NULL_SENTINEL.encode()
            # Unlike `get`, this does not wait for a key that another program has deleted.
            found: bytes = self._call_store("compare_set", self._key, "", restored)
            if found == self._NULL_SENTINEL.encode() == restored:
                return None
            try:
                state = decode_state(found)
            except ValidationError:
                self._report()
                self._call_store("compare_set", self._key, found, restored)
                continue
            self._last = found
            return pickle.dumps(state), found

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        text = encode_state(pickle.loads(state))
        found = self._call_store("compare_set", self._key, token or self._NULL_SENTINEL, text)
        if found == text:
            self._last = text
            return state, text, True
        current = self.get_state()
        return current and (*current, False)

    def _report(self) -> None:
        if not self._has_reported:
            notice = f"another program writes into the store of this run at {self._endpoint}; its data was overwritten"
            print(visible(f"{notice}. Let only the machines of this run reach that port"), file=sys.stderr, flush=True)
        self._has_reported = True
