"""A run on one machine opens no port that the network can reach."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.training import pretrain as pretrain_module
from tests.helpers.command import environment, make_corpus, run, run_here, start, tiny_yaml
from tests.helpers.limits import PATIENCE
from tests.helpers.ports import listening

LOOPBACK = "0100007F"
# Runs the words that follow on a host with another name, which the folder's file `hosts` gives an address.
RENAMED = [
    "unshare",
    "--mount",
    "--uts",
    "sh",
    "-ec",
    'mount --bind hosts /etc/hosts; hostname elsewhere; exec "$@"',
    "-",
]
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from tests.helpers.ports import listening

assert (__name__, sys.argv[1:]) == ("__main__", ["--steps", "3", "--help"]), (__name__, sys.argv)
assert sys.path[0] == os.path.dirname(os.path.abspath(__file__)) and sys.argv[0] == "mine.py"
import beside  # a module in the script's folder

dist.init_process_group("gloo")
ones = torch.ones(())
dist.all_reduce(ones)
found = sorted(listening(os.getpid()) | listening(os.getppid()))
os.write(1, f"rank {dist.get_rank()}, launcher: {found}\\n".encode())  # print writes the end of the line by itself
assert ones == 2
dist.destroy_process_group()
sys.exit(0)
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        if thread.name != str(pid)
        for child in (thread / "children").read_text().split()
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_on_one_machine_listens_on_the_loopback_alone(tmp_path, corpus):
    """At a port of the network other users and machines would reach the launcher and its ranks."""
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 100_000})
    process = start("pretrain", "--config", str(config), "--nproc-per-node", "2", cwd=tmp_path)
    assert process.stdout is not None
    try:
        assert any(re.match(r" \[.*\] iteration ", line) for line in process.stdout)
        of_ranks = [listening(child) for child in children(process.pid)]
        assert listening(process.pid) | set().union(*of_ranks) == {LOOPBACK}
        assert sum(map(bool, of_ranks)) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 75


def test_one_process_without_a_launcher_listens_nowhere(tmp_path, corpus, monkeypatch):
    before, during = listening(os.getpid()), []
    real = pretrain_module.train_and_evaluate

    def look(*args):
        end = real(*args)
        during.append(listening(os.getpid()))
        return end

    monkeypatch.setattr(pretrain_module, "train_and_evaluate", look)
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 1, "eval_iterations": 0})
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    assert during == [before]


def of_the_network() -> str:
    """An address of this machine that others can reach; empty without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        return probe.getsockname()[0]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can give a host another name")
def test_deepspeed_in_one_process_listens_on_the_loopback_alone(tmp_path, corpus):
    """DeepSpeed needs a process group. Gloo would open its port at the address of the host's name."""
    if not (address := of_the_network()):
        pytest.skip("this machine has no network")
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{address} elsewhere\n")
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 100_000}, parallel={"ddp": "deepspeed"})
    process = subprocess.Popen(
        [*RENAMED, sys.executable, "-m", "megatron_lite", "pretrain", "--config", str(config)],
        cwd=tmp_path,
        env=environment() | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert any(re.match(r" \[.*\] iteration ", line) for line in process.stdout)
        assert listening(process.pid) == {LOOPBACK}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 75


def write_script(folder: Path, text: str) -> None:
    (folder / "mine.py").write_text(text)
    (folder / "beside.py").touch()


def test_a_script_runs_on_all_ranks_as_python_would_run_it(tmp_path):
    """Also one that calls torch's init_process_group itself, which would listen on every interface."""
    write_script(tmp_path, SCRIPT)
    done = run("run", "--nproc-per-node", "2", "mine.py", "--steps", "3", "--help", cwd=tmp_path, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}, launcher: ['{LOOPBACK}']" for rank in (0, 1)]


@pytest.mark.parametrize(
    "end, code, text",
    [
        ("raise ConfigError('no such thing')", 2, "no such thing\n"),
        ("raise TrainingError('no such thing')", 1, "no such thing\n"),
        ("raise StoppedEarly('stopped, saved')", 75, "stopped, saved\n"),
        ("sys.exit('no such thing')", 1, "no such thing\n"),
        ("sys.exit(2)", 2, "mine.py ended with exit code 2\n"),
        ("sys.exit(75)", 75, "mine.py ended with exit code 75\n"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("", 0, ""),
    ],
)
def test_a_script_ends_as_a_run_does(tmp_path, end, code, text, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_script(tmp_path, f"import sys\nfrom megatron_lite.errors import *\n{end}\n")
    done = run_here("run", "mine.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, text)


def test_a_script_without_its_processes_names_the_command_that_starts_them(tmp_path, monkeypatch):
    """The script itself has no option for it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_script(
        tmp_path,
        "from megatron_lite import initialize_megatron\nfrom megatron_lite.config.load import load_config\n"
        "initialize_megatron(load_config(None, ['parallel.tensor=2']))\n",
    )
    done = run_here("run", "mine.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "a script: megatron-lite run --nproc-per-node 2 SCRIPT, or torchrun" in done.stderr


def test_a_script_that_does_not_exist_is_a_config_error(tmp_path):
    done = run_here("run", "no.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "no.py: no such file; give the path of a Python script\n")
