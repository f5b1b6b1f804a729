"""`doctor` before ranks start, and the lines that it prints for the answers of ranks."""

import errno
import os
import re
import socket
from dataclasses import replace

import pytest

from megatron_lite.cli.doctor import check_port
from megatron_lite.config.load import load_config
from megatron_lite.doctor import checks as doctor
from megatron_lite.doctor.findings import Answer, described, readable, where
from megatron_lite.doctor.machine import Machine, devices, lacks_rdma, limits, open_files
from megatron_lite.doctor.network import ADVICE, Speed, pace, summary, used_groups
from megatron_lite.errors import TrainingError
from megatron_lite.launch import launcher as launch
from megatron_lite.launch.available import available_cores, available_memory
from megatron_lite.launch.nodes import Nodes
from megatron_lite.parallel.grid import Grid
from megatron_lite.text import listed, named_ranks
from tests.helpers.command import run_here, run_listing_modules

H100, A100 = ("NVIDIA H100 80GB HBM3", 80 << 30), ("NVIDIA A100-SXM4-40GB", 40 << 30)


def machines(*hosts: tuple[str, int, dict]) -> list[Answer[Machine]]:
    """Answers of ranks, given as (host, number of ranks, changes to a plain Machine)."""
    plain = Machine("cpu", 64, memory_bytes=2.0**39, gpus=(), open_files=65536, shm_bytes=1 << 35, threads=1)
    each = [(host, replace(plain, **special)) for host, ranks, special in hosts for _ in range(ranks)]
    return [Answer(rank, host, machine, "") for rank, (host, machine) in enumerate(each)]


def lines(findings) -> list[str]:
    return [str(finding) for finding in findings]


def test_help_loads_nothing_heavy():
    done = run_listing_modules("doctor", "--help")
    assert done.returncode == 0, done.stderr
    assert "--master-port" in done.stdout and done.stdout.splitlines()[-1] == "loaded []"


def test_a_wrong_config_exits_with_2_and_every_message(tmp_path):
    (tmp_path / "a.yaml").write_text("parallel: {tensor: 5}\n")
    done = run_here("doctor", "--config", "a.yaml", "--nproc-per-node", "2", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    for message in (
        "which does not divide the number of processes (2)",
        "data.paths is empty",
        "data.tokenizer and model.vocab_size are both missing",
    ):
        assert message in done.stderr
    done = run_here("doctor", "parallel.tensor=2", "parallel.context=2", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2


def test_one_process_examines_its_machine(tmp_path):
    done = run_here("doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    whats = [line[7:].partition(":")[0] for line in done.stdout.splitlines()[:-1]]
    assert whats == ["versions", "devices", "limits", "arithmetic", "tokenizer, data, index files"]
    assert done.stdout.splitlines()[-1].startswith("4 checks passed")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The addresses of launches, none of which starts a rank."""
    found: list[str] = []
    monkeypatch.setattr(launch, "run_ranks", lambda target, args, nodes: found.append(nodes.endpoint) or 0)
    return found


def test_the_rendezvous_port_is_checked_first(tmp_path, launched):
    """Without this check the other machines would time out."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        several = ("--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port), "--node-rank")
        done = run_here("doctor", *several, "0", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (
            1,
            f" FAIL  port: {port} of {socket.gethostname()} is taken; stop its process (`ss -ltnp 'sport = "
            f":{port}'` shows it), or give another --master-port on every machine\n",
        )
        assert not launched
        assert run_here("doctor", *several, "1", cwd=tmp_path).returncode == 0  # node 1 does not open the port
    done = run_here("doctor", *several, "0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f" ok    port: {port} of {socket.gethostname()} is free\n")
    assert launched == 2 * [f"localhost:{port}"]


def test_a_port_without_permission_is_reported(monkeypatch, capsys):
    def raise_permission_denied(self, address):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"bind": raise_permission_denied}))
    with pytest.raises(BaseException, match="1"):
        check_port(Nodes(1, 2, 2, master_port=80))
    assert "cannot be opened: Permission denied; give another --master-port" in capsys.readouterr().out


def test_a_failed_rendezvous_reports_a_host_name_with_a_loopback_address(monkeypatch):
    """This is the most frequent cause on a new machine, and Gloo's error does not mention it."""

    def raise_connection_refused(device, seconds, backend):
        raise TrainingError("rank 1 of 2 cannot connect to the others at a:29500: connection refused")

    monkeypatch.setattr(doctor, "join_process_group", raise_connection_refused)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(TrainingError) as raised:
        doctor.rendezvous(2, 1.0)
    assert re.search(
        r"at a:29500: connection refused\. The name of this machine \(box\) resolves to 127\.0\.1\.1, .*"
        r"set GLOO_SOCKET_IFNAME to the interface that `ip route get MASTER_ADDR` names$",
        str(raised.value),
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    with pytest.raises(TrainingError, match=r"connection refused$"):
        doctor.rendezvous(2, 1.0)


def test_equal_hosts_share_one_line():
    found = devices(
        machines(*[(f"n{n}", 8, {"device": "cuda", "gpus": 8 * (H100,)}) for n in range(6)], ("login", 1, {}))
    )
    assert lines(found) == [
        " FAIL  devices: ranks 0 to 7 on n0, ranks 8 to 15 on n1, ranks 16 to 23 on n2 and 3 more found GPUs, rank 48 "
        "on login none; see what nvidia-smi says there and that CUDA_VISIBLE_DEVICES is not empty, or set "
        "run.device=cpu",
        " ok    devices: n0, n1, n2 and 3 more, each: 8 ranks, 64 cores, 512.0 GiB of memory, 8 x NVIDIA H100 80GB "
        "HBM3 with 80.0 GiB; login: 1 rank, 64 cores, 512.0 GiB of memory, no GPU",
    ]


def test_different_gpus_and_unused_gpus_are_reported():
    new, old = {"device": "cuda", "gpus": 4 * (H100,)}, {"device": "cuda", "gpus": (A100, A100)}
    assert lines(devices(machines(("a", 2, new), ("b", 2, old)))) == [
        " warn  devices: GPUs differ: NVIDIA H100 80GB HBM3 on a and NVIDIA A100-SXM4-40GB on b; the slowest sets the "
        "pace of all",
        " ok    devices: a: 2 ranks, 64 cores, 512.0 GiB of memory, 4 x NVIDIA H100 80GB HBM3 with 80.0 GiB, 2 GPUs "
        "without a rank; b: 2 ranks, 64 cores, 512.0 GiB of memory, 2 x NVIDIA A100-SXM4-40GB with 40.0 GiB",
    ]


def test_limits_that_are_too_low_for_the_ranks_of_a_host_are_reported():
    gpus = {"device": "cuda", "gpus": 8 * (H100,)}
    assert lines(limits(machines(("a", 8, {**gpus, "shm_bytes": 64 << 20}), ("b", 8, {**gpus, "threads": 16})))) == [
        " warn  limits: a: /dev/shm has 64.0 MiB free, through which 8 ranks may talk; make it larger (docker run "
        "--shm-size=8g, or --ipc=host)",
        " warn  limits: b: 128 threads of 8 ranks on 64 cores wait for each other; set OMP_NUM_THREADS=8",
    ]
    assert lines(limits(machines(("a", 4, {"cores": 2})))) == [
        " warn  limits: a: 4 threads of 4 ranks on 2 cores wait for each other; start at most 2 ranks on it"
    ]


def test_the_limit_of_open_files_is_compared_with_the_layout():
    """Rank 0 of a large run has a connection to each rank, and login shells give 1024 files."""
    few, many = {"open_files": 1024}, {"open_files": 65536}
    grid = Grid(tp=8, dp=256)
    assert lines(open_files(grid, machines(("a", 8, few), ("b", 2040, many)))) == [
        " FAIL  open files: this layout needs about 2,144 on rank 0 of a, and the limit is 1,024; raise the hard "
        "limit (ulimit -Hn) there to 5312"
    ]
    (line,) = lines(open_files(grid, machines(("a", 8, many), ("b", 2040, {"open_files": 200}))))
    assert line.startswith(" warn  open files: this layout needs about 97 on rank 8 of b, and the limit is 200; ")
    assert lines(open_files(grid, machines(("a", 8, many), ("b", 2040, many)))) == [
        " ok    open files: this layout needs about 2,144 on rank 0 of a, and the limit is 65,536"
    ]


def test_limits_of_a_container_count(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lite.launch.available.CGROUP", tmp_path)
    unlimited = available_cores(), available_memory()
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (available_cores(), available_memory()) == unlimited
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert (available_cores(), available_memory()) == (1, 1 << 20)


def test_only_groups_that_the_config_uses_are_measured():
    config = load_config(None)
    untied = load_config(None, ["model.tie_embeddings=false"])
    assert list(used_groups(config, Grid())) == []
    assert list(used_groups(config, Grid(dp=4))) == ["dp, world"]
    assert list(used_groups(config, Grid(tp=2, dp=2, pp=3))) == ["tp", "dp", "pp", "embd", "world"]
    assert list(used_groups(config, Grid(tp=2, pp=2))) == ["tp", "pp, embd", "world"]
    assert list(used_groups(untied, Grid(tp=2, pp=2))) == ["tp", "pp", "world"]
    assert used_groups(config, Grid(tp=2, dp=2))["dp"] == [(0, 2), (1, 3)]


def test_the_slowest_group_is_named_and_is_a_warning_if_much_slower():
    """One bad cable among hundreds slows down all ranks."""

    def answers(slow: float) -> list[Answer[list[Speed]]]:
        speeds = {(0, 1): 4e9, (2, 3): slow, (4, 5): 4.1e9}
        return [
            Answer(rank, f"host-{rank // 2}", [Speed(ranks, 5e-5 * (1 + rank), speed)], "")
            for ranks, speed in speeds.items()
            for rank in ranks
        ]

    assert lines(summary("tp", "groups of 2 ranks", answers(3.9e9))) == [
        " ok    tp: 3 groups of 2 ranks, the slowest ranks 2 and 3: latency 200 us, 3.9 GB/s"
    ]
    assert lines(summary("tp", "groups of 2 ranks", answers(2e8))) == [
        f" warn  tp: ranks 2 and 3 on host-1: latency 200 us, 200.0 MB/s, where others have 4.0 GB/s; {ADVICE}"
    ]
    failed = [Answer(0, "a", None, "no answer"), Answer(1, "b", None, "no answer"), Answer(2, "c", None, "closed")]
    assert lines(summary("tp", "groups of 2 ranks", failed)) == [
        f" FAIL  tp: rank 0 on a and rank 1 on b: no answer; {ADVICE} (2 more ranks have a problem)"
    ]
    assert pace(Speed((0, 1), 0.0123, 1e8)) == "latency 12.3 ms, 100.0 MB/s"


@pytest.mark.parametrize(
    ("hosts", "bandwidth", "warning"),
    [
        (("a", "a"), 300e9, ""),
        (("a", "a"), 20e9, "20.0 GB/s, and H100 GPUs reach more than 100.0 GB/s there; look at nvidia-smi topo -m"),
        (("a", "b"), 40e9, ""),
        (("a", "b"), 2e9, "2.0 GB/s, and H100 GPUs reach more than 10.0 GB/s there; NCCL may use TCP"),
    ],
)
def test_a_network_whose_links_are_all_slow_is_a_warning(hosts, bandwidth, warning):
    """Groups compared with each other alone would pass where NCCL has silently chosen TCP."""
    speed = [Speed((0, 1), 5e-5, bandwidth)]
    answers = [Answer(rank, host, speed, "") for rank, host in enumerate(hosts)]
    (line,) = lines(summary("tp", "groups of 2 ranks", answers, gpu="H100"))
    assert line.startswith(" warn" if warning else " ok")
    assert warning in line
    (line,) = lines(summary("tp", "groups of 2 ranks", answers))
    assert line.startswith(" ok")


@pytest.mark.parametrize(
    ("adapters", "library", "lacks"), [(1, None, True), (1, "libibverbs.so.1", False), (0, None, False)]
)
def test_rdma_adapters_without_their_library_are_found(tmp_path, monkeypatch, adapters, library, lacks):
    for number in range(adapters):
        (tmp_path / f"mlx5_{number}").mkdir()
    monkeypatch.setattr("megatron_lite.doctor.machine.find_library", lambda name: library)
    assert lacks_rdma(tmp_path) is lacks
    assert lacks_rdma(tmp_path / "absent") is False


def test_texts_of_ranks_hosts_sizes_and_errors():
    assert [named_ranks(ranks) for ranks in ([3], [0, 1], [0, 2], [0, 1, 2], [0, 2, 4])] == [
        "rank 3",
        "ranks 0 and 1",
        "ranks 0 and 2",
        "ranks 0 to 2",
        "ranks 0, 2 and 4",
    ]
    assert (
        listed(["a"]) == "a"
        and listed(list("abcd")) == "a, b, c and d"
        and listed(list("abcdef")) == "a, b, c and 3 more"
    )
    assert where(machines(("a", 2, {}), ("b", 1, {}))) == "ranks 0 and 1 on a and rank 2 on b"
    assert [readable(size) for size in (1e5, 2**29, 5e12)] == ["0.1 MiB", "0.5 GiB", "4,656.6 GiB"]
    assert described(OSError(errno.EIO, "Input/output error", "/x")) == "/x: Input/output error"
    assert described(ValueError("a\n b")) == "ValueError: a b" and described(TrainingError("why")) == "why"
