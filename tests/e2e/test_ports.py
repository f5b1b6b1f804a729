"""A run on one machine opens no port that the network can reach."""

import os
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
# Runs the following command on a host with another name, whose address is in the file `hosts` of the folder.
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


def test_a_run_on_one_machine_listens_only_on_the_loopback(tmp_path, corpus):
    """Otherwise other machines could connect to the launcher and its ranks."""
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 100_000})
    process = start("pretrain", "--config", str(config), "--nproc-per-node", "2", cwd=tmp_path)
    assert process.stdout is not None
    try:
        assert any(line.startswith("iteration ") for line in process.stdout)
        of_ranks = [listening(child) for child in children(process.pid)]
        assert listening(process.pid) | set().union(*of_ranks) == {LOOPBACK}
        assert sum(map(bool, of_ranks)) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 75


def test_one_process_without_a_launcher_opens_no_port(tmp_path, corpus, monkeypatch):
    before, during = listening(os.getpid()), []
    real = pretrain_module.train_and_evaluate

    def train_and_record_ports(*args):
        result = real(*args)
        during.append(listening(os.getpid()))
        return result

    monkeypatch.setattr(pretrain_module, "train_and_evaluate", train_and_record_ports)
    config = tiny_yaml(tmp_path, corpus, train={"iterations": 1, "eval_iterations": 0})
    assert run_here("pretrain", "--config", str(config), cwd=tmp_path).returncode == 0
    assert during == [before]


def network_address() -> str:
    """An address of this machine that other machines can reach, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        return probe.getsockname()[0]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can give a host another name")
def test_deepspeed_in_one_process_listens_only_on_the_loopback(tmp_path, corpus):
    """DeepSpeed needs a process group, and by default Gloo listens at the address of the host name."""
    if not (address := network_address()):
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
        assert any(line.startswith("iteration ") for line in process.stdout)
        assert listening(process.pid) == {LOOPBACK}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 75


def write_script(folder: Path, text: str) -> None:
    (folder / "mine.py").write_text(text)
    (folder / "beside.py").touch()


def test_a_script_runs_on_all_ranks_as_under_python(tmp_path):
    """This script calls torch's init_process_group, which by default listens on every interface."""
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
def test_the_exit_code_and_message_of_a_script_are_those_of_a_run(tmp_path, end, code, text, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_script(tmp_path, f"import sys\nfrom megatron_lite.errors import *\n{end}\n")
    done = run_here("run", "mine.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, text)


def test_the_error_of_a_script_with_too_few_processes_names_the_command(tmp_path, monkeypatch):
    """The script itself has no option that starts them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_script(
        tmp_path,
        "from megatron_lite import initialize_megatron\nfrom megatron_lite.config.load import load_config\n"
        "initialize_megatron(load_config(None, ['parallel.tensor=2']))\n",
    )
    done = run_here("run", "mine.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "start a multiple of 2 with --nproc-per-node (scripts: megatron-lite run)" in done.stderr


def test_a_script_that_does_not_exist_is_a_config_error(tmp_path):
    done = run_here("run", "no.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "no.py: no such file; give the path of a Python script\n")
