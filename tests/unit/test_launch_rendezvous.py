"""The rendezvous of one launcher, without a port to the network, and of elastic launchers, through checked JSON."""

import pickle
from datetime import datetime, timedelta, timezone

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from megatron_lite.errors import TrainingError
from megatron_lite.launch.agent import Agent, LocalElasticAgent
from megatron_lite.launch.rendezvous import JsonBackend, OneMachine, decode_state, encode_state

KEY = "torch.rendezvous.megatron_lite"
ONE, TWO, THREE = _NodeDesc("node0", 11, 0), _NodeDesc("node1", 12, 0), _NodeDesc("nöde2", 13, 1)
GARBAGE = [
    pickle.dumps({"round": 1}),
    b"garbage",
    b"\xff\x00",
    b"",
    b"{}",
    b"[" * 100_000,
    encode_state(_RendezvousState()).replace(b'"round":0', b'"round":"0"'),
    encode_state(_RendezvousState()).replace(b'"deadline":null', b'"deadline":"soon"'),
    encode_state(_RendezvousState()).replace(b'"deadline":null', b'"deadline":"2026-01-01"'),  # no time zone
    b"Y2FuaW1hZGFt",  # torch's value for a store without a state
]


def full_state() -> _RendezvousState:
    """A state in which every field has a value."""
    state, now = _RendezvousState(), datetime.now(timezone.utc)
    state.round, state.complete, state.closed, state.deadline = 3, True, True, now + timedelta(seconds=5)
    state.participants, state.wait_list, state.redundancy_list = {ONE: 0, TWO: 1}, {THREE, TWO}, {THREE}
    state.last_heartbeats = {ONE: now, TWO: now.replace(microsecond=0)}
    return state


@pytest.mark.parametrize("state", [_RendezvousState(), full_state()])
def test_a_state_is_the_same_after_json(state):
    """Torch computes with these values: with another type or time zone it would lose nodes."""
    assert vars(decode_state(encode_state(state))) == vars(state)
    assert encode_state(decode_state(encode_state(state))) == encode_state(state)


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_is_a_value_error(text):
    with pytest.raises(ValueError):
        decode_state(text)


@pytest.fixture
def store():
    """The TCP store of an elastic run."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_two_nodes_share_a_state_and_only_one_of_two_changes_is_stored(store):
    first, second = JsonBackend(store, "here"), JsonBackend(store, "here")
    assert first.get_state() is None
    state = full_state()
    written, token, is_set = first.set_state(pickle.dumps(state))
    assert (vars(pickle.loads(written)), is_set) == (vars(state), True)
    assert second.get_state() == first.get_state()
    state.round = 4
    assert second.set_state(pickle.dumps(state), token)[2]
    state.round = 5
    seen, _, is_set = first.set_state(pickle.dumps(state), token)
    assert (pickle.loads(seen).round, is_set) == (4, False)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_the_store_is_overwritten_and_reported_once(store, garbage, capsys):
    """Any program that reaches the port can write garbage, which must not stop a run."""
    backend = JsonBackend(store, "node0:29500")
    _, token, _ = backend.set_state(pickle.dumps(full_state()))
    before = backend.get_state()
    for _ in range(2):
        store.set(KEY, garbage)
        assert backend.get_state() == before
        assert store.get(KEY) == token
    store.set(KEY, garbage)
    seen, _, is_set = backend.set_state(pickle.dumps(_RendezvousState()), token)
    assert (seen, is_set) == (before[0], False)
    store.delete_key(KEY)
    assert backend.get_state() == before
    assert capsys.readouterr().err == (
        ""
        if garbage == b""
        else "another program writes into the store of this run at node0:29500; its data was overwritten. Let only the "
        "machines of this run reach that port\n"
    )


def test_garbage_before_the_first_state_is_overwritten(store):
    store.set(KEY, b"garbage")
    assert JsonBackend(store, "here").get_state() is None


def test_each_start_on_one_machine_has_an_empty_store():
    """Otherwise restarted ranks would connect to the addresses of the previous ranks."""
    handler = OneMachine()
    for _ in range(2):
        info = handler.next_rendezvous()
        server = info.bootstrap_store_info
        store = TCPStore(server.master_addr, server.master_port)
        assert (info.rank, info.world_size) == (0, 1)
        assert store.add("starts that have used this store", 1) == 1
    assert isinstance(info.store, HashStore)


@pytest.mark.parametrize("error", [ValueError("no number"), KeyError("rank"), TypeError("not a mapping")])
def test_unreadable_data_of_other_launchers_is_a_training_error(monkeypatch, error):
    """Torch's agents raise any of these errors for text of other programs."""

    def fail(self, group):
        raise error

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", fail)
    agent = Agent.__new__(Agent)
    agent._endpoint = "node0:29500"
    with pytest.raises(TrainingError) as caught:
        agent._rendezvous(None)
    message = str(caught.value)
    assert message.startswith("the store of this run at node0:29500 has unreadable data ")
    assert f"({type(error).__name__}: {error}); give another --master-port on every machine" in message
