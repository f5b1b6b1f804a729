"""Training on two hosts whose network connection breaks."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.training.pretrain import pretrain
from tests.cluster.hosts import TwoHosts, why_not
from tests.helpers.command import ROOT, environment, make_corpus, tiny_yaml
from tests.helpers.limits import PATIENCE
from tests.helpers.runs import rows, tensor_files

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def launch(hosts: TwoHosts, config: Path, *arguments: str) -> dict[str, subprocess.Popen[str]]:
    """Start launch.sh on both hosts, one rank on each."""
    command = ["sh", str(ROOT / "launch.sh"), "--nproc-per-node", "1", "--config", str(config), *arguments]
    place = {"NNODES": "2", "MASTER_ADDR": "10.78.0.1", "PYTHON": sys.executable}
    return {
        host: hosts.popen(
            host,
            command,
            env=environment() | place | {"NODE_RANK": str(node_rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node_rank, host in enumerate("ab")
    }


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def train_from(config: str) -> None:
    pretrain(load_config(Path(config)))


@pytest.mark.soak  # gloo notices a broken connection only after comm_timeout
def test_both_hosts_exit_on_a_broken_network_and_resume_when_it_works(ranks, tmp_path):
    """A host that does not exit is idle, and paid for, until a user notices."""
    prefix = make_corpus(tmp_path)
    settings = {
        # A save every 10 iterations keeps training slow enough to be disconnected in the middle. Dropout would expose
        # a lost random state.
        "train": {"iterations": 150, "comm_timeout": 15.0},
        "checkpoint": {"interval": 10},
        "log": {"interval": 1000},
    }
    expected = tiny_yaml(tmp_path, prefix, **settings, run={"dir": str(tmp_path / "expected")})
    ranks(2, train_from, str(expected))
    config = tiny_yaml(tmp_path, prefix, **settings, run={"dir": str(tmp_path / "run")})
    with TwoHosts() as hosts:
        started = launch(hosts, config)
        wait_for_rows(tmp_path / "run", 25)
        hosts.disconnect("b")
        for process in started.values():
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 1
            assert re.search(
                r"^iteration \d+.*: rank \d got no answer in .* over (dp|dp_cp|world) \(ranks 0 and 1\): .*Timed out.* "
                r"Look at the output of those ranks first",
                err,
                re.MULTILINE,
            ), err
            assert "Traceback" not in err
            assert "GLOO_SOCKET_IFNAME=eth0\n" in out
        hosts.reconnect("b")
        for process in launch(hosts, config).values():
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
    assert rows(tmp_path / "run") == rows(tmp_path / "expected")
    newest = "checkpoints/iter_0000150"
    assert tensor_files(tmp_path / "run" / newest) == tensor_files(tmp_path / "expected" / newest)


@pytest.mark.soak
def test_two_hosts_with_other_corpora_stop_before_the_first_step(tmp_path):
    """A stale copy on one host would train to the end, with a loss that is wrong by some percent."""
    (tmp_path / "a").mkdir()
    make_corpus(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/corpus_text_document.bin").open("r+b").write(b"\1\1")
    config = tiny_yaml(tmp_path, "corpus_text_document")
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29511"}
    command = [sys.executable, "-m", "megatron_lite", "pretrain", "--config", str(config)]
    with TwoHosts() as hosts:
        started = [
            hosts.popen(
                host,
                command,
                cwd=tmp_path / host,
                env=environment() | variables | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, host in enumerate("ab")
        ]
        for process in started:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 2 and "iteration" not in out
            words = "rank 1 on host-b reads other contents than rank 0 on host-a: corpus_text_document.bin {'bytes': "
            assert err.count(words) == 1 and err.count("\n") == 1
