"""`doctor` names machines that are unfit for a run or differ from the others, and faults of the network."""

import platform
import re
import socket
import time
from dataclasses import replace
from importlib import metadata

import pytest
import torch
import torch.distributed as dist

from megatron_lite.doctor import machine as doctor_machine
from megatron_lite.doctor import network as doctor_network
from megatron_lite.doctor.network import ADVICE
from megatron_lite.parallel.dtypes import PRECISIONS
from tests.helpers.command import make_corpus, run, tiny_yaml
from tests.helpers.doctor_ranks import A, B, Doctor, examine_rank, failed, patched


@pytest.fixture
def doctor(ranks, tmp_path) -> Doctor:
    """A doctor without a config, which examines only the machines."""
    return Doctor(ranks, tmp_path, None)


def assert_lines(lines: list[str], patterns: list[str]) -> None:
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_command_examines_all_that_a_run_uses_and_leaves_no_files(tmp_path):
    """A user relies on these lines before a long run."""
    (tmp_path / "data").mkdir()
    config = tiny_yaml(tmp_path, make_corpus(tmp_path / "data"), parallel={"pipeline": 2})
    before = sorted(tmp_path.rglob("*"))
    done = run("doctor", "--config", str(config), "--nproc-per-node", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done
    host, speed = re.escape(socket.gethostname()), r"latency [0-9.]+ (us|ms), [0-9.]+ [MG]B/s"
    assert_lines(
        done.stdout.splitlines(),
        [
            rf" ok    rendezvous: 2 ranks on {host} are connected at 127.0.0.1:\d+, Gloo through lo",
            rf" ok    versions: python 3\S+, torch {re.escape(torch.__version__)}, megatron_lite .*"
            r"\(sources [0-9a-f]{8}\).*; the same on every rank",
            rf" ok    devices: {host}: 2 ranks, \d+ cores?, [0-9.]+ GiB of memory, .*GPU.*",
            r" (ok|warn)  +limits: .*",
            r" (ok|warn)  +open files: this layout needs about 52 on rank 0 of .*",
            r" ok    arithmetic: a product of matrices in fp32, 256 x 256 x 256, is exact on every rank",
            rf" ok    all-reduce over pp, embd, world: ranks 0 and 1: {speed}",
            rf" ok    pipeline neighbours: ranks 0 and 1: {speed}",
            r" ok    tokenizer: bytes: 257 ids, the same on every rank",
            rf" ok    memory: {host} has [0-9.]+ GiB; the training state takes [0-9.]+ MiB, activations roughly "
            r"[0-9.]+ MiB",
            r" ok    data: 1 corpus, [0-9,]+ tokens, 0.\d MiB, readable on every rank; training reads 1,024 "
            r"\(0\.\d+ epochs\)",
            rf" ok    index files: {tmp_path}/data/cache: can be written",
            rf" ok    run.dir: {tmp_path}/run: every rank can write there, and sees what the first one wrote",
            rf" ok    disk: [0-9,.]+ GiB free for {tmp_path}/run; a checkpoint takes about 0.6 MiB, and at most "
            "4 exist at a time",
            r" ok    start: at iteration 0, for run.dir has no checkpoint",
            r"15 checks passed(, [12] with a warning)?",
        ],
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_config_only_the_machines_are_examined(doctor):
    lines = doctor()
    assert_lines(
        lines[:-2],
        [
            r" ok    rendezvous: 2 ranks on host-a and host-b are connected",
            r" ok    versions: .*; the same on every rank",
            r" ok    devices: host-a and host-b, each: 1 rank, .*",
            r" ok    limits: 1 thread for each rank, /dev/shm with .* free",
            r" ok    open files: this layout needs about 47 on rank 0 of host-a, and the limit is [0-9,]+",
            r" ok    arithmetic: .*",
            r" ok    clocks: 2 hosts agree to 0\.\d\d\d s",
            r" ok    all-reduce over dp, world: ranks 0 and 1: .*",
        ],
    )
    assert lines[-2:] == [" skip  tokenizer, data, index files: data.paths is not given", "8 checks passed"]


def another_machine():
    """A machine with other packages, few open files, many threads, memory that flips bits and a wrong clock."""
    installed, look_around = doctor_machine.installed(), doctor_machine.look_around
    now, all_reduce = time.time, doctor_network.all_reduce

    def wrong_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = left @ right
        product[3, 5] += 1
        return product

    return patched(
        (doctor_machine, "installed", lambda: {**installed, "torch": "2.0", "python": "3.9"}),
        (
            doctor_machine,
            "look_around",
            lambda config: replace(look_around(config), open_files=256, cores=1, threads=4),
        ),
        (doctor_machine, "product", wrong_product),
        (time, "time", lambda: now() - 90),
        (doctor_network, "all_reduce", lambda x, group: all_reduce(x, group) + (x.numel() == 1024)),
    )


def test_all_differences_of_a_machine_are_reported(doctor):
    """After each failed check, both ranks must continue with the next one."""
    torch_here, python_here = re.escape(torch.__version__), re.escape(platform.python_version())
    assert_lines(
        doctor.not_ok(fault=another_machine),
        [
            rf" warn  versions: python is {python_here} on {A} and 3.9 on {B}; install the same everywhere",
            rf" warn  versions: torch is {torch_here} on {A} and 2.0 on {B}; install the same everywhere",
            r" warn  limits: host-b: 4 threads of 1 rank on 1 core wait for each other; set OMP_NUM_THREADS=1",
            r" warn  open files: this layout needs about 46 on rank 1 of host-b, and the limit is 256; .*",
            rf" FAIL  arithmetic: {B}: 1 of 65,536 values of a matrix product on cpu are wrong; take that host out of "
            "the run and have its memory and device tested",
            r" warn  clocks: host-b is 90.\d s behind host-a; set them by NTP, or times in logs and of files mislead",
            rf" FAIL  all-reduce over dp, world: {B}: 1,024 of 5,120 sums over ranks 0 and 1 are wrong; "
            + re.escape(ADVICE),
            r" skip  .*",
            failed(2, 9),
        ],
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_the_tested_product_is_exact_in_every_precision(precision):
    """Otherwise a rounding difference would make a healthy machine fail."""
    dtype = PRECISIONS[precision]
    seen: list[torch.Tensor] = []

    def record(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append(left @ right)
        return seen[0]

    with patched((doctor_machine, "product", record)):
        doctor_machine.multiply(torch.device("cpu"), dtype)
    assert seen[0].unique().numel() > 10  # with equal values, rows in another order would pass too


def without_deepspeed():
    version = metadata.version

    def version_without_deepspeed(name: str) -> str:
        if name == "deepspeed":
            raise metadata.PackageNotFoundError
        return version(name)

    return patched((metadata, "version", version_without_deepspeed))


def test_missing_deepspeed_is_a_failure_only_if_the_config_uses_it(doctor):
    assert doctor.not_ok("parallel.ddp=deepspeed", fault=without_deepspeed)[1:2] == [
        f" FAIL  deepspeed: {B}: parallel.ddp is deepspeed, which is not installed; install it (pip install "
        "'deepspeed>=0.19.8,<0.20'), or use parallel.ddp: fsdp"
    ]
    lines = doctor(fault=without_deepspeed, faulty_ranks=(0, 1))
    assert "deepspeed" not in "".join(lines) and lines[-1] == "8 checks passed"


def without_optional_packages():
    """An environment without the packages that training can do without."""
    return patched((doctor_machine, "find_spec", lambda name: None))


def test_doctor_says_what_training_does_without_a_package(doctor):
    missing = "zlib_ng missing (zlib computes checksums, slower), tensorboard missing (no TensorBoard files)"
    assert any(missing in line for line in doctor(fault=without_optional_packages, faulty_ranks=(0, 1)))


def one_gpu():
    """The second rank of a host with one GPU."""
    installed = doctor_machine.installed()
    return patched(
        (doctor_machine, "installed", lambda: installed),
        (doctor_machine, "local_rank", lambda: 1),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
    )


def test_a_rank_without_a_gpu_fails_and_checks_on_devices_are_skipped(doctor):
    """In NCCL, the other ranks would wait for that rank."""
    assert doctor.not_ok(fault=one_gpu) == [
        f" FAIL  devices: {B}: this machine has 1 GPU for at least 2 processes; start at most 1 (--nproc-per-node 1), "
        "or train on the CPU with run.device=cpu",
        " skip  arithmetic, network: every rank needs a device for them",
        " skip  tokenizer, data, index files: data.paths is not given",
        failed(1, 3),
    ]


def broken():
    """A device whose matrix product raises, and messages that change in transit."""

    def product(left, right):
        raise RuntimeError("illegal instruction\nin line 2")

    send = dist.isend
    return patched(
        (doctor_machine, "product", product),
        (dist, "isend", lambda tensor, peer, group: send(tensor + 1, peer, group=group)),
    )


def test_a_check_that_raises_is_reported_as_a_failure(doctor):
    assert doctor.not_ok("parallel.pipeline=2", fault=broken) == [
        f" FAIL  arithmetic: {B}: RuntimeError: illegal instruction in line 2; take that host out of the run and have "
        "its memory and device tested",
        f" FAIL  pipeline neighbours: {A}: messages between ranks 0 and 1 came back changed; {ADVICE}",
        " skip  tokenizer, data, index files: data.paths is not given",
        failed(2, 9),
    ]


def silent():
    """A rank that does not take part in the measured all-reduce."""
    return patched((doctor_network, "all_reduce_speed", lambda group, device: None))


def test_a_rank_that_does_not_answer_is_reported_and_the_checks_continue(doctor):
    lines = doctor.not_ok("train.comm_timeout=8", fault=silent)
    assert_lines(
        lines,
        [
            rf" FAIL  all-reduce over dp, world: {A}: ranks 0 and 1 did not hear from each other: .*Timed out waiting "
            rf"4000ms.*; {re.escape(ADVICE)}",
            r" skip  .*",
            failed(1, 8),
        ],
    )


def stuck():
    """A rank that is busy for longer than the others wait."""
    return patched((doctor_machine, "multiply", lambda device, dtype: time.sleep(8)))


def test_the_check_in_which_a_rank_hangs_is_reported(ranks, tmp_path):
    """A rank can hang in a file system. Without this line, the user would not know in which check."""
    folders, given = (tmp_path, tmp_path), ["train.comm_timeout=5"]
    (lines, error), (other_lines, other_error) = ranks(2, examine_rank, folders, None, given, stuck, (1,))
    message = r"rank 0 got no answer in all_gather_objects over world \(ranks 0 and 1\): rank 1 sent no heartbeat for 5"
    assert re.match(f" FAIL  arithmetic: {message}", lines[-1]) and re.match(message, error)
    assert other_lines == [] and other_error.startswith("rank 1 got no answer in ")


def without_groups():
    """No process group can be created."""

    def new_group(ranks, timeout_seconds, *, backend):
        raise RuntimeError("no interface eth7")

    return patched((doctor_network, "new_group", new_group))


def test_groups_that_cannot_be_created_fail_and_are_not_measured(doctor):
    lines = doctor.not_ok(fault=without_groups, faulty_ranks=(0, 1))
    assert lines[0] == f" FAIL  groups: {A} and {B}: RuntimeError: no interface eth7; {ADVICE}"
    assert lines[-1] == failed(1, 8)
