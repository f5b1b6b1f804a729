"""Launchers of several nodes, on this machine: missing nodes, lost nodes and nodes that join again."""

import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from megatron_lite.errors import ConfigError, StoppedEarly, TrainingError
from megatron_lite.launch import launcher as launch_module
from megatron_lite.launch import rendezvous as rendezvous_module
from megatron_lite.launch.agent import ENDED_BY_OTHERS, Agent, _rendezvous_error, run_agent
from megatron_lite.launch.launcher import launch
from megatron_lite.launch.nodes import Nodes
from megatron_lite.launch.reports import write_report
from tests.helpers import warm
from tests.helpers.command import ROOT, environment
from tests.helpers.limits import PATIENCE

HERE = "tests.e2e.test_launch_nodes"
STATE = "torch.rendezvous.megatron_lite"  # the key that torch's elastic rendezvous uses
REMEDY = (
    "; start the same command on every machine, each with its own --node-rank, within --join-timeout (1 s), and let "
    "them reach that port"
)


def free_port() -> int:
    """A free port below those that Linux uses for outgoing connections, which could take it before the test."""
    while True:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def node(node_rank: int, port: int, *, is_elastic: bool, **more) -> Nodes:
    """One of two nodes, which waits one second for the other."""
    place = {"master_addr": "127.0.0.1", "master_port": port, "join_timeout": 1.0}
    return Nodes(1, 2, 2, is_elastic, node_rank, **place | more)


def error_of(nodes: Nodes, folder: Path) -> str:
    """The error of a node without others."""
    with pytest.raises(TrainingError) as caught:
        run_agent(f"{HERE}:never", (), nodes, "127.0.0.1", folder, lambda: 0)
    return str(caught.value)


def never() -> None:
    raise AssertionError("a rank was started")


def test_a_node_without_others_exits_after_the_join_timeout_with_a_remedy(tmp_path):
    """The first and the second node, fixed and elastic, all at once because each takes seconds."""
    combinations = [(node_rank, is_elastic) for node_rank in (0, 1) for is_elastic in (False, True)]
    nodes = [node(node_rank, free_port(), is_elastic=is_elastic) for node_rank, is_elastic in combinations]
    with ThreadPoolExecutor(4) as executor:
        errors = list(executor.map(error_of, nodes, [tmp_path] * 4))
    for one, error in zip(nodes, errors, strict=True):
        reason = "the first node does not answer" if one.node_rank else "fewer than 2 machines have started"
        # Torch's reason in parentheses varies: its store may be gone before its client connects.
        start_of_message = re.escape(f"node {one.node_rank} could not join the other nodes at {one.endpoint}: {reason}")
        assert re.fullmatch(rf"{start_of_message}( \(.+\))?{re.escape(REMEDY)}", error), error


@pytest.mark.parametrize("is_elastic", [False, True])
def test_the_message_for_a_port_in_use_names_the_port_and_the_option(tmp_path, is_elastic):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        assert error_of(node(0, port, is_elastic=is_elastic), tmp_path) == (
            f"port {port} is in use on this machine; give another --master-port, the same on every machine"
        )


def test_two_machines_with_the_same_node_rank_get_an_error_with_both_names(tmp_path):
    """Torch would wait for the missing rank."""
    port, host = free_port(), socket.gethostname()
    nodes = [Nodes(1, 3, 3, node_rank=rank, master_addr="127.0.0.1", master_port=port) for rank in (0, 1, 1)]

    def end(one: Nodes) -> str:
        with pytest.raises(ConfigError) as caught:
            run_agent(f"{HERE}:never", (), one, "127.0.0.1", tmp_path, lambda: 0)
        return str(caught.value)

    with ThreadPoolExecutor(3) as executor:
        assert list(executor.map(end, nodes)) == 3 * [
            f"--node-rank 1 was given on 2 machines ({host}, {host}); give each a different one, 0 to 2"
        ]


def test_the_message_of_a_lost_connection_has_its_reason():
    """Torch puts the reason into __cause__; some of its errors have no text."""
    one = node(1, 7, is_elastic=True)
    lost = RendezvousConnectionError("The connection to the C10d store has failed. See inner exception for details.")
    lost.__cause__ = RuntimeError("Broken pipe\nframe #1")
    assert _rendezvous_error(lost, one, had_ranks=True) == (
        "node 1 lost the first node at 127.0.0.1:7 (Broken pipe); its output has the reason"
    )
    prefix = f"node 1 could not join the other nodes at {one.endpoint}: "
    no_answer = f"{prefix}the first node does not answer (Broken pipe){REMEDY}"
    assert _rendezvous_error(lost, one, had_ranks=False) == no_answer
    few = f"{prefix}fewer than 2 machines have started{REMEDY}"
    assert _rendezvous_error(RendezvousTimeoutError(), one, had_ranks=True) == few
    assert _rendezvous_error(RendezvousClosedError(), one, had_ranks=True) == ENDED_BY_OTHERS


def test_a_spare_node_reports_that_the_others_ended_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Agent, "run", lambda self: None)
    assert error_of(node(0, free_port(), is_elastic=True), tmp_path) == ENDED_BY_OTHERS


def test_a_command_without_other_nodes_prints_one_message(tmp_path):
    """Torch prints a page of stack frames for each attempt, unless a variable is set before it is imported."""
    port = free_port()
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    config = ["data.paths=corpus", "data.tokenizer=bytes", f"run.dir={tmp_path}"]
    command = [sys.executable, "-m", "megatron_lite", "pretrain", "--nproc-per-node", "1", *place]
    done = subprocess.run(
        [*command, "--join-timeout", "1", *config],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (1, "GLOO_SOCKET_IFNAME=lo\n")
    (message,) = done.stderr.splitlines()
    assert message.startswith(
        f"node 1 could not join the other nodes at 127.0.0.1:{port}: the first node does not answer ("
    )


WAITING = """
import sys
from megatron_lite.launch import launcher as launch
from megatron_lite.launch.nodes import Nodes
launch.STOP_SECONDS = 0.3
sys.exit(launch.launch("{here}:never", (), {nodes!r}))
"""


def has_handler(pid: int, number: int) -> bool:
    """True if the process has a handler for the signal."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_node_that_waits_for_others_exits_on_a_stop_signal(tmp_path):
    """Torch's wait cannot be interrupted: the machine would be blocked for up to --join-timeout."""
    waiting = []
    for is_elastic in (False, True):
        script = tmp_path / f"elastic_{is_elastic}.py"
        nodes = node(0, free_port(), is_elastic=is_elastic, join_timeout=900.0)
        script.write_text(WAITING.format(here=HERE, nodes=nodes))
        waiting.append(warm.Command(warm.PYTHON, [str(script)], cwd=ROOT, env=environment()))
    for process in waiting:
        deadline = time.monotonic() + PATIENCE
        while not has_handler(process.pid, signal.SIGTERM):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    for process in waiting:
        assert process.communicate(timeout=PATIENCE)[1] == "stopped by SIGTERM while waiting for the other nodes\n"
        assert process.returncode == 1


class Exited(BaseException):
    pass


@pytest.fixture
def watch(monkeypatch, tmp_path, capsys):
    """`watch(nodes, received, had_ranks)`: exit code and message of a launcher whose agent waits, or None."""
    monkeypatch.setattr(launch_module, "STOP_SECONDS", 0.0)
    monkeypatch.setattr(launch_module, "UNREACHABLE_SECONDS", 0.0)

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)

    def watch(nodes: Nodes, *, received: int = 0, had_ranks: bool = False) -> tuple[int, str] | None:
        ranks = [[object()]] if had_ranks else []
        monkeypatch.setattr("multiprocessing.active_children", lambda: ranks.pop() if ranks else [])
        running: Future[int] = Future()
        polls: list[None] = []

        def pass_on() -> None:
            """Let the agent return after the polls that a launcher needs to exit."""
            polls.append(None)
            if len(polls) == 5:
                running.set_result(0)

        try:
            launch_module._watch(running, nodes, SimpleNamespace(first=received, pass_on=pass_on), tmp_path)
        except Exited as exit:
            return exit.args[0], capsys.readouterr().err
        return None

    return watch


def test_a_node_that_lost_the_first_node_exits(watch):
    """Torch's connection to the first node would wait for 15 minutes."""
    port = free_port()
    assert watch(node(1, port, is_elastic=False), had_ranks=True) == (
        1,
        f"node 1 cannot reach the first node at 127.0.0.1:{port}, and its ranks have exited; run the same command "
        "again when the network works\n",
    )


def test_a_node_waits_while_the_first_node_is_reachable(watch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert watch(node(1, server.getsockname()[1], is_elastic=True), had_ranks=True) is None


@pytest.mark.parametrize("node_rank, had_ranks", [(0, True), (1, False)])
def test_the_first_node_and_a_node_before_its_rendezvous_wait(watch, node_rank, had_ranks):
    """--join-timeout limits the time of the rendezvous."""
    assert watch(node(node_rank, free_port(), is_elastic=True), had_ranks=had_ranks) is None


def test_a_node_that_has_saved_and_waits_for_the_others_exits_with_75(watch, tmp_path, monkeypatch):
    """Its checkpoint is safe; after exit code 1 a batch system would give up."""
    monkeypatch.setenv("RANK", "3")
    write_report(str(tmp_path), "stopped, saved", StoppedEarly.exit_code, restart_may_help=False)
    assert watch(node(1, free_port(), is_elastic=False), received=15, had_ranks=True) == (75, "stopped, saved\n")


@pytest.mark.parametrize("had_ranks", [True, False])
def test_on_one_machine_a_signal_does_not_limit_the_agent(watch, had_ranks):
    """Else a busy machine delays the agent, and a run whose ranks have saved exits with 1."""
    assert watch(Nodes(2), received=15, had_ranks=had_ranks) is None


def ring(folder: str, name: str) -> None:
    """All-reduce until the file `done` exists. A file shows the world size; a stop signal leads to a save."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    (Path(folder) / f"{name}_of_{os.environ['WORLD_SIZE']}_{os.getpid()}").touch()
    while True:
        done = torch.tensor(int((Path(folder) / "done").exists()))
        dist.all_reduce(done)
        if done:
            break
        if stop_signals:
            time.sleep(0.5)
            (Path(folder) / f"saved_{os.getpid()}").touch()
            raise StoppedEarly("stopped, saved")
        time.sleep(0.02)
    dist.destroy_process_group()


def run_node(folder: str, name: str, node_rank: int, port: int) -> None:
    """A launcher that detects lost nodes in seconds; torch's defaults take half a minute."""
    with (Path(folder) / f"{name}.err").open("a") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)
    short_timeouts = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 8}
    rendezvous_module.RendezvousParameters = partial(RendezvousParameters, **short_timeouts)  # type: ignore[misc]
    place = {"node_rank": node_rank, "master_addr": "127.0.0.1", "master_port": port}
    nodes = Nodes(1, 1, 2, True, **place, max_restarts=3, join_timeout=PATIENCE)
    warm.fork_ranks()
    sys.exit(launch(f"{HERE}:ring", (folder, name), nodes))


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def attack(port: int, path: Path) -> None:
    """Write garbage into the store of an elastic run, as any program can that reaches its port."""
    store = dist.TCPStore("127.0.0.1", port)
    for value in (
        b64encode(pickle.dumps(Touch(path))),
        b64encode(pickle.dumps(3)),
        b"garbage",
        b"\xff\x00",
        b"{}",
        b"",
    ):
        store.set(STATE, value)
        time.sleep(0.2)
    store.delete_key(STATE)


def test_an_elastic_run_continues_without_a_lost_node_and_with_it_again(tmp_path):
    """Otherwise machines would be idle until the user restarts the run."""
    warm.start_server()
    ctx = get_context("forkserver")
    port = free_port()
    seen: set[str] = set()
    launchers: list[BaseProcess] = []

    def start_node(name: str, node_rank: int) -> BaseProcess:
        launchers.append(ctx.Process(target=run_node, args=(str(tmp_path), name, node_rank, port)))
        launchers[-1].start()
        return launchers[-1]

    def wait_for(*names: str) -> list[int]:
        """The process ids of new ranks with these names and world sizes."""
        deadline, found = time.monotonic() + PATIENCE, {}
        while len(found) < len(names):
            assert time.monotonic() < deadline, f"no {names}: {printed('a')}{printed('b')}"
            time.sleep(0.02)
            new = {path.name for path in tmp_path.glob("*_of_*")} - seen
            found = {name: file for name in names for file in new if file.startswith(f"{name}_")}
        seen.update(found.values())
        return [int(found[name].rpartition("_")[2]) for name in names]

    def printed(name: str) -> str:
        return (tmp_path / f"{name}.err").read_text()

    try:
        first, second = start_node("a", 0), start_node("b", 1)
        _, lost = wait_for("a_of_2", "b_of_2")
        attack(port, tmp_path / "taken")
        second.kill()
        os.kill(lost, signal.SIGKILL)
        (alone,) = wait_for("a_of_1")
        assert "\nrestarting from the newest checkpoint (1 of 3)\n" in printed("a")
        second = start_node("b", 1)
        wait_for("a_of_2", "b_of_2")
        assert "nodes joined or left: restarting with the present ones\n" in printed("a")
        assert (tmp_path / f"saved_{alone}").exists()
        (tmp_path / "done").touch()
        for launcher in (first, second):
            launcher.join(300)
            assert launcher.exitcode == 0, printed("a") + printed("b")
        assert "another program writes into the store of this run" in printed("a") + printed("b")
        assert not (tmp_path / "taken").exists()
    finally:
        (tmp_path / "done").touch()
        for launcher in launchers:
            launcher.kill()
        for file in tmp_path.glob("*_of_*"):
            try:
                os.kill(int(file.name.rpartition("_")[2]), signal.SIGKILL)
            except ProcessLookupError:
                continue
