"""The emulated hosts and the SLURM cluster that other tests use."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.cluster import hosts, slurm
from tests.cluster.namespaces import Host
from tests.helpers.limits import PATIENCE

needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
needs_slurm = pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not())

LISTEN = """
import signal, socket
server = socket.create_server(("host-b", 5000))
print("listening", flush=True)
signal.pause()
"""
CONNECT = "import socket; socket.create_connection(('host-b', 5000), timeout=5); print(socket.gethostname())"


def processes(of: Iterable[Host]) -> dict[int, str]:
    """The commands of all processes on the hosts, by pidfd: unlike a pid, it is never reused for another process."""
    networks = [os.readlink(f"/proc/{host.pid}/ns/net") for host in of]
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just exited
            if os.readlink(folder / "ns" / "net") in networks:
                found[os.pidfd_open(int(folder.name))] = (folder / "comm").read_text().strip()
    return found


def is_alive(process: int) -> bool:
    try:
        signal.pidfd_send_signal(process, 0)
    except ProcessLookupError:
        return False
    return True


@needs_slurm
def test_a_job_of_two_nodes_runs_on_both(tmp_path):
    """COMPLETED alone proves nothing: without process tracking, SLURM reports it for jobs that never ran."""
    with slurm.Slurm(tmp_path) as cluster:
        good = cluster.sbatch("--nodes=2", "--output=good.out", "--wrap=srun hostname; echo $WORD", env={"WORD": "yes"})
        bad = cluster.sbatch("--wrap=exit 3")
        cluster.wait(good, "COMPLETED")
        assert cluster.wait(bad, "FAILED", "COMPLETED") == "FAILED"
        assert cluster.show(bad)["ExitCode"] == "3:0"
        with pytest.raises(AssertionError, match=f"job {bad} is FAILED after 0 s, not RUNNING"):
            cluster.wait(bad, "RUNNING", timeout=0)
    assert sorted((tmp_path / "good.out").read_text().split()) == ["node1", "node2", "yes"]


@needs_slurm
def test_an_error_in_a_test_leaves_no_process_of_its_cluster(tmp_path):
    """Daemons leave the session that started them, so only their namespace shows which cluster they belong to."""
    with pytest.raises(ZeroDivisionError), slurm.Slurm(tmp_path, num_nodes=1) as cluster:
        inside = processes(of=cluster.hosts.values())
        assert {"slurmctld", "slurmd", "munged"} <= set(inside.values())
        _ = 1 / 0
    assert not any(is_alive(process) for process in inside)


@needs_hosts
def test_disconnected_hosts_cannot_connect_until_they_are_reconnected():
    with hosts.TwoHosts() as two:
        listener = two.popen("b", [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
        assert listener.stdout.readline() == "listening\n"

        def connect() -> subprocess.CompletedProcess[str]:
            return two.hosts["a"].run(sys.executable, "-c", CONNECT)

        assert connect().stdout == "host-a\n"
        two.disconnect("b")
        assert "Error" in connect().stderr
        two.reconnect("b")
        assert connect().stdout == "host-a\n"
        inside = processes(of=two.hosts.values())
    assert listener.returncode == -signal.SIGKILL
    assert len(inside) >= 3 and not any(is_alive(process) for process in inside)


@needs_hosts
def test_signals_and_exit_codes_of_a_process_on_a_host_are_its_own():
    with hosts.TwoHosts() as two:
        script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done"
        process = two.popen("a", ["sh", "-c", script], stdout=subprocess.PIPE)
        process.stdout.readline()
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 7
